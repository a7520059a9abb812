/* The GPU that computes nothing, continued: cuBLAS, cuBLASLt and NCCL. Their headers are not part of Triton's, so what is
 * used of them is declared here. See device.c. */
#include <library_types.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void dry_log(const void *stream, const char *kind, const char *name, int count, ...);

/* ---- cuBLAS: D [m, n] = A [m, k] B [k, n] */

static __thread void *blas_stream;
static int blas_handle;

static void product(void *stream, cudaDataType type, long m, long n, long k, long batch) {
    const char *name = type == CUDA_R_16BF ? "bf16" : type == CUDA_R_16F ? "fp16" : type == CUDA_R_32F ? "fp32"
                       : type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 ? "fp8" : "other";
    dry_log(stream, "GEMM", name, 4, m, n, k, batch);
}

int cublasCreate_v2(void **handle) { *handle = &blas_handle; return 0; }
int cublasSetStream_v2(void *handle, void *stream) { blas_stream = stream; return 0; }
int cublasGetStream_v2(void *handle, void **stream) { *stream = blas_stream; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130101; return 0; }
const char *cublasGetStatusString(int status) { return status ? "not supported" : "success"; }

int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, cudaDataType type, int lda,
                 const void *b, cudaDataType tb_, int ldb, const void *beta, void *c, cudaDataType tc, int ldc, int compute,
                 int algorithm) {
    product(blas_stream, type, m, n, k, 1);
    return 0;
}
int cublasGemmStridedBatchedEx(void *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                               cudaDataType type, int lda, long long sa, const void *b, cudaDataType tb_, int ldb,
                               long long sb, const void *beta, void *c, cudaDataType tc, int ldc, long long sc, int batch,
                               int compute, int algorithm) {
    product(blas_stream, type, m, n, k, batch);
    return 0;
}
int cublasSgemm_v2(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                   const float *b, int ldb, const float *beta, float *c, int ldc) {
    product(blas_stream, CUDA_R_32F, m, n, k, 1);
    return 0;
}
int cublasSgemmStridedBatched(void *h, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda,
                              long long sa, const float *b, int ldb, long long sb, const float *beta, float *c, int ldc,
                              long long sc, int batch) {
    product(blas_stream, CUDA_R_32F, m, n, k, batch);
    return 0;
}
int cublasSgemv_v2(void *h, int t, int m, int n, const float *alpha, const float *a, int lda, const float *x, int incx,
                   const float *beta, float *y, int incy) {
    product(blas_stream, CUDA_R_32F, m, 1, n, 1);
    return 0;
}

/* ---- cuBLASLt. A matrix is column by column, as its rows and columns say */

struct Layout { cudaDataType type; unsigned long rows, columns; long stride; int batch; };
struct Product { int transpose_a, transpose_b; };
enum { LAYOUT_BATCH = 5, PRODUCT_TRANSPOSE_A = 3, PRODUCT_TRANSPOSE_B = 4, NOT_SUPPORTED = 15 };

int cublasLtCreate(void **handle) { *handle = &blas_handle; return 0; }
int cublasLtMatrixLayoutCreate(struct Layout **l, cudaDataType type, unsigned long rows, unsigned long columns, long stride) {
    *l = malloc(sizeof **l);
    **l = (struct Layout){type, rows, columns, stride, 1};
    return 0;
}
int cublasLtMatrixLayoutDestroy(struct Layout *l) { free(l); return 0; }
int cublasLtMatrixLayoutSetAttribute(struct Layout *l, int which, const int *value, size_t size) {
    if (which == LAYOUT_BATCH) l->batch = *value;
    return 0;
}
int cublasLtMatmulDescCreate(struct Product **p, int compute, int scale) { *p = calloc(1, sizeof **p); return 0; }
int cublasLtMatmulDescDestroy(struct Product *p) { free(p); return 0; }
int cublasLtMatmulDescSetAttribute(struct Product *p, int which, const int *value, size_t size) {
    if (which == PRODUCT_TRANSPOSE_A) p->transpose_a = *value;
    if (which == PRODUCT_TRANSPOSE_B) p->transpose_b = *value;
    return 0;
}
int cublasLtMatmulPreferenceCreate(void **preference) { *preference = calloc(1, 64); return 0; }
int cublasLtMatmulPreferenceDestroy(void *preference) { free(preference); return 0; }

/* An fp8 product wants its first factor transposed, its second not, strides of 16 bytes, and not twice e5m2. */
int cublasLtMatmulAlgoGetHeuristic(void *h, struct Product *p, struct Layout *a, struct Layout *b, struct Layout *c,
                                   struct Layout *d, void *preference, int wanted, void *results, int *found) {
    int fp8 = a->type == CUDA_R_8F_E4M3 || a->type == CUDA_R_8F_E5M2;
    int layout = p->transpose_a == 1 && p->transpose_b == 0 && a->stride % 16 == 0 && b->stride % 16 == 0;
    int types = a->type == CUDA_R_8F_E4M3 || b->type == CUDA_R_8F_E4M3;
    *found = !fp8 || (layout && types);
    memset(results, 0, 96); /* a cublasLtMatmulHeuristicResult_t; its state is 0, success */
    return *found ? 0 : NOT_SUPPORTED;
}
int cublasLtMatmul(void *h, struct Product *p, const void *alpha, const void *a, struct Layout *la, const void *b,
                   struct Layout *lb, const void *beta, const void *c, struct Layout *lc, void *d, struct Layout *ld,
                   const void *algorithm, void *workspace, size_t bytes, void *stream) {
    product(stream, la->type, ld->rows, ld->columns, p->transpose_a ? la->rows : la->columns, la->batch);
    return 0;
}

/* ---- NCCL, of which this process is rank 0 */

static int group_ranks;
static const int type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* of ncclDataType_t */

typedef struct { char bytes[128]; } UniqueId;

int ncclGetVersion(int *version) { *version = 22907; return 0; }
int ncclCommInitRankConfig(void **comm, int ranks, UniqueId id, int rank, void *config) {
    *comm = &group_ranks;
    group_ranks = ranks;
    return 0;
}
int ncclCommInitRank(void **comm, int ranks, UniqueId id, int rank) { return ncclCommInitRankConfig(comm, ranks, id, rank, 0); }
int ncclCommCount(void *comm, int *ranks) { *ranks = group_ranks; return 0; }
int ncclCommUserRank(void *comm, int *rank) { *rank = 0; return 0; }
int ncclCommGetAsyncError(void *comm, int *error) { *error = 0; return 0; }
const char *ncclGetErrorString(int error) { return "no error"; }
const char *ncclGetLastError(void *comm) { return ""; }

static int collective(const char *name, size_t count, int type, void *stream) {
    dry_log(stream, "NCCL", name, 1, (long)count * type_bytes[type]);
    return 0;
}
int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
    return collective("all-reduce", count, type, stream);
}
int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, void *comm, void *stream) {
    return collective("broadcast", count, type, stream);
}
int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, void *comm, void *stream) {
    return collective("reduce-scatter", count * group_ranks, type, stream);
}
int ncclAllGather(const void *in, void *out, size_t count, int type, void *comm, void *stream) {
    return collective("all-gather", count * group_ranks, type, stream);
}
int ncclSend(const void *in, size_t count, int type, int peer, void *comm, void *stream) {
    return collective("send", count, type, stream);
}
int ncclRecv(void *out, size_t count, int type, int peer, void *comm, void *stream) {
    return collective("receive", count, type, stream);
}
