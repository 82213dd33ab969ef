/* Low-rank products of many groups of rows, each with factors of its own, in one call.
 *
 * segment[i] is the segment that row i belongs to; rows of a segment lie side by side. Segment j belongs to group
 * j % groups and, with experts, to expert j / groups. A factor is float32 [r, n] with the long side n innermost: an
 * A [r, in] as it is, a B [out, r] transposed. w[g] is the factor of group g, or of its first expert with the others
 * following; NULL leaves the group out. ranks[g] is the group's rank; a stacked A [stack * r, in] counts with all its
 * rows. `part` says which r columns of u belong to this factor.
 *
 * What a segment gets depends on its own rows and factor alone, bit for bit: every sum has one order, fixed by n, r and
 * the row's index in its segment, whatever its address, the threads and the other segments. Without -ffast-math the
 * order stands.
 *
 * Threads share the rows (of what is written row by row) or the columns (of gradients, to which several segments may
 * add).
 */

#include "segments.h"

/* Halves added to each other until four lanes are left, and these likewise. */
static inline float sum(vec v) {
    typedef float four __attribute__((vector_size(16)));
    four parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int many = LANES / 8; many; many /= 2)
        for (int i = 0; i < many; i++) parts[i] += parts[i + many];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* Rows that one thread takes at a time where there are several; a multiple of ROWS. */
#define SHARE 36

/* Numbers of W that are copied together (MANY). */
#define PIECE 16384

/* y[row, :] += alpha * u[row, :] W, for up to ROWS rows at a time so that W is read once for them. */
#define ROWS 6

/* Columns that are summed together: with fewer rows more, so that one row alone reads W almost from end to end. */
#define WIDTH(rows) (REGISTERS / 2 / (rows) < REGISTERS / 8 ? REGISTERS / 8 : REGISTERS / 2 / (rows))

static inline __attribute__((always_inline)) void expand_columns(
    const int rows, const int width, int64_t r, int64_t n, const float *w, const int asks, intptr_t ahead, float alpha,
    const float *const *u, float *const *y) {
    vec total[ROWS][WIDTH(1)];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) total[i][j] = splat(0.0f);
    for (int64_t k = 0; k < r; k++) {
        const float *own = w + k * n;
        vec a[WIDTH(1)];
        for (int j = 0; j < width; j++) {
            a[j] = load(own + j * LANES);
            if (asks) ask(own + j * LANES, ahead);
        }
        for (int i = 0; i < rows; i++) {
            const vec x = splat(u[i][k]);
            for (int j = 0; j < width; j++) total[i][j] = fused(x, a[j], total[i][j]);
        }
    }
    const vec scale = splat(alpha);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) {
            float *to = y[i] + j * LANES;
            store(to, fused(scale, total[i][j], load(to)));
        }
}

static inline __attribute__((always_inline)) void expand_rows(
    const int rows, int64_t r, int64_t n, int64_t w_stride, const float *w, const int asks, intptr_t ahead, float alpha,
    const float *const *u, float *const *y) {
    int64_t c = 0;
    float *to[ROWS];
#define COLUMNS(width) \
    for (; c + (width) * LANES <= n; c += (width) * LANES) { \
        for (int i = 0; i < rows; i++) to[i] = y[i] + c; \
        expand_columns(rows, width, r, w_stride, w + c, asks, ahead, alpha, u, to); \
    }
    COLUMNS(WIDTH(rows))
    COLUMNS(2)
    for (; c < n; c++)
        for (int i = 0; i < rows; i++) {
            float total = 0.0f;
            for (int64_t k = 0; k < r; k++) total = fused_one(u[i][k], w[k * w_stride + c], total);
            y[i][c] = fused_one(alpha, total, y[i][c]);
        }
}

/* The columns 0..n of the rows from..to, W's rows lying `w_stride` apart. */
static inline __attribute__((always_inline)) void expand_block(
    const Segment *segment, int64_t from, int64_t to, int64_t n, int64_t w_stride, const float *w, const int asks,
    intptr_t ahead, float *y, int64_t y_stride, const float *u, int64_t u_stride) {
    const int64_t r = segment->r;
    const float alpha = segment->alpha;
    for (int64_t row = from; row < to; row += ROWS) {
        const float *us[ROWS];
        float *ys[ROWS];
        const int rows = to - row < ROWS ? (int)(to - row) : ROWS;
        for (int i = 0; i < rows; i++) {
            us[i] = u + (row + i) * u_stride + segment->column;
            ys[i] = y + (row + i) * y_stride;
        }
        switch (rows) {
        case 6: expand_rows(6, r, n, w_stride, w, asks, ahead, alpha, us, ys); break;
        case 5: expand_rows(5, r, n, w_stride, w, asks, ahead, alpha, us, ys); break;
        case 4: expand_rows(4, r, n, w_stride, w, asks, ahead, alpha, us, ys); break;
        case 3: expand_rows(3, r, n, w_stride, w, asks, ahead, alpha, us, ys); break;
        case 2: expand_rows(2, r, n, w_stride, w, asks, ahead, alpha, us, ys); break;
        default: expand_rows(1, r, n, w_stride, w, asks, ahead, alpha, us, ys);
        }
    }
}

static void expand_segment(
    const Segment *segment, int64_t from, int64_t to, int64_t n, float *y, int64_t y_stride, const float *u,
    int64_t u_stride) {
    const int64_t r = segment->r, wide = PIECE / (r ? r : 1) / (2 * LANES) * (2 * LANES);
    if (to - from < MANY || !wide) {
        const intptr_t ahead = (intptr_t)segment->next - (intptr_t)segment->w;
        expand_block(segment, from, to, n, n, segment->w, 1, ahead, y, y_stride, u, u_stride);
        return;
    }
    float piece[PIECE] __attribute__((aligned(64)));
    for (int64_t c = 0; c < n; c += wide) {
        const int64_t columns = n - c < wide ? n - c : wide;
        for (int64_t k = 0; k < r; k++) memcpy(piece + k * columns, segment->w + k * n + c, columns * sizeof *piece);
        expand_block(segment, from, to, columns, columns, piece, 0, 0, y + c, y_stride, u, u_stride);
    }
}

/* v[row, :] = alpha * x[row, :] W^T, for up to TAKEN rows and SHRUNK rows of W at a time, which stay in registers. */
#define TAKEN 4
#define SHRUNK (REGISTERS == 16 ? 3 : REGISTERS / 8)

/* Rows of x that stay in the processor's own cache while all of W goes by: so many, or so many numbers of them. */
#define NEAR_ROWS 16
#define NEAR 8192

static inline __attribute__((always_inline)) void shrink_block(
    const int rows, const int factors, int64_t n, const float *w, const int asks, intptr_t ahead, float alpha,
    const float *const *x, float *const *v, int64_t at) {
    vec total[TAKEN][SHRUNK];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < factors; k++) total[i][k] = splat(0.0f);
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        vec own[SHRUNK];
        for (int k = 0; k < factors; k++) {
            own[k] = load(w + k * n + c);
            if (asks) ask(w + k * n + c, ahead);
        }
        for (int i = 0; i < rows; i++) {
            const vec a = load(x[i] + c);
            for (int k = 0; k < factors; k++) total[i][k] = fused(a, own[k], total[i][k]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < factors; k++) {
            float rest = 0.0f;
            for (int64_t d = c; d < n; d++) rest = fused_one(x[i][d], w[k * n + d], rest);
            v[i][at + k] = alpha * (sum(total[i][k]) + rest);
        }
}

static void shrink_segment(
    const Segment *segment, int64_t from, int64_t to, int64_t n, const float *x, int64_t x_stride, float *v,
    int64_t v_stride) {
    const intptr_t ahead = (intptr_t)segment->next - (intptr_t)segment->w;
    const int64_t near = n * NEAR_ROWS < NEAR ? NEAR / n / TAKEN * TAKEN : NEAR_ROWS, r = segment->r;
    const int asks = to - from < MANY;
    const float alpha = segment->alpha;
    for (int64_t first = from, last; first < to; first = last) {
        last = to - first < near ? to : first + near;
        for (int64_t k = 0, many; k < r; k += many) {
            const float *w = segment->w + k * n;
            many = last - first == 1 ? 1 : r - k < SHRUNK ? r - k : SHRUNK;
            for (int64_t row = first; row < last; row += TAKEN) {
                const float *xs[TAKEN];
                float *vs[TAKEN];
                const int rows = last - row < TAKEN ? (int)(last - row) : TAKEN;
                for (int i = 0; i < rows; i++) {
                    xs[i] = x + (row + i) * x_stride;
                    vs[i] = v + (row + i) * v_stride + segment->column;
                }
#define BLOCK_OF(rows, many) \
    case 8 * rows + many: \
        if (asks) shrink_block(rows, many, n, w, 1, ahead, alpha, xs, vs, k); \
        else shrink_block(rows, many, n, w, 0, 0, alpha, xs, vs, k); \
        break
#define BLOCKS_OF(many) BLOCK_OF(1, many); BLOCK_OF(2, many); BLOCK_OF(3, many); BLOCK_OF(4, many)
                switch (8 * rows + many) {
                    BLOCKS_OF(1);
                    BLOCKS_OF(2);
                    BLOCKS_OF(3);
#if REGISTERS > 16
                    BLOCKS_OF(4);
#endif
                }
            }
        }
    }
}

#define PARTS 3

/* Of each segment u = alpha x A^T, if there is an `a`, then y += alpha u B^T for each of up to PARTS `b`, whose columns
 * of y lie side by side. One segment after another, as the factors of an adapter lie side by side in memory. */
void weft_add(
    const Factor *a, const float *x, int64_t x_stride, float *u, int64_t u_stride, int64_t parts, const Factor *b, float *y,
    int64_t y_stride) {
    const Factor *all = a ? a : b;
    const int64_t most = all->threads > 1 ? SHARE : all->rows;
#pragma omp parallel num_threads(all->threads) if (all->threads > 1)
    {
        int64_t share = 0, last;
        for (int64_t row = 0; row < all->rows; row = last) {
            Segment down = {.w = NULL}, up[PARTS];
            if (a) segment_at(a, row, &down);
            for (int p = 0; p < parts; p++) segment_at(b + p, row, up + p);
            last = a ? down.last : up[0].last;
            for (int64_t from = row; from < last; from += most) {
                if (share++ % threads_here() != thread_here()) continue;
                const int64_t to = last - from < most ? last : from + most;
                if (down.w) {
                    shrink_segment(&down, from, to, a->n, x, x_stride, u, u_stride);
                }
                float *own = y;
                for (int p = 0; p < parts; own += b[p++].n) {
                    if (!up[p].w) continue;
                    expand_segment(up + p, from, to, b[p].n, own, y_stride, u, u_stride);
                }
            }
        }
    }
}

/* The blocks of all segments' factors, as weft_add goes from one to another: at most `most`. Returns their number. An
 * adapter that neighbours share counts once. */
int64_t weft_blocks(const Factor *factors, int64_t parts, const char **blocks, int64_t most) {
    int64_t count = 0, last;
    const float *before = NULL;
    for (int64_t row = 0; row < factors->rows; row = last) {
        Segment first;
        segment_at(factors, row, &first);
        last = first.last;
        if (first.w && first.w == before) continue;
        before = first.w;
        for (int64_t p = 0; p < parts; p++) {
            Segment own;
            if (!segment_at(factors + p, row, &own)) continue;
            const int64_t bytes = own.r * factors[p].n * (int64_t)sizeof *own.w;
            for (int64_t at = 0; at < bytes && count < most; at += BLOCK) blocks[count++] = (const char *)own.w + at;
        }
    }
    return count;
}
