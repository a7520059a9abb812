/* A GPU that computes nothing: what torch, Triton and NCCL's process group call of NVIDIA's libraries.
 *
 * Memory is reserved and, but for small copies and fills, never written; kernels, products, collectives, events and
 * synchronizations are written down, a line each, and not run. `setup` builds this as one library under all the names
 * that torch asks for; every function that torch asks for and that is not here returns 0, by a stub made there.
 *
 * A line of the log $DRY_GPU_LOG, its fields apart by tabs: ms, thread, stream, kind, name, numbers...
 *     KERNEL, TRITON   grid x, y, z, threads of a block, bytes of dynamic shared memory
 *     GEMM             m, n, k, batch; the name is the type of the factors
 *     COPY, FILL       bytes
 *     NCCL             bytes of the whole buffer, over all ranks
 *     EVENT, WAIT      the event
 *     SYNC             (the host waits for the GPU)
 *     ALLOC, FREE, OOM bytes, bytes in use
 *     MODULE           registers, bytes of local memory of a thread, static shared memory: of a kernel as it is loaded
 *     MARK             (what dry_gpu_mark was told)
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <elf.h>
#include <library_types.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- the log and the card */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_file;

void dry_log(const void *stream, const char *kind, const char *name, int count, ...) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&lock);
    if (!log_file) log_file = fopen(getenv("DRY_GPU_LOG") ? getenv("DRY_GPU_LOG") : "/dev/null", "w");
    fprintf(log_file, "%.4f\t%ld\t%lx\t%s\t%s", now.tv_sec * 1e3 + now.tv_nsec / 1e6, syscall(SYS_gettid), (long)stream,
            kind, name);
    va_list numbers;
    va_start(numbers, count);
    while (count--) fprintf(log_file, "\t%ld", va_arg(numbers, long));
    va_end(numbers);
    putc('\n', log_file);
    pthread_mutex_unlock(&lock);
}

void dry_gpu_mark(const char *text) { dry_log(0, "MARK", text, 0); }

void dry_gpu_flush(void) { if (log_file) fflush(log_file); }

static long setting(const char *name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }

static int attribute(int which) {
    int arch = setting("DRY_GPU_ARCH", 90), hopper = arch >= 90;
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 0x7fffffff;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (hopper ? 227 : 99) << 10;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (hopper ? 228 : 100) << 10;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return hopper ? 2048 : 1536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return hopper ? 32 : 24;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return hopper ? 132 : 128;
    case cudaDevAttrL2CacheSize: return (hopper ? 50 : 72) << 20;
    case cudaDevAttrClockRate: return 1755000;
    case cudaDevAttrMemoryClockRate: return hopper ? 2619000 : 10501000;
    case cudaDevAttrGlobalMemoryBusWidth: return hopper ? 5120 : 384;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrComputeCapabilityMajor: return arch / 10;
    case cudaDevAttrComputeCapabilityMinor: return arch % 10;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0;
    }
}

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return 0; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr which, int d) { *v = attribute(which); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return 0; }
cudaError_t cudaDeviceSynchronize(void) { dry_log(0, "SYNC", "cudaDeviceSynchronize", 0); return 0; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : "no error"; }
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }

static size_t capacity(void) { return setting("DRY_GPU_MEMORY", 85028634624L); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "GPU that computes nothing (sm_%ld)", setting("DRY_GPU_ARCH", 90));
    p->totalGlobalMem = capacity();
    p->major = attribute(cudaDevAttrComputeCapabilityMajor);
    p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
    p->warpSize = 32;
    p->textureAlignment = 512;
    p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
    return 0;
}

/* ---- memory: address space that the kernel of this machine gives out only where it is written */

enum { HOST = cudaMemoryTypeHost, DEVICE = cudaMemoryTypeDevice };
static struct Range { char *at; size_t bytes; int type; } ranges[1 << 16];
static int range_count;
static size_t used = 512 << 20; /* what a context takes of the card */

static void *reserve(size_t bytes, int type) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_mutex_lock(&lock);
    ranges[range_count++] = (struct Range){at, bytes, type};
    if (type == DEVICE) used += bytes;
    pthread_mutex_unlock(&lock);
    return at;
}

static struct Range find(const void *at, int remove) {
    struct Range found = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < range_count; i++)
        if ((char *)at >= ranges[i].at && (char *)at < ranges[i].at + ranges[i].bytes) {
            found = ranges[i];
            if (remove) ranges[i] = ranges[--range_count];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

cudaError_t cudaMalloc(void **at, size_t bytes) {
    int fits = used + bytes <= capacity();
    if (fits) *at = reserve(bytes, DEVICE);
    dry_log(0, fits ? "ALLOC" : "OOM", "cudaMalloc", 2, bytes, used);
    return fits ? 0 : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *at) {
    struct Range range = find(at, at != 0);
    if (!range.at) return 0;
    munmap(range.at, range.bytes);
    if (range.type == DEVICE) used -= range.bytes;
    dry_log(0, "FREE", "cudaFree", 2, range.bytes, used);
    return 0;
}

cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
    *at = reserve(bytes, HOST);
    dry_log(0, "ALLOC", "cudaHostAlloc", 2, bytes, used);
    return 0;
}
cudaError_t cudaFreeHost(void *at) { return cudaFree(at); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *total = capacity(); *free = *total - used; return 0; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
    struct Range range = find(at, 0);
    memset(a, 0, sizeof *a);
    a->type = range.type;
    a->device = range.at ? 0 : -2;
    a->devicePointer = range.at ? (void *)at : 0;
    a->hostPointer = range.type == HOST ? (void *)at : 0;
    return 0;
}

/* Small copies are made, so that numbers which the host sends and reads again survive. */
static const char *copy(void *to, const void *from, size_t bytes) {
    static const char *ways[3][3] = {{"host to host", "host to host", "pageable to device"},
                                     {"host to host", "host to host", "pinned to device"},
                                     {"device to pageable", "device to pinned", "device to device"}};
    if (bytes <= 1 << 20) memcpy(to, from, bytes);
    return ways[find(from, 0).type][find(to, 0).type];
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    dry_log(stream, "COPY", copy(to, from, bytes), 1, bytes);
    return 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    copy(to, from, bytes);
    dry_log(0, "SYNC", "cudaMemcpy", 0);
    return 0;
}
cudaError_t cudaMemsetAsync(void *at, int byte, size_t bytes, cudaStream_t stream) {
    if (bytes <= 1 << 20) memset(at, byte, bytes);
    dry_log(stream, "FILL", "cudaMemset", 1, bytes);
    return 0;
}

/* ---- streams and events */

static void *new_handle(void) { static long last; return (void *)__sync_add_and_fetch(&last, 16); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = new_handle(); return 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = new_handle(); return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { *status = 0; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
        cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = 0;
    return 0;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) { dry_log(s, "SYNC", "cudaStreamSynchronize", 0); return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { *event = new_handle(); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { dry_log(s, "EVENT", "", 1, (long)event); return 0; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned flags) {
    dry_log(s, "WAIT", "", 1, (long)event);
    return 0;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { dry_log(0, "SYNC", "cudaEventSynchronize", 0); return 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.01f; return 0; }

/* ---- kernels in torch's own libraries, by the name under which they register */

static struct Named { const void *function; const char *name; } *kernels;
static int kernel_count, kernels_sorted;

static int by_address(const void *a, const void *b) {
    const void *x = ((struct Named *)a)->function, *y = ((struct Named *)b)->function;
    return (x > y) - (x < y);
}
void __cudaRegisterFunction(void **module, const char *function, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *size) {
    pthread_mutex_lock(&lock);
    if (kernel_count % 4096 == 0) kernels = realloc(kernels, (kernel_count + 4096) * sizeof *kernels);
    kernels[kernel_count++] = (struct Named){function, name};
    kernels_sorted = 0;
    pthread_mutex_unlock(&lock);
}
static const char *name_of(const void *function) {
    pthread_mutex_lock(&lock);
    if (!kernels_sorted++) qsort(kernels, kernel_count, sizeof *kernels, by_address);
    struct Named key = {function}, *found = bsearch(&key, kernels, kernel_count, sizeof key, by_address);
    pthread_mutex_unlock(&lock);
    return found ? found->name : "?";
}
void **__cudaRegisterFatBinary(void *module) { static void *handle; return &handle; }
char __cudaInitModule(void **module) { return 1; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[8];
static __thread int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed[depth].grid = grid, pushed[depth].block = block;
    pushed[depth].shared = shared, pushed[depth++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed[--depth].grid, *block = pushed[depth].block;
    *shared = pushed[depth].shared, *(void **)stream = pushed[depth].stream;
    return 0;
}

/* Small fills are done: a compiler that folds constants makes them on the GPU and reads them. The kernel's arguments are
 * how many, the value, where to. */
static void fill(const char *name, void **args) {
    const char *type = strstr(name, "FillFunctorI");
    if (!type || !strstr(name, "vectorized_elementwise_kernel")) return;
    type += strlen("FillFunctorI");
    int width = strchr("bha", *type) ? 1 : strchr("st", *type) || !strncmp(type, "N3c108BFloat16", 14) ? 2 :
                strchr("ijf", *type) ? 4 : strchr("lmd", *type) ? 8 : 0;
    long count = *(int *)args[0];
    if (width && count <= 1 << 15)
        for (long i = 0; i < count; i++) memcpy(*(char **)args[2] + i * width, args[1], width);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    const char *name = name_of(f);
    fill(name, args);
    dry_log(stream, "KERNEL", name, 5, (long)grid.x, (long)grid.y, (long)grid.z, (long)block.x * block.y * block.z, shared);
    return 0;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return cudaLaunchKernel(f, grid, block, args, shared, s);
}
cudaError_t __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return 0; }
cudaError_t __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(f, grid, block, args, shared, stream);
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = setting("DRY_GPU_ARCH", 90);
    a->maxDynamicSharedSizeBytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int threads, size_t shared) {
    *n = 2048 / threads;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int threads, size_t shared,
                                                                   unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, shared);
}

/* ---- the driver: kernels that are compiled while the program runs */

static CUcontext context = (CUcontext)&used;
static const CUdevice device0 = 0;

CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = device0; return 0; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute which, CUdevice d) { *v = attribute((int)which); return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = context; return 0; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = device0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = context; return 0; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { *active = 1; return 0; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "no error"; return 0; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute which, CUdeviceptr at) { *(CUdeviceptr *)v = at; return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 66; return 0; }

struct Kernel { char name[256]; int registers, local, shared; };

/* Registers, local and shared memory stand in the headers of a cubin, which is an ELF file. */
static void read_cubin(struct Kernel *kernel, const char *image) {
    const Elf64_Ehdr *header = (void *)image;
    const Elf64_Shdr *section = (void *)(image + header->e_shoff);
    const char *names = image + section[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char *name = names + section[i].sh_name;
        if (!strncmp(name, ".nv.shared.", 11)) kernel->shared += section[i].sh_size;
        if (strcmp(name, ".nv.info")) continue;
        /* entries: a byte of format, one of kind, two of size; those of format 4 are followed by so many bytes */
        enum { SIZED = 4, FRAME_SIZE = 0x11, REGISTER_COUNT = 0x2f };
        const unsigned char *at = (void *)(image + section[i].sh_offset), *end = at + section[i].sh_size;
        for (int size; at < end; at += 4 + size) {
            size = at[0] == SIZED ? at[2] | at[3] << 8 : 0;
            if (at[0] == SIZED && at[1] == FRAME_SIZE) kernel->local = *(int *)(at + 8);
            if (at[0] == SIZED && at[1] == REGISTER_COUNT) kernel->registers = *(int *)(at + 8);
        }
    }
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (void *)image; return 0; }
CUresult cuModuleLoad(CUmodule *module, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
    fseek(file, 0, SEEK_END);
    long bytes = ftell(file);
    rewind(file);
    *module = malloc(bytes);
    if (fread(*module, 1, bytes, file) != (size_t)bytes) return CUDA_ERROR_FILE_NOT_FOUND;
    fclose(file);
    return 0;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    struct Kernel *kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    read_cubin(kernel, (const char *)module);
    dry_log(0, "MODULE", name, 3, (long)kernel->registers, (long)kernel->local, (long)kernel->shared);
    *function = (CUfunction)kernel;
    return 0;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    struct Kernel *kernel = (void *)function;
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? kernel->registers
             : which == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? kernel->local
             : which == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? kernel->shared
             : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
CUresult cuLaunchKernel(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **args, void **extra) {
    dry_log(stream, "TRITON", ((struct Kernel *)f)->name, 5, (long)x, (long)y, (long)z, (long)bx * by * bz, (long)shared);
    return 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra) {
    return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                          c->sharedMemBytes, c->hStream, args, extra);
}

/* torch asks for the driver's functions by name */
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    static void *self;
    if (!self) self = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(self, name);
    if (!*function) *function = dlsym(self, "cuInit"); /* a stub: nothing happens, and it succeeds */
    if (status) *status = cudaDriverEntryPointSuccess;
    return 0;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, status);
}
