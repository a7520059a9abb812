/* The simulated GPU: the functions of NVIDIA's libraries that torch, Triton and NCCL's process group call.
 *
 * Nothing is computed. Kernels, matmuls, collectives and events are written to a log, one line each. Memory is reserved
 * as address space; only small copies and fills are carried out. compute.py computes on this memory, and sets
 *     DRY_GPU_COMPUTE=1      copies and fills of any size are carried out
 *     DRY_GPU_SHARED=FILE    the ranks of this machine exchange messages through this file
 *     DRY_GPU_POISON=1       memory starts as NaN
 *     DRY_GPU_USES=1         the log has USE lines, for order.py
 * `setup` builds this file as one library and links it
 * under all library names that torch loads. It adds a stub for every other function that torch uses; stubs return
 * success. Functions declare only the leading arguments that they read, which works because the caller clears the stack.
 *
 * Lines of the log $DRY_GPU_LOG have fields separated by tabs: stream, kind, name, numbers. The numbers by kind:
 *     KERNEL, TRITON    grid x, y, z; threads per block; bytes of dynamic shared memory
 *     GEMM              m, n, k, batch; the name is the dtype of the factors
 *     COPY, FILL        bytes
 *     NCCL              bytes, communicator; for a collective, the bytes of the whole buffer over all ranks; for a
 *                       group of messages (exchange), the bytes that this rank sends
 *     EVENT, WAIT       event (recorded; waited for by the stream)
 *     SYNC              none; the host waits for the GPU
 *     USE               begin and end of a range of GPU memory, 1 if written
 *     ALLOC, FREE, OOM  bytes, bytes in use
 *     MODULE            of a loaded kernel: registers, bytes of stack (spills), bytes of static shared memory
 * rank0.py writes lines of other kinds by dry_gpu_mark.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <elf.h>
#include <fcntl.h>
#include <library_types.h>
#include <pthread.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GIVES(function, type, value) int function(type *out) { *out = value; return 0; }
#define GIVES_SECOND(function, type, value) int function(void *first, type *out) { *out = value; return 0; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *file;

#define SAY(stream, kind, name, ...) say(stream, kind, name, (long[]){__VA_ARGS__ __VA_OPT__(,) -1})

static int say(const void *stream, const char *kind, const char *name, const long *numbers) { /* ends with -1 */
    pthread_mutex_lock(&lock);
    if (!file) file = fopen(getenv("DRY_GPU_LOG") ?: "/dev/null", "w");
    fprintf(file, "%lx\t%s\t%s", (long)stream, kind, name);
    while (*numbers >= 0) fprintf(file, "\t%ld", *numbers++);
    putc('\n', file);
    pthread_mutex_unlock(&lock);
    return 0;
}
void dry_gpu_mark(const char *kind, const char *rest) { SAY(0, kind, rest); }
void dry_gpu_flush(void) { if (file) fflush(file); }

/* ---- the GPU: one of six, by its compute capability */

static long setting(const char *name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }

/* Attributes that torch and Triton read, with their places in cudaDeviceProp and their values on each GPU. Places are those of CUDA
 * 13, which torch is built for; the headers, which are Triton's, may be those of CUDA 12. */
enum { NAME = 0, MEMORY = 288, MAX_THREADS_DIM = 324, MAX_GRID_SIZE = 336, PROPERTIES_BYTES = 1008 };
enum { CARDS = 6 };
/* A100, RTX 3090, RTX 4090, H100, B200, RTX 5090 */
static const int capability[CARDS] = {80, 86, 89, 90, 100, 120};
#define EACH(value) {value, value, value, value, value, value}
static const struct { enum cudaDeviceAttr which; int place, of[CARDS]; } card[] = {
    {cudaDevAttrComputeCapabilityMajor, 360, {8, 8, 8, 9, 10, 12}},
    {cudaDevAttrComputeCapabilityMinor, 364, {0, 6, 9, 0, 0, 0}},
    {cudaDevAttrMultiProcessorCount, 384, {108, 82, 128, 132, 148, 170}},
    {cudaDevAttrWarpSize, 308, EACH(32)},
    {cudaDevAttrMaxThreadsPerBlock, 320, EACH(1024)},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 604, {2048, 1536, 1536, 2048, 2048, 1536}},
    {cudaDevAttrMaxGridDimX, MAX_GRID_SIZE, EACH(0x7fffffff)},
    {cudaDevAttrMaxRegistersPerBlock, 304, EACH(65536)},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 632, EACH(65536)},
    {cudaDevAttrMaxSharedMemoryPerBlock, 296, EACH(48 << 10)},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 672, {163 << 10, 99 << 10, 99 << 10, 227 << 10, 227 << 10, 99 << 10}},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 624, {164 << 10, 100 << 10, 100 << 10, 228 << 10, 228 << 10, 100 << 10}},
    {cudaDevAttrL2CacheSize, 596, {40 << 20, 6 << 20, 72 << 20, 50 << 20, 126 << 20, 96 << 20}},
    {cudaDevAttrGlobalMemoryBusWidth, 592, {5120, 384, 384, 5120, 8192, 512}},
    {cudaDevAttrMemoryClockRate, 784, {1593000, 9751000, 10501000, 2619000, 3996000, 14001000}}}; /* no field since CUDA 13 */
enum { FIGURES = sizeof card / sizeof *card };

static int figure(int i) {
    int chosen = 0;
    while (capability[chosen] != setting("DRY_GPU_ARCH", 90)) chosen++;
    return card[i].of[chosen];
}
static int attribute(enum cudaDeviceAttr which) {
    for (int i = 0; i < FIGURES; i++)
        if (card[i].which == which) return figure(i);
    return 0;
}
static size_t capacity(void) { return setting("DRY_GPU_MEMORY", 85028634624L); }

#undef cudaGetDeviceProperties
int cudaGetDeviceProperties(char *p) {
    strcpy((char *)memset(p, 0, PROPERTIES_BYTES) + NAME, "GPU that computes nothing");
    *(size_t *)(p + MEMORY) = capacity();
    memcpy(p + MAX_THREADS_DIM, (int[]){1024, 1024, 64}, 3 * sizeof(int));
    memcpy(p + MAX_GRID_SIZE, (int[]){0, 65535, 65535}, 3 * sizeof(int));
    for (int i = 0; i < FIGURES; i++) *(int *)(p + card[i].place) = figure(i);
    return 0;
}
int cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which) { *value = attribute(which); return 0; }
int cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = !visible || *visible;
    return 0;
}
GIVES(cudaGetDevice, int, 0)
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }

/* ---- address map: an address belongs to an allocation or to one of torch's own kernels */

struct Thing { const char *at; size_t bytes; int type; const char *name; };
static void *things; /* tree of tsearch */

static int compare(const void *a, const void *b) { /* overlapping ranges are equal */
    const struct Thing *x = a, *y = b;
    return x->at + x->bytes <= y->at ? -1 : x->at >= y->at + y->bytes;
}
static void remember(struct Thing thing) {
    pthread_mutex_lock(&lock);
    tsearch(memcpy(malloc(sizeof thing), &thing, sizeof thing), &things, compare);
    pthread_mutex_unlock(&lock);
}
static struct Thing find(const void *at) {
    pthread_mutex_lock(&lock);
    struct Thing **found = tfind(&(struct Thing){at, 1}, &things, compare);
    struct Thing thing = found ? **found : (struct Thing){0};
    pthread_mutex_unlock(&lock);
    return thing;
}
static void forget(struct Thing thing) {
    pthread_mutex_lock(&lock);
    tdelete(&thing, &things, compare);
    pthread_mutex_unlock(&lock);
}

/* ---- memory: address space, which uses host memory only when it is written */

enum { HOST = cudaMemoryTypeHost, DEVICE = cudaMemoryTypeDevice };
static size_t used = 512 << 20; /* memory of the CUDA context */

static int allocate(void **at, size_t bytes, int type, const char *function) {
    if (type == DEVICE && used + bytes > capacity()) {
        SAY(0, "OOM", function, bytes, used);
        return cudaErrorMemoryAllocation;
    }
    *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (getenv("DRY_GPU_POISON")) memset(*at, 0xff, bytes);
    remember((struct Thing){*at, bytes, type});
    used += type == DEVICE ? bytes : 0;
    return SAY(0, "ALLOC", function, bytes, used);
}
int cudaMalloc(void **at, size_t bytes) { return allocate(at, bytes, DEVICE, "cudaMalloc"); }
int cudaHostAlloc(void **at, size_t bytes) { return allocate(at, bytes, HOST, "cudaHostAlloc"); }
int cudaFree(void *at) {
    struct Thing memory = find(at);
    if (!memory.at) return 0;
    forget(memory);
    munmap(at, memory.bytes);
    used -= memory.type == DEVICE ? memory.bytes : 0;
    return SAY(0, "FREE", "cudaFree", memory.bytes, used);
}
int cudaFreeHost(void *at) { return cudaFree(at); }

/* Virtual memory, which torch's expandable segments use: a reserved range of addresses in which pieces of memory are mapped. A handle is
 * the size of its piece. */
enum { GRANULARITY = 2 << 20, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
int cuMemGetAllocationGranularity(size_t *size, const void *properties, int kind) { *size = GRANULARITY; return 0; }
int cuMemAddressReserve(char **at, size_t bytes, size_t alignment, void *wanted, long flags) {
    *at = mmap(0, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at += -(size_t)*at % GRANULARITY;
    return 0;
}
int cuMemAddressFree(char *at, size_t bytes) { munmap(at, bytes); return 0; }
int cuMemCreate(size_t *handle, size_t bytes, const void *properties, long flags) {
    if (used + bytes > capacity()) {
        SAY(0, "OOM", "cuMemCreate", bytes, used);
        return OUT_OF_MEMORY;
    }
    used += *handle = bytes;
    return SAY(0, "ALLOC", "cuMemCreate", bytes, used);
}
int cuMemRelease(size_t handle) {
    used -= handle;
    return SAY(0, "FREE", "cuMemRelease", handle, used);
}
int cuMemMap(void *at, size_t bytes, size_t offset, size_t handle, long flags) {
    mprotect(at, bytes, PROT_READ | PROT_WRITE);
    if (getenv("DRY_GPU_POISON")) memset(at, 0xff, bytes);
    remember((struct Thing){at, bytes, DEVICE});
    return 0;
}
int cuMemUnmap(void *at, size_t bytes) {
    forget(find(at));
    mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0); /* drops what was written */
    return 0;
}
int cuMemSetAccess(void *at, size_t bytes, const void *access, size_t count) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the simulated driver"; return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; } /* torch has written "not supported" there */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = &used; return 0; }
/* NVML_ERROR_NOT_SUPPORTED */
#define LACKS(function) int function(void) { return 3; }
LACKS(nvmlDeviceGetNvLinkRemoteDeviceType)
LACKS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
LACKS(nvmlDeviceGetComputeRunningProcesses)
LACKS(nvmlSystemGetCudaDriverVersion)
LACKS(nvmlSystemGetCudaDriverVersion_v2)
static int unsupported(void) { return NOT_SUPPORTED; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, int version, long flags, int *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = unsupported;
    if (found) *found = 0;
    return 0;
}
int cudaMemGetInfo(size_t *free, size_t *total) { *total = capacity(); *free = *total - used; return 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
    int type = find(at).type;
    *a = (struct cudaPointerAttributes){.type = type, .device = type ? 0 : -2, .devicePointer = type ? (void *)at : 0,
                                        .hostPointer = type == HOST ? (void *)at : 0};
    return 0;
}

/* Small copies are carried out, so the host can read back numbers that it sent. */
static int carried_out(size_t bytes) { return bytes <= 1 << 20 || getenv("DRY_GPU_COMPUTE"); }
void dry_gpu_use(const void *stream, const char *name, const void *at, size_t bytes, int written) {
    if (bytes && getenv("DRY_GPU_USES") && find(at).type == DEVICE)
        SAY(stream, "USE", name, (long)at, (long)at + (long)bytes, written);
}
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    static const char *places[] = {"pageable", "pinned", "device"};
    char way[32];
    snprintf(way, sizeof way, "%s to %s", places[find(from).type], places[find(to).type]);
    if (carried_out(bytes)) memcpy(to, from, bytes);
    dry_gpu_use(stream, way, from, bytes, 0), dry_gpu_use(stream, way, to, bytes, 1);
    return SAY(stream, "COPY", way, bytes);
}
int cudaMemcpy(void *to, const void *from, size_t bytes, int kind) {
    SAY(0, "SYNC", "cudaMemcpy");
    return cudaMemcpyAsync(to, from, bytes, kind, 0);
}
int cudaMemsetAsync(void *at, int byte, size_t bytes, void *stream) {
    if (carried_out(bytes)) memset(at, byte, bytes);
    dry_gpu_use(stream, "fill", at, bytes, 1);
    return SAY(stream, "FILL", "", bytes);
}

/* ---- streams and events */

static void *new_handle(void) { static long last; return (void *)__sync_add_and_fetch(&last, 16); }

#define WAITS(function) int function(void *stream) { return SAY(stream, "SYNC", #function); }
WAITS(cudaDeviceSynchronize)
WAITS(cudaStreamSynchronize)
WAITS(cudaEventSynchronize)
GIVES(cudaStreamCreateWithPriority, void *, new_handle())
GIVES(cudaEventCreateWithFlags, void *, new_handle())
GIVES(cudaEventElapsedTime, float, 0.01f)
GIVES_SECOND(cudaStreamIsCapturing, int, 0)
GIVES_SECOND(cudaStreamGetCaptureInfo, int, 0)
int cudaEventRecord(void *event, void *stream) { return SAY(stream, "EVENT", "", (long)event); }
int cudaEventRecordWithFlags(void *event, void *stream) { return cudaEventRecord(event, stream); }
int cudaStreamWaitEvent(void *stream, void *event) { return SAY(stream, "WAIT", "", (long)event); }

/* ---- kernels in torch's own libraries, which register their names */

static void refuse(const char *what, long seen) {
    fprintf(stderr, "device.c: error: %s (%ld) is not emulated\n", what, seen);
    _exit(1);
}

void __cudaRegisterFunction(void **module, const void *function, char *device, const char *name) {
    remember((struct Thing){function, 1, .name = name});
}
void **__cudaRegisterFatBinary(void) { static void *handle; return &handle; }

static __thread struct Launch { dim3 grid, block; size_t shared; void *stream; } pushed[8];
static __thread int depth;
int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed[depth++] = (struct Launch){grid, block, shared, stream};
    return 0;
}
int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    struct Launch l = pushed[--depth];
    *grid = l.grid, *block = l.block, *shared = l.shared, *stream = l.stream;
    return 0;
}

/* Small fills are carried out, because Inductor's constant folding reads constants that it filled on the GPU. The
 * kernel's arguments are count, value, destination. */
static void fill(const char *name, void **args) {
    const char *type = strstr(name, "FillFunctorI");
    if (!type || !strstr(name, "vectorized_elementwise_kernel")) return;
    type += strlen("FillFunctorI");
    int width = strchr("bha", *type) ? 1 : strchr("st", *type) || !strncmp(type, "N3c108BFloat16", 14) ? 2
                : strchr("ijf", *type) ? 4 : strchr("lmd", *type) ? 8 : 0;
    for (long i = 0, count = *(int *)args[0]; i < count && count <= 1 << 15; i++)
        memcpy(*(char **)args[2] + i * width, args[1], width);
}
int cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    const char *name = find(function).name ?: "?";
    if (getenv("DRY_GPU_COMPUTE")) refuse(name, grid.x); /* aten.py has no operator for it, or the wrong key */
    fill(name, args);
    return SAY(stream, "KERNEL", name, grid.x, grid.y, grid.z, block.x * block.y * block.z, shared);
}
int __cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, void *stream) {
    return cudaLaunchKernel(f, grid, block, args, shared, stream);
}
int cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return 0; }
int cudaFuncGetAttributes(struct cudaFuncAttributes *a) {
    *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90,
                                     .maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)};
    return 0;
}
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int, 4)

/* ---- the driver: kernels that are compiled at run time */

struct Kernel { int registers, stack, shared; char name[]; };

GIVES(cuCtxGetCurrent, void *, &used)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuDeviceGet, int, 0)
int cuDevicePrimaryCtxGetState(int device, int *flags, int *active) { *active = 1; return 0; }
int cuDeviceGetAttribute(int *value, enum cudaDeviceAttr which) { *value = attribute(which); return 0; }
int cuPointerGetAttribute(void **value, int which, void *at) { *value = at; return 0; }
int cuModuleLoadData(const void **module, const void *image) { *module = image; return 0; }
int cuModuleLoad(void **module, const char *path) {
    int cubin = open(path, O_RDONLY);
    *module = mmap(0, lseek(cubin, 0, SEEK_END), PROT_READ, MAP_PRIVATE, cubin, 0);
    return close(cubin);
}

/* The image is a cubin, which is an ELF file. The entries of section .nv.info state the kernel's resources. An entry
 * has a byte of format, a byte of kind and two bytes of size. In format 4 that many bytes follow: here the kernel's
 * symbol index and the value. */
int cuModuleGetFunction(struct Kernel **function, const char *image, const char *name) {
    struct Kernel *kernel = *function = calloc(1, sizeof *kernel + strlen(name) + 1);
    strcpy(kernel->name, name);
    const Elf64_Ehdr *header = (void *)image;
    const Elf64_Shdr *sections = (void *)(image + header->e_shoff);
    for (const Elf64_Shdr *section = sections; section < sections + header->e_shnum; section++) {
        const char *title = image + sections[header->e_shstrndx].sh_offset + section->sh_name;
        if (!strncmp(title, ".nv.shared.", 11)) kernel->shared += section->sh_size;
        if (strcmp(title, ".nv.info")) continue;
        enum { SIZED = 4, STACK = 0x11, REGISTERS = 0x2f };
        const unsigned char *at = (void *)(image + section->sh_offset), *end = at + section->sh_size;
        for (int size; at < end; at += 4 + size) {
            size = at[0] == SIZED ? at[2] | at[3] << 8 : 0;
            if (size == 8 && at[1] == STACK) kernel->stack = *(int *)(at + 8);
            if (size == 8 && at[1] == REGISTERS) kernel->registers = *(int *)(at + 8);
        }
    }
    return SAY(0, "MODULE", name, kernel->registers, kernel->stack, kernel->shared);
}
int cuFuncGetAttribute(int *value, int which, const struct Kernel *kernel) {
    enum { THREADS = 0, SHARED = 1, LOCAL = 3, REGISTERS = 4 };
    *value = which == THREADS ? 1024 : which == SHARED ? kernel->shared : which == LOCAL ? kernel->stack
             : which == REGISTERS ? kernel->registers : 0;
    return 0;
}
struct Configuration { unsigned grid[3], block[3], shared; void *stream; };
int cuLaunchKernelEx(const struct Configuration *c, const struct Kernel *k) {
    return SAY(c->stream, "TRITON", k->name, c->grid[0], c->grid[1], c->grid[2],
               c->block[0] * c->block[1] * c->block[2], c->shared);
}
int cuLaunchKernel(const struct Kernel *k, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void *stream) {
    return SAY(stream, "TRITON", k->name, x, y, z, block_x * block_y * block_z, shared);
}

/* ---- cuBLAS and cuBLASLt: D [m, n] = A [m, k] B [k, n], column-major */

static __thread void *blas_stream;

static int product(void *stream, cudaDataType type, long m, long n, long k, long batch) {
    const char *name = type == CUDA_R_16BF ? "bf16" : type == CUDA_R_16F ? "fp16" : type == CUDA_R_32F ? "fp32"
                       : type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 ? "fp8" : "other";
    return SAY(stream, "GEMM", name, m, n, k, batch);
}
GIVES(cublasCreate_v2, void *, &used)
GIVES_SECOND(cublasGetMathMode, int, 0)
int cublasSetStream_v2(void *handle, void *stream) { blas_stream = stream; return 0; }

#define PRODUCT(function, type, batch, ...) \
    int function(void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a __VA_OPT__(,) __VA_ARGS__) { \
        return product(blas_stream, type, m, n, k, batch); \
    }
PRODUCT(cublasSgemm_v2, CUDA_R_32F, 1)
PRODUCT(cublasGemmEx, type, 1, cudaDataType type)
PRODUCT(cublasSgemmStridedBatched, CUDA_R_32F, batch, int lda, long sa, void *b, int ldb, long sb, void *beta, void *c,
        int ldc, long sc, int batch)
PRODUCT(cublasGemmStridedBatchedEx, type, batch, cudaDataType type, int lda, long sa, void *b, int type_b, int ldb,
        long sb, void *beta, void *c, int type_c, int ldc, long sc, int batch)

/* A layout contains (type, rows, columns). A matmul descriptor states whether A is transposed. */
struct Layout { long type, rows, columns; };

GIVES(cublasLtMatmulDescCreate, void *, calloc(1, sizeof(int)))
int cublasLtMatrixLayoutCreate(struct Layout **layout, int type, long rows, long columns) {
    *layout = malloc(sizeof **layout);
    **layout = (struct Layout){type, rows, columns};
    return 0;
}
int cublasLtMatmulDescSetAttribute(int *transposed, int which, const int *value) {
    enum { TRANSPOSE_A = 3 };
    if (which == TRANSPOSE_A) *transposed = *value;
    return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void *h, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    memset(results, 0, 96); /* the first result; all zeros means success */
    *found = 1;
    return 0;
}
int cublasLtMatmul(void *h, const int *transposed, void *alpha, void *A, const struct Layout *a, void *B, void *b,
                   void *beta, void *C, void *c, void *D, const struct Layout *d, void *algorithm, void *workspace,
                   size_t bytes, void *stream) {
    return product(stream, a->type, d->rows, d->columns, *transposed ? a->rows : a->columns, 1);
}

/* ---- NCCL. Without a shared file this process is rank 0 and receives nothing. With one, a call returns when its data
 * are there. The file holds the state of a barrier, a buffer per rank and a mailbox per pair of ranks. */

enum { ROOM = 64 << 20, MAX_RANKS = 8, TYPES = 12 };
static const int type_bytes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */
enum { INT64 = 4, FLOAT16 = 6, FLOAT32, FLOAT64, BFLOAT16 };
static int group_ranks, group_rank;
static struct Shared { int arrived, round, full[MAX_RANKS][MAX_RANKS]; size_t bytes[MAX_RANKS][MAX_RANKS]; } *shared;

GIVES(ncclGetVersion, int, 22907)
GIVES_SECOND(ncclCommGetAsyncError, int, 0)

struct Id { char bytes[128]; };
int ncclCommInitRankConfig(void **comm, int ranks, struct Id id, int rank) {
    *comm = new_handle(), group_ranks = ranks, group_rank = rank;
    const char *path = getenv("DRY_GPU_SHARED");
    if (!path) return 0;
    if (ranks > MAX_RANKS) refuse("number of ranks", ranks);
    size_t bytes = 4096 + (size_t)ROOM * (ranks + ranks * ranks); /* a sparse file */
    int opened = open(path, O_RDWR | O_CREAT, 0600);
    if (opened < 0 || ftruncate(opened, bytes)) refuse("a shared file that does not open; status", opened);
    shared = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    return close(opened);
}
static char *room(int index, size_t bytes) {
    if (bytes > ROOM) refuse("a message; its bytes", bytes);
    return (char *)shared + 4096 + (size_t)index * ROOM;
}
static void await(int *flag, int value) { while (__atomic_load_n(flag, __ATOMIC_SEQ_CST) != value) usleep(100); }
static void barrier(void) {
    int round = __atomic_load_n(&shared->round, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&shared->arrived, 1, __ATOMIC_SEQ_CST) < group_ranks)
        return await(&shared->round, round + 1);
    __atomic_store_n(&shared->arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&shared->round, round + 1, __ATOMIC_SEQ_CST);
}

/* Sum element i of all ranks' buffers, in the order of ranks and in the precision of the type (bf16: float32). */
#define SUM(type) { \
        type sum = 0; \
        for (int r = 0; r < group_ranks; r++) sum += ((type *)room(r, 0))[i]; \
        ((type *)out)[at] = sum; \
    }
static void sum_over_ranks(void *out, size_t first, size_t count, int type) {
    for (size_t at = 0, i = first; at < count; at++, i++) {
        if (type == FLOAT32) SUM(float)
        else if (type == FLOAT64) SUM(double)
        else if (type == FLOAT16) refuse("a sum of type", type);
        else if (type == BFLOAT16) {
            float sum = 0;
            for (int r = 0; r < group_ranks; r++) {
                unsigned bits = (unsigned)((unsigned short *)room(r, 0))[i] << 16;
                sum += *(float *)memcpy(&(float){0}, &bits, 4);
            }
            unsigned bits = *(unsigned *)memcpy(&(unsigned){0}, &sum, 4);
            ((unsigned short *)out)[at] = sum == sum ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
        } else if (type_bytes[type] == 8) SUM(long)
        else if (type_bytes[type] == 4) SUM(int)
        else SUM(char)
    }
}

/* Give `given` elements to all ranks; take the sum over ranks (this rank's part, if fewer are taken), or all ranks'. */
static int collective(void *comm, void *stream, const char *name, const void *in, void *out, size_t given, size_t taken,
                      int type, int op, int sums) {
    size_t width = type_bytes[type];
    dry_gpu_use(stream, name, in, given * width, 0), dry_gpu_use(stream, name, out, taken * width, 1);
    if (shared) {
        if (sums && op) refuse("reduction", op);
        memcpy(room(group_rank, given * width), in, given * width), barrier();
        if (sums) sum_over_ranks(out, given > taken ? group_rank * taken : 0, taken, type);
        else for (int r = 0; r < group_ranks; r++) memcpy((char *)out + r * given * width, room(r, 0), given * width);
        barrier();
    }
    return SAY(stream, "NCCL", name, (given > taken ? given : taken) * width, (long)comm);
}
int ncclAllReduce(void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
    return collective(comm, stream, "all-reduce", in, out, count, count, type, op, 1);
}
int ncclReduceScatter(void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
    return collective(comm, stream, "reduce-scatter", in, out, count * group_ranks, count, type, op, 1);
}
int ncclAllGather(void *in, void *out, size_t count, int type, void *comm, void *stream) {
    return collective(comm, stream, "all-gather", in, out, count, count * group_ranks, type, 0, 0);
}
int ncclBcast(void *at, size_t count, int type, int root, void *comm, void *stream) {
    size_t bytes = count * type_bytes[type];
    dry_gpu_use(stream, "broadcast", at, bytes, group_rank != root);
    if (!shared) return 0;
    if (group_rank == root) memcpy(room(root, bytes), at, bytes);
    barrier();
    if (group_rank != root) memcpy(at, room(root, bytes), bytes);
    barrier();
    return 0;
}

/* Messages: all of a group are sent before any is received, as if each rank had a buffer for one message per peer. The
 * log has one line per group, with the bytes that this rank sends. */
static __thread struct Message { void *at; size_t bytes; int peer, received; } messages[2 * MAX_RANKS];
static __thread int grouped, waiting;
static __thread size_t group_sent;
static __thread void *group_stream, *group_comm;

static void deliver(int receives) {
    for (struct Message *m = messages; m < messages + waiting; m++) {
        int from = m->received ? m->peer : group_rank, to = m->received ? group_rank : m->peer;
        char *box = room(group_ranks + from * group_ranks + to, m->bytes);
        if (m->received != receives) continue;
        await(&shared->full[from][to], receives);
        if (receives && shared->bytes[from][to] != m->bytes) refuse("a message of another size;", m->bytes);
        shared->bytes[from][to] = m->bytes;
        receives ? memcpy(m->at, box, m->bytes) : memcpy(box, m->at, m->bytes);
        __atomic_store_n(&shared->full[from][to], !receives, __ATOMIC_SEQ_CST);
    }
}
int ncclGroupStart(void) { grouped++; return 0; }
int ncclGroupEnd(void) {
    if (--grouped) return 0;
    if (group_sent) SAY(group_stream, "NCCL", "exchange", group_sent, (long)group_comm);
    if (waiting) deliver(0), deliver(1);
    return group_sent = waiting = 0;
}
static int message(void *at, size_t bytes, int peer, int received, void *comm, void *stream) {
    dry_gpu_use(stream, received ? "receive" : "send", at, bytes, received);
    ncclGroupStart();
    if (!received) group_stream = stream, group_comm = comm, group_sent += bytes;
    if (shared && waiting == 2 * MAX_RANKS) refuse("a group of messages above", waiting);
    if (shared) messages[waiting++] = (struct Message){at, bytes, peer, received};
    return ncclGroupEnd();
}
int ncclSend(void *at, size_t count, int type, int peer, void *comm, void *stream) {
    return message(at, count * type_bytes[type], peer, 0, comm, stream);
}
int ncclRecv(void *at, size_t count, int type, int peer, void *comm, void *stream) {
    return message(at, count * type_bytes[type], peer, 1, comm, stream);
}
