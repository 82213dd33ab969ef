/* Products with frozen weights: y = x W^T in float32, of one weight or of one for each expert.
 *
 * A weight [out, in] is packed into panels of PANEL of its rows, [panels, in, PANEL], the last filled up with zeros, so
 * that a product reads it from end to end: once and for all (weft_gemm), or a piece at a time in the call (weft_mm), which
 * takes no memory and with many rows little time. Every element of y is one sum over `in`, in order: its bits follow from its
 * own row of x and row of W alone, whatever else is in the batch, its size, its place in memory and the threads. (No
 * library promises that; theirs would also pack the weights anew in every call.)
 *
 * Threads share the panels, or the tiles of their rows.
 */

#include "products.h"

/* A tile of ROWS x PANEL sums stays in registers. */
#define ROWS 6
#define WIDTH (REGISTERS / 8)
#define PANEL (WIDTH * LANES)

/* How far ahead of its use a panel is asked for out of the processor's own cache, in steps of the sum. It has come there
 * while the one before was multiplied. */
#define AHEAD 8

/* Numbers that memory delivers at once. */
#define LINE 16

int64_t weft_panel(void) { return PANEL; }

/* What is fetched for later on the way, QUARTER bytes of a block at a time: the `at`th quarter next, in `pace` steps. */
typedef struct {
    const char *const *blocks;
    int64_t at, end, pace;
} Errand;

#define QUARTER (BLOCK / 4)

/* y[i][0..width * LANES] = x[i] . panel, for `rows` rows; with `more` the sums go on from what is in y. On the way, every
 * `share` steps, `next` is asked for, step by step, and every `errand->pace` steps what is needed later. */
static inline __attribute__((always_inline)) void tile(
    const int rows, const int width, int more, int64_t in, const float *panel, const float *x, int64_t x_stride,
    float *y, int64_t y_stride, const float *next, int64_t share, Errand *errand) {
    int64_t wait = errand->pace;
    int64_t due = share;
    vec total[ROWS][WIDTH];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) total[i][j] = more ? load(y + i * y_stride + j * LANES) : splat(0.0f);
    for (int64_t k = 0; k < in; k++) {
        vec w[WIDTH];
        for (int j = 0; j < width; j++) {
            w[j] = load(panel + k * PANEL + j * LANES);
            if (j * LANES % LINE == 0) __builtin_prefetch(panel + (k + AHEAD) * PANEL + j * LANES, 0, 3);
        }
        for (int i = 0; i < rows; i++) {
            const vec a = splat(x[i * x_stride + k]);
            for (int j = 0; j < width; j++) total[i][j] = fused(a, w[j], total[i][j]);
        }
        if (--due == 0) {
            for (int j = 0; j < PANEL; j += LINE) __builtin_prefetch(next + j, 0, 2);
            next += PANEL, due = share;
        }
        if (--wait == 0) {
            const char *later = errand->blocks[errand->at / 4] + errand->at % 4 * QUARTER;
            for (int j = 0; j < QUARTER; j += 64) __builtin_prefetch(later + j, 0, 2);
            wait = ++errand->at < errand->end ? errand->pace : 0;
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) store(y + i * y_stride + j * LANES, total[i][j]);
}

#define TILE(rows) \
    case rows: \
        if (columns > LANES) tile(rows, WIDTH, more, in, panel, x, x_stride, to, stride, next, share, errand); \
        else tile(rows, 1, more, in, panel, x, x_stride, to, stride, next, share, errand); \
        break

/* The same for the first `columns` columns of y alone. */
static void tile_of(
    int64_t rows, int more, int64_t in, const float *panel, const float *x, int64_t x_stride, float *y, int64_t y_stride,
    int64_t columns, const float *next, int64_t share, Errand *errand) {
    float whole[ROWS * PANEL], *to = columns < PANEL ? whole : y;
    const int64_t stride = columns < PANEL ? PANEL : y_stride;
    if (to == whole && more)
        for (int64_t i = 0; i < rows; i++) memcpy(whole + i * PANEL, y + i * y_stride, columns * sizeof *y);
    switch (rows) {
    TILE(6);
    TILE(5);
    TILE(4);
    TILE(3);
    TILE(2);
    TILE(1);
    }
    if (to == whole)
        for (int64_t i = 0; i < rows; i++) memcpy(y + i * y_stride, whole + i * PANEL, columns * sizeof *y);
}

/* The fastest pace, and how many bytes of weights may come between what is fetched and its use: with more of them it would be
 * pushed out of the caches again. */
#define PACE 2
#define BETWEEN (8 << 20)

/* How fast the errand must run to be done with the last of `tiles` tiles; 0: it has not begun, or is done. */
static inline int64_t pace_of(const Errand *errand, int64_t tiles, int64_t begins, int64_t in) {
    const int64_t left = errand->end - errand->at;
    if (left <= 0 || tiles > begins) return 0;
    const int64_t pace = in * tiles / left;
    return pace < PACE ? PACE : pace;
}

/* Rows of x sorted by expert, ends[e] being where those of expert e end: y[row] = W_e x[row]. `soon` or NULL. */
void weft_gemm(
    const Weight *weight, const float *packed, const int32_t *ends, const float *x, int64_t x_stride, float *y,
    int64_t y_stride, const Soon *soon) {
    const int64_t in = weight->in, out = weight->out, panels = (out + PANEL - 1) / PANEL;
    int64_t tiles_each = 0, used = 0;
    for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) {
        tiles_each += (ends[e] - first + ROWS - 1) / ROWS;
        used += ends[e] > first;
    }
    if (tiles_each < 2 * used) soon = NULL; /* a panel that serves one tile is waited for itself: the memory is busy */
#pragma omp parallel num_threads(weight->threads) if (weight->threads > 1)
    {
        const int64_t from = panels * thread_here() / threads_here(), to = panels * (thread_here() + 1) / threads_here();
        const int64_t count = soon ? soon->count : 0, bytes = (to - from) * weight->experts * in * PANEL * (int64_t)sizeof *x;
        Errand errand = {soon ? soon->blocks : NULL, 4 * (count * thread_here() / threads_here()),
                         4 * (count * (thread_here() + 1) / threads_here()), 0};
        int64_t left = tiles_each * (to - from);
        const int64_t begins = bytes > BETWEEN ? left * BETWEEN / bytes : left;
        for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) {
            const int64_t tiles = (ends[e] - first + ROWS - 1) / ROWS;
            for (int64_t p = from; p < to; p++) {
                const float *panel = packed + (e * panels + p) * in * PANEL;
                const int64_t columns = out - p * PANEL < PANEL ? out - p * PANEL : PANEL;
                /* Tiles as even as can be: a short one waits for its own sums. */
                for (int64_t row = first, rows, t = 0; row < ends[e]; row += rows, t++) {
                    rows = (ends[e] - row + tiles - t - 1) / (tiles - t);
                    errand.pace = pace_of(&errand, left--, begins, in);
                    tile_of(rows, 0, in, panel, x + row * x_stride, x_stride, y + row * y_stride + p * PANEL, y_stride, columns,
                            panel + (in + in / tiles * t) * PANEL, tiles, &errand);
                }
            }
        }
    }
}

/* Steps of a sum that are taken together: such a piece of a panel stays in the processor's own cache. */
#define PIECE (LANES == 16 ? 512 : 256)

/* Panels that are packed together: of a row of a transposed weight, as many numbers as lie in a few lines of memory. */
#define STRIP (64 / PANEL)

/* Rows of x whose numbers for a piece are copied side by side: where a row is a power of two long, a cache has few places for
 * the same numbers of many rows. A multiple of ROWS. */
#define TALL 96

/* Weights as they are: [out, in], or with `transposed` [in, out], their rows `stride` numbers apart and those of one expert
 * `apart` from the next's. */
typedef struct {
    const float *w;
    int64_t stride, apart, transposed;
} Plain;

typedef int32_t places __attribute__((vector_size(4 * LANES)));
#if LANES == 16
#define ROUNDS 4
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define ROUNDS 3
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ROUNDS 2
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#endif
#ifdef __clang__
#define mixed(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define mixed(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* LANES rows of as many numbers become columns. A round puts the first half of the rows between the second, number by
 * number; after ROUNDS of them each number is where it belongs. */
static inline void turn(const float *w, int64_t stride, float *to) {
    vec v[LANES], n[LANES];
    for (int i = 0; i < LANES; i++) v[i] = load(w + i * stride);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < LANES / 2; i++) {
            n[2 * i] = mixed(v[i], v[i + LANES / 2], FIRST);
            n[2 * i + 1] = mixed(v[i], v[i + LANES / 2], SECOND);
        }
        for (int i = 0; i < LANES; i++) v[i] = n[i];
    }
    for (int i = 0; i < LANES; i++) store(to + i * PANEL, v[i]);
}

/* `columns` columns of a piece of a panel, [steps, PANEL], from W [out, in]; the others keep what they have. */
static void pack_turned(const Plain *plain, const float *w, int64_t steps, int64_t columns, float *piece) {
    const int64_t whole = steps / LANES * LANES;
    for (int64_t c = 0, many; c < columns; c += many) {
        const float *own = w + c * plain->stride;
        many = columns - c < LANES ? 1 : LANES;
        for (int64_t i = 0; i < whole && many == LANES; i += LANES) turn(own + i, plain->stride, piece + i * PANEL + c);
        for (int64_t i = many == LANES ? whole : 0; i < steps; i++)
            for (int64_t j = 0; j < many; j++) piece[i * PANEL + c + j] = own[j * plain->stride + i];
    }
}

/* Rows of a transposed weight that are asked for ahead: each lies in another page of memory. */
#define PAGES 8

/* The pieces of a strip of panels, `columns` wide, from step k on. */
static void pack(const Plain *plain, const float *w, int64_t k, int64_t steps, int64_t columns, float pieces[][PIECE * PANEL]) {
    if (!plain->transposed) {
        for (int64_t c = 0; c < columns; c += PANEL)
            pack_turned(plain, w + c * plain->stride + k, steps, columns - c < PANEL ? columns - c : PANEL, pieces[c / PANEL]);
        return;
    }
    w += k * plain->stride;
    for (int64_t i = 0; i < steps; i++, w += plain->stride) {
        const float *ahead = w + (i + PAGES < steps ? PAGES * plain->stride : 0);
        for (int64_t c = 0; c < columns; c += LINE) __builtin_prefetch(ahead + c, 0, 3);
        int64_t c = 0;
        for (; c + PANEL <= columns; c += PANEL) memcpy(pieces[c / PANEL] + i * PANEL, w + c, PANEL * sizeof *w);
        if (c < columns) memcpy(pieces[c / PANEL] + i * PANEL, w + c, (columns - c) * sizeof *w);
    }
}

/* weft_gemm, of weights as they are. Threads share the tiles, an expert's strip of panels after the other. */
void weft_mm(
    const Weight *weight, const Plain *plain, const int32_t *ends, const float *x, int64_t x_stride, float *y,
    int64_t y_stride) {
    const int64_t in = weight->in, out = weight->out, strips = (out + STRIP * PANEL - 1) / (STRIP * PANEL);
    int64_t all = 0;
    for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) all += (ends[e] - first + ROWS - 1) / ROWS * strips;
#pragma omp parallel num_threads(weight->threads) if (weight->threads > 1)
    {
        float pieces[STRIP][PIECE * PANEL] __attribute__((aligned(64)));
        float own[TALL * PIECE] __attribute__((aligned(64)));
        if (out % PANEL) memset(pieces, 0, sizeof pieces);
        const int64_t from = all * thread_here() / threads_here(), to = all * (thread_here() + 1) / threads_here();
        int64_t at = 0;
        Errand none = {0};
        for (int64_t e = 0, first = 0; e < weight->experts; first = ends[e++]) {
            const int64_t rows = ends[e] - first, tiles = (rows + ROWS - 1) / ROWS;
            for (int64_t s = 0; s < out; s += STRIP * PANEL, at += tiles) {
                const int64_t begin = from > at ? from - at : 0, end = to - at < tiles ? to - at : tiles;
                const int64_t columns = out - s < STRIP * PANEL ? out - s : STRIP * PANEL;
                const float *w = plain->w + e * plain->apart + s * (plain->transposed ? 1 : plain->stride);
                for (int64_t k = 0; k < in && begin < end; k += PIECE) {
                    const int64_t steps = in - k < PIECE ? in - k : PIECE;
                    pack(plain, w, k, steps, columns, pieces);
                    for (int64_t some = begin, after; some < end; some = after) {
                        after = end - some < TALL / ROWS ? end : some + TALL / ROWS;
                        const int64_t low = first + rows * some / tiles, high = first + rows * after / tiles;
                        const float *of = x + low * x_stride + k;
                        int64_t apart = x_stride;
                        if (after - some > 1) {
                            for (int64_t i = 0; i < high - low; i++) memcpy(own + i * steps, of + i * x_stride, steps * sizeof *x);
                            of = own, apart = steps;
                        }
                        for (int64_t c = 0; c < columns; c += PANEL)
                            for (int64_t t = some; t < after; t++) {
                                const int64_t row = first + rows * t / tiles, next = first + rows * (t + 1) / tiles;
                                tile_of(next - row, k > 0, steps, pieces[c / PANEL], of + (row - low) * apart, apart,
                                        y + row * y_stride + s + c, y_stride, columns - c < PANEL ? columns - c : PANEL,
                                        pieces[c / PANEL], steps + 1, &none);
                            }
                    }
                }
            }
        }
    }
}
