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

#include "products.h"

/* Halves added to each other until four lanes are left, and these likewise. */
static inline float sum(vec v) {
    typedef float four __attribute__((vector_size(16)));
    four parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int many = LANES / 8; many; many /= 2)
        for (int i = 0; i < many; i++) parts[i] += parts[i + many];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

/* One segment: its rows, its factor [r, n], the column where its part begins, and the factor of the segment after it
 * (its own where there is none). */
typedef struct {
    int64_t first, last, r, column;
    float *w;
    const float *next;
    float alpha;
} Segment;

static inline float *factor_of(const Factor *factor, int64_t j) {
    const int64_t group = j % factor->groups;
    float *w = factor->w[group];
    return w ? w + j / factor->groups * factor->ranks[group] * factor->stack * factor->n : NULL;
}

/* The segment that begins at row `first`. False if it is left out. */
static inline int segment_at(const Factor *factor, int64_t first, Segment *segment) {
    const int64_t j = factor->segment[first], group = j % factor->groups, rank = factor->ranks[group];
    segment->first = segment->last = first;
    while (++segment->last < factor->rows && factor->segment[segment->last] == j) {
    }
    segment->r = rank * factor->stack;
    segment->column = rank * factor->part;
    segment->w = factor_of(factor, j);
    segment->next = segment->last < factor->rows ? factor_of(factor, factor->segment[segment->last]) : NULL;
    if (!segment->next) segment->next = segment->w;
    segment->alpha = factor->scale ? factor->scale[group] : 1.0f;
    return segment->w != NULL;
}

/* While the factor of one segment is used the one of the next is asked for, number for number: small factors lie anywhere,
 * and the processor cannot guess where. `ahead` is how far that one lies from this one in memory, in bytes. */
#define ask(w, ahead) __builtin_prefetch((const void *)((uintptr_t)(w) + (uintptr_t)(ahead)), 0, 3)
#define ask_to_write(w, ahead) __builtin_prefetch((const void *)((uintptr_t)(w) + (uintptr_t)(ahead)), 1, 3)

/* Rows that one thread takes at a time; a multiple of ROWS. */
#define SHARE 32

/* y[row, :] += alpha * u[row, :] W, for up to ROWS rows at a time so that W is read once for them. */
#define ROWS 4

/* Columns that are summed together: with fewer rows more, so that one row alone reads W almost from end to end. */
#define WIDTH(rows) (REGISTERS / 2 / (rows) < REGISTERS / 8 ? REGISTERS / 8 : REGISTERS / 2 / (rows))

static inline __attribute__((always_inline)) void expand_columns(
    const int rows, const int width, int64_t r, int64_t n, const float *w, intptr_t ahead, float alpha,
    const float *const *u, float *const *y, int64_t c) {
    vec total[ROWS][WIDTH(1)];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) total[i][j] = splat(0.0f);
    for (int64_t k = 0; k < r; k++) {
        const float *own = w + k * n + c;
        vec x[ROWS];
        for (int i = 0; i < rows; i++) x[i] = splat(u[i][k]);
        for (int j = 0; j < width; j++) {
            const vec a = load(own + j * LANES);
            ask(own + j * LANES, ahead);
            for (int i = 0; i < rows; i++) total[i][j] = fused(x[i], a, total[i][j]);
        }
    }
    const vec scale = splat(alpha);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < width; j++) {
            float *to = y[i] + c + j * LANES;
            store(to, fused(scale, total[i][j], load(to)));
        }
}

static inline __attribute__((always_inline)) void expand_rows(
    const int rows, int64_t r, int64_t n, const float *w, intptr_t ahead, float alpha, const float *const *u,
    float *const *y) {
    int64_t c = 0;
    for (; c + WIDTH(rows) * LANES <= n; c += WIDTH(rows) * LANES)
        expand_columns(rows, WIDTH(rows), r, n, w, ahead, alpha, u, y, c);
    for (; c + 2 * LANES <= n; c += 2 * LANES) expand_columns(rows, 2, r, n, w, ahead, alpha, u, y, c);
    for (; c < n; c++)
        for (int i = 0; i < rows; i++) {
            float total = 0.0f;
            for (int64_t k = 0; k < r; k++) total = fused_one(u[i][k], w[k * n + c], total);
            y[i][c] = fused_one(alpha, total, y[i][c]);
        }
}

static void expand_segment(
    const Segment *segment, int64_t from, int64_t to, int64_t n, float *y, int64_t y_stride, const float *u,
    int64_t u_stride) {
    const intptr_t ahead = (intptr_t)segment->next - (intptr_t)segment->w;
    for (int64_t row = from; row < to; row += ROWS) {
        const float *us[ROWS];
        float *ys[ROWS];
        const int rows = to - row < ROWS ? (int)(to - row) : ROWS;
        for (int i = 0; i < rows; i++) {
            us[i] = u + (row + i) * u_stride + segment->column;
            ys[i] = y + (row + i) * y_stride;
        }
        switch (rows) {
        case 4: expand_rows(4, segment->r, n, segment->w, ahead, segment->alpha, us, ys); break;
        case 3: expand_rows(3, segment->r, n, segment->w, ahead, segment->alpha, us, ys); break;
        case 2: expand_rows(2, segment->r, n, segment->w, ahead, segment->alpha, us, ys); break;
        default: expand_rows(1, segment->r, n, segment->w, ahead, segment->alpha, us, ys);
        }
    }
}

/* v[row, :] = alpha * x[row, :] W^T, for up to ROWS rows and SHRUNK rows of W at a time. */
#define SHRUNK (REGISTERS / 8)

static inline __attribute__((always_inline)) void shrink_block(
    const int rows, const int factors, int64_t n, const float *w, intptr_t ahead, float alpha, const float *const *x,
    float *const *v, int64_t at) {
    vec total[ROWS][SHRUNK];
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < factors; k++) total[i][k] = splat(0.0f);
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        vec own[SHRUNK];
        for (int k = 0; k < factors; k++) {
            own[k] = load(w + k * n + c);
            ask(w + k * n + c, ahead);
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

static inline __attribute__((always_inline)) void shrink_rows(
    const int rows, int64_t r, int64_t n, const float *w, intptr_t ahead, float alpha, const float *const *x,
    float *const *v) {
    int64_t k = 0;
    if (rows > 1)
        for (; k + SHRUNK <= r; k += SHRUNK) shrink_block(rows, SHRUNK, n, w + k * n, ahead, alpha, x, v, k);
    for (; k < r; k++) shrink_block(rows, 1, n, w + k * n, ahead, alpha, x, v, k);
}

static void shrink_segment(
    const Segment *segment, int64_t from, int64_t to, int64_t n, const float *x, int64_t x_stride, float *v,
    int64_t v_stride) {
    const intptr_t ahead = (intptr_t)segment->next - (intptr_t)segment->w;
    for (int64_t row = from; row < to; row += ROWS) {
        const float *xs[ROWS];
        float *vs[ROWS];
        const int rows = to - row < ROWS ? (int)(to - row) : ROWS;
        for (int i = 0; i < rows; i++) {
            xs[i] = x + (row + i) * x_stride;
            vs[i] = v + (row + i) * v_stride + segment->column;
        }
        switch (rows) {
        case 4: shrink_rows(4, segment->r, n, segment->w, ahead, segment->alpha, xs, vs); break;
        case 3: shrink_rows(3, segment->r, n, segment->w, ahead, segment->alpha, xs, vs); break;
        case 2: shrink_rows(2, segment->r, n, segment->w, ahead, segment->alpha, xs, vs); break;
        default: shrink_rows(1, segment->r, n, segment->w, ahead, segment->alpha, xs, vs);
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
#pragma omp parallel num_threads(all->threads) if (all->threads > 1)
    {
        int64_t share = 0, last;
        for (int64_t row = 0; row < all->rows; row = last) {
            Segment down = {.w = NULL}, up[PARTS];
            if (a) segment_at(a, row, &down);
            for (int p = 0; p < parts; p++) segment_at(b + p, row, up + p);
            last = a ? down.last : up[0].last;
            for (int64_t from = row; from < last; from += SHARE) {
                if (share++ % threads_here() != thread_here()) continue;
                const int64_t to = last - from < SHARE ? last : from + SHARE;
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

/* W += alpha * u^T y over the rows of a segment, for up to FACTORS rows of W, in the columns from..to. What is added is
   rounded first, so that it may as well be computed elsewhere, from zero, and added later (workers/trainer/ranks). */
#define FACTORS 4

static inline __attribute__((always_inline)) void outer_block(
    const int factors, const Segment *segment, int64_t n, int64_t k, int64_t from, int64_t to, const float *u,
    int64_t u_stride, const float *y, int64_t y_stride) {
    float *w = segment->w + k * n;
    const intptr_t ahead = (intptr_t)segment->next - (intptr_t)segment->w;
    u += segment->column + k;
    int64_t c = from;
    for (; c + 2 * LANES <= to; c += 2 * LANES) {
        vec low[FACTORS], high[FACTORS];
        for (int i = 0; i < factors; i++) {
            low[i] = high[i] = splat(0.0f);
            ask_to_write(w + i * n + c, ahead);
            ask_to_write(w + i * n + c + LANES, ahead);
        }
        for (int64_t row = segment->first; row < segment->last; row++) {
            const float *own = y + row * y_stride + c, *by = u + row * u_stride;
            const vec a = load(own), b = load(own + LANES);
            for (int i = 0; i < factors; i++) {
                const vec x = splat(by[i]);
                low[i] = fused(x, a, low[i]);
                high[i] = fused(x, b, high[i]);
            }
        }
        const vec scale = splat(segment->alpha);
        for (int i = 0; i < factors; i++) {
            store(w + i * n + c, load(w + i * n + c) + scale * low[i]);
            store(w + i * n + c + LANES, load(w + i * n + c + LANES) + scale * high[i]);
        }
    }
    for (; c < to; c++)
        for (int i = 0; i < factors; i++) {
            float total = 0.0f;
            for (int64_t row = segment->first; row < segment->last; row++) {
                total = fused_one(u[row * u_stride + i], y[row * y_stride + c], total);
            }
            w[i * n + c] += segment->alpha * total;
        }
}

void weft_outer(const Factor *factor, const float *u, int64_t u_stride, const float *y, int64_t y_stride) {
#pragma omp parallel num_threads(factor->threads) if (factor->threads > 1)
    {
        /* Whole blocks of columns, so that a column is computed in the same way on any thread. */
        const int64_t n = factor->n, blocks = (n + 2 * LANES - 1) / (2 * LANES), threads = threads_here();
        const int64_t from = blocks * thread_here() / threads * 2 * LANES;
        const int64_t end = blocks * (thread_here() + 1) / threads * 2 * LANES, to = end < n ? end : n;
        Segment segment;
        for (int64_t row = 0; row < factor->rows && from < to; row = segment.last) {
            if (!segment_at(factor, row, &segment)) continue;
            int64_t k = 0;
            for (; k + FACTORS <= segment.r; k += FACTORS)
                outer_block(FACTORS, &segment, n, k, from, to, u, u_stride, y, y_stride);
            for (; k < segment.r; k++) outer_block(1, &segment, n, k, from, to, u, u_stride, y, y_stride);
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
