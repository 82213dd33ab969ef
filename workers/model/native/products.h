/* What the kernels for adapters (kernels.c, outer.c), those for the frozen weights (gemm.c), what an MLP computes between them
 * (gate.c) and what joins them (joined.c) share. */

#include <stddef.h>

#include "vectors.h"

/* A factor of every group's adapter; kernels.c says what its fields mean. */
typedef struct {
    int64_t rows, groups, threads;
    const int64_t *segment, *ranks;
    float *const *w;
    const float *scale;
    int64_t stack, part, n;
} Factor;

void weft_add(
    const Factor *a, const float *x, int64_t x_stride, float *u, int64_t u_stride, int64_t parts, const Factor *b, float *y,
    int64_t y_stride);

/* What is needed after a product and lies anywhere in memory: the addresses of its blocks of BLOCK bytes, in the order of
 * use. A product has the memory fetch them while it multiplies. */
#define BLOCK 1024

typedef struct {
    int64_t count;
    const char *const *blocks;
} Soon;

int64_t weft_blocks(const Factor *factors, int64_t parts, const char **blocks, int64_t most);

/* A frozen weight, or one of each expert. */
typedef struct {
    int64_t experts, in, out, threads;
} Weight;

void weft_gemm(
    const Weight *weight, const float *packed, const int32_t *ends, const float *x, int64_t x_stride, float *y,
    int64_t y_stride, const Soon *soon);

void weft_swiglu(
    int64_t threads, int64_t rows, int64_t width, const float *gate_up, int64_t stride, float *h, int64_t h_stride);
