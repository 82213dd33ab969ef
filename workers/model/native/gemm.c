/* Products with frozen weights: y = x W^T in float32, of one weight or of one for each expert.
 *
 * A weight [out, in] is packed once into panels of PANEL of its rows, [panels, in, PANEL], the last filled up with zeros,
 * so that a product reads it from end to end. Every element of y is one sum over `in`, in order: its bits follow from its
 * own row of x and row of W alone, whatever else is in the batch, its size, its place in memory and the threads. (No
 * library promises that; theirs would also pack the weights anew in every call.)
 *
 * Threads share the panels.
 */

#include "products.h"

/* A tile of ROWS x PANEL sums stays in registers. */
#define ROWS 6
#ifdef __AVX512F__
#define WIDTH 4
#else
#define WIDTH 1
#endif
#define PANEL (WIDTH * LANES)

/* How far ahead of its use a panel is asked for out of the processor's own cache, in steps of the sum. It has come there
 * while the one before was multiplied. */
#define AHEAD 8

int64_t weft_panel(void) { return PANEL; }

/* Steps of the sum in which a block of what is needed soon is asked for, and cache lines in each. */
#define STEPS 8
#define LINES (BLOCK / STEPS / 64)

/* y[i][0..PANEL] = x[i] . panel, for `rows` rows. On the way, every `share` steps, `next` is asked for, step by step, and
 * of the blocks in `soon`, unless it is NULL, one every STEPS steps. */
static inline __attribute__((always_inline)) void tile(
    const int rows, int64_t in, const float *panel, const float *x, int64_t x_stride, float *y, int64_t y_stride,
    const float *next, int64_t share, const char *const *soon) {
    int64_t due = share;
    vec total[ROWS][WIDTH];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < WIDTH; j++) total[i][j] = splat(0.0f);
    for (int64_t k = 0; k < in; k++) {
        vec w[WIDTH];
        for (int j = 0; j < WIDTH; j++) {
            w[j] = load(panel + k * PANEL + j * LANES);
            __builtin_prefetch(panel + (k + AHEAD) * PANEL + j * LANES, 0, 3);
        }
        for (int i = 0; i < rows; i++) {
            const vec a = splat(x[i * x_stride + k]);
            for (int j = 0; j < WIDTH; j++) total[i][j] += a * w[j];
        }
        if (--due == 0) {
            for (int j = 0; j < WIDTH; j++) __builtin_prefetch(next + j * LANES, 0, 2);
            next += PANEL, due = share;
        }
        if (soon) {
            const char *block = soon[k / STEPS] + k % STEPS * (BLOCK / STEPS);
            for (int j = 0; j < LINES; j++) __builtin_prefetch(block + j * 64, 0, 2);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < WIDTH; j++) store(y + i * y_stride + j * LANES, total[i][j]);
}

/* The same for the first `columns` columns of y alone. */
static void tile_of(
    int64_t rows, int64_t in, const float *panel, const float *x, int64_t x_stride, float *y, int64_t y_stride,
    int64_t columns, const float *next, int64_t share, const char *const *soon) {
    float whole[ROWS * PANEL], *to = columns < PANEL ? whole : y;
    const int64_t stride = columns < PANEL ? PANEL : y_stride;
#define either(n) \
    soon ? tile(n, in, panel, x, x_stride, to, stride, next, share, soon) \
         : tile(n, in, panel, x, x_stride, to, stride, next, share, NULL)
    switch (rows) {
    case 6: either(6); break;
    case 5: either(5); break;
    case 4: either(4); break;
    case 3: either(3); break;
    case 2: either(2); break;
    default: either(1);
    }
    if (to == whole)
        for (int64_t i = 0; i < rows; i++) memcpy(y + i * y_stride, whole + i * PANEL, columns * sizeof *y);
}

/* Rows of x sorted by expert, ends[e] being where those of expert e end: y[row] = W_e x[row]. `soon`, or NULL, is fetched
 * by the last tiles, so that the weights that they read do not push it out of the caches again. */
void weft_gemm(
    const Weight *weight, const float *packed, const int32_t *ends, const float *x, int64_t x_stride, float *y,
    int64_t y_stride, const Soon *soon) {
    const int64_t in = weight->in, out = weight->out, panels = (out + PANEL - 1) / PANEL, each = (in + STEPS - 1) / STEPS;
    int64_t tiles_of_a_panel = 0;
    for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) tiles_of_a_panel += (ends[e] - first + ROWS - 1) / ROWS;
#pragma omp parallel num_threads(weight->threads) if (weight->threads > 1)
    {
        const int64_t from = panels * thread_here() / threads_here(), to = panels * (thread_here() + 1) / threads_here();
        /* The blocks of this thread, and the tiles that it has yet to do. */
        const char *const *asked = soon ? soon->blocks + soon->count * thread_here() / threads_here() : NULL;
        const char *const *end = soon ? soon->blocks + soon->count * (thread_here() + 1) / threads_here() : NULL;
        int64_t left = tiles_of_a_panel * (to - from);
        for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) {
            const int64_t tiles = (ends[e] - first + ROWS - 1) / ROWS;
            for (int64_t p = from; p < to; p++) {
                const float *panel = packed + (e * panels + p) * in * PANEL;
                const int64_t columns = out - p * PANEL < PANEL ? out - p * PANEL : PANEL;
                /* Tiles as even as can be: a short one waits for its own sums. */
                for (int64_t row = first, rows, t = 0; row < ends[e]; row += rows, t++) {
                    rows = (ends[e] - row + tiles - t - 1) / (tiles - t);
                    const int asking = end - asked >= each && left * each <= end - asked + each;
                    left--;
                    tile_of(rows, in, panel, x + row * x_stride, x_stride, y + row * y_stride + p * PANEL, y_stride, columns,
                            panel + (in + in / tiles * t) * PANEL, tiles, asking ? asked : NULL);
                    if (asking) asked += each;
                }
            }
        }
    }
}
