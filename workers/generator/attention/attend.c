/* Attention over paged keys and values: every row, a token of a decode step or of a prompt, attends to its own sequence,
 * from where it lies.
 *
 * Pages hold `page` positions. Keys lie turned, [pages, heads, dim, page], so that the scores of neighbouring positions
 * are computed side by side; values [pages, heads, page, dim], or, of latents, the first numbers of a key. `table`
 * [rows, width] names the pages of each row.
 *
 * What a row gets depends on its own query, keys and values alone, bit for bit: every sum has one order, fixed by the
 * row's length, wherever its pages lie. No fast-math: the order is written out.
 */

#include <math.h>
#include <stdlib.h>

#include "vectors.h"

/* The scores of `count` queries over one page: s = scale * q K. On the way, `next` is asked for: a page that is needed
 * soon and lies anywhere. */
static inline __attribute__((always_inline)) void score_page(
    const int count, int64_t dim, int64_t page, const float *k, const float *const *q, float scale, float *const *s,
    const float *next) {
    for (int64_t at = 0; at < page; at += 2 * LANES) {
        vec low[4], high[4];
        for (int g = 0; g < count; g++) low[g] = high[g] = splat(0.0f);
        for (int64_t d = 0; d < dim; d++) {
            const vec a = load(k + d * page + at), b = load(k + d * page + at + LANES);
            __builtin_prefetch(next + d * page + at, 0, 2);
            __builtin_prefetch(next + d * page + at + LANES, 0, 2);
            for (int g = 0; g < count; g++) {
                const vec x = splat(q[g][d]);
                low[g] = fused(x, a, low[g]);
                high[g] = fused(x, b, high[g]);
            }
        }
        for (int g = 0; g < count; g++) {
            store(s[g] + at, splat(scale) * low[g]);
            store(s[g] + at + LANES, splat(scale) * high[g]);
        }
    }
}

/* Columns of values that are summed together, in vectors. */
#define WIDE (REGISTERS / 8)

/* out += p V over `used` positions of one page, for `width` * LANES columns; `next` as above. */
static inline __attribute__((always_inline)) void add_values(
    const int count, const int width, int64_t used, int64_t dim, const float *v, const float *const *p,
    float *const *out, const float *next) {
    vec total[4][WIDE];
    for (int g = 0; g < count; g++)
        for (int c = 0; c < width; c++) total[g][c] = load(out[g] + c * LANES);
    for (int64_t t = 0; t < used; t++) {
        vec own[WIDE];
        for (int c = 0; c < width; c++) {
            own[c] = load(v + t * dim + c * LANES);
            __builtin_prefetch(next + t * dim + c * LANES, 0, 2);
        }
        for (int g = 0; g < count; g++) {
            const vec x = splat(p[g][t]);
            for (int c = 0; c < width; c++) total[g][c] = fused(x, own[c], total[g][c]);
        }
    }
    for (int g = 0; g < count; g++)
        for (int c = 0; c < width; c++) store(out[g] + c * LANES, total[g][c]);
}

/* sums += p K for the first `dim` numbers of the turned keys of one page, vector by vector: what lies in one is added up
 * at the end, by `across`. Weights beyond the last position are zero. */
static inline __attribute__((always_inline)) void add_latents(
    const int count, int64_t dim, int64_t page, const float *k, const float *const *p, float *const *sums) {
    for (int64_t at = 0; at < page; at += 2 * LANES) {
        vec low[4], high[4];
        for (int g = 0; g < count; g++) low[g] = load(p[g] + at), high[g] = load(p[g] + at + LANES);
        for (int64_t d = 0; d < dim; d++) {
            const vec a = load(k + d * page + at), b = load(k + d * page + at + LANES);
            for (int g = 0; g < count; g++) {
                float *sum = sums[g] + d * LANES;
                store(sum, fused(high[g], b, fused(low[g], a, load(sum))));
            }
        }
    }
}

static void across(const float *sums, int64_t dim, float *out) {
    for (int64_t d = 0; d < dim; d++) {
        float total = 0.0f;
        for (int i = 0; i < LANES; i++) total += sums[d * LANES + i];
        out[d] = total;
    }
}

/* Turn the scores from `skip` to `length` into weights that add up to one, together with that of `sink` where there is
 * one; what is before and beyond them, up to whole vectors, into zeros. */
static void softmax(float *s, int64_t skip, int64_t length, int64_t room, const float *sink) {
    for (int64_t i = 0; i < skip; i++) s[i] = -INFINITY;
    for (int64_t i = length; i < room; i++) s[i] = -INFINITY;
    vec most = load(s);
    for (int64_t i = LANES; i < room; i += LANES) {
        const vec x = load(s + i);
        most = pick(most > x, most, x);
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = top > most[i] ? top : most[i];
    if (sink && *sink > top) top = *sink;
    vec sums = splat(0.0f);
    for (int64_t i = 0; i < room; i += LANES) {
        store(s + i, exp_of(load(s + i) - splat(top)));
        for (int64_t j = i; j < skip && j < i + LANES; j++) s[j] = 0.0f;
        for (int64_t j = length > i ? length : i; j < i + LANES; j++) s[j] = 0.0f;
        sums += load(s + i);
    }
    float total = 0.0f;
    for (int i = 0; i < LANES; i++) total += sums[i];
    if (sink) total += exp_of(splat(*sink - top))[0];
    const vec share = splat(1.0f / total);
    for (int64_t i = 0; i < room; i += LANES) store(s + i, load(s + i) * share);
}

struct shape {
    int64_t rows, groups, heads, dim, page, width, threads; /* `groups` queries share each of `heads` */
    int64_t window;                                         /* positions that a row attends to; 0: all */
    int64_t latent;   /* the first numbers of a key that are the value, of one head; 0: values lie apart */
    int64_t together; /* neighbouring rows that read the same pages, so that a head of theirs is read once; 1 or more */
};

/* `count` of the queries of one row that share a head, over `length` positions in `pages` but for the first `skip`. */
static inline __attribute__((always_inline)) void attend_some(
    const int count, const struct shape *sh, const int32_t *pages, int64_t skip, int64_t length, int64_t head,
    const float *q, const float *sinks, const float *keys, const float *values, float scale, float *out, float *scratch,
    const float *next) {
    const int64_t dim = sh->dim, page = sh->page, tile = dim * page;
    const int64_t used = (length + page - 1) / page, room = used * page;
    const int64_t wide = sh->latent ? sh->latent : dim;
    const float *qs[4];
    float *ss[4], *outs[4];
    for (int g = 0; g < count; g++) qs[g] = q + g * dim, outs[g] = out + g * wide;
    for (int64_t n = 0; n < used; n++) {
        for (int g = 0; g < count; g++) ss[g] = scratch + g * room + n * page;
        const float *after = n + 1 < used ? keys + (pages[n + 1] * sh->heads + head) * tile
                                          : (sh->latent ? keys : values) + (pages[0] * sh->heads + head) * tile;
        score_page(count, dim, page, keys + (pages[n] * sh->heads + head) * tile, qs, scale, ss, after);
    }
    for (int g = 0; g < count; g++) {
        softmax(scratch + g * room, skip, length, room, sinks ? sinks + g : NULL);
        memset(outs[g], 0, wide * sizeof *out);
    }
    if (sh->latent) {
        const float *ps[4];
        float *sums[4];
        for (int g = 0; g < count; g++) sums[g] = scratch + 4 * room + g * wide * LANES;
        memset(sums[0], 0, count * wide * LANES * sizeof *out);
        for (int64_t n = 0; n < used; n++) {
            for (int g = 0; g < count; g++) ps[g] = scratch + g * room + n * page;
            add_latents(count, wide, page, keys + (pages[n] * sh->heads + head) * tile, ps, sums);
        }
        for (int g = 0; g < count; g++) across(sums[g], wide, outs[g]);
        return;
    }
    for (int64_t n = 0; n < used; n++) {
        const int64_t here = length - n * page < page ? length - n * page : page;
        const float *v = values + (pages[n] * sh->heads + head) * tile, *ps[4];
        const float *after = n + 1 < used ? values + (pages[n + 1] * sh->heads + head) * tile : next;
        for (int g = 0; g < count; g++) ps[g] = scratch + g * room + n * page;
        int64_t c = 0;
        for (; c + WIDE * LANES <= dim; c += WIDE * LANES) {
            float *to[4];
            for (int g = 0; g < count; g++) to[g] = outs[g] + c;
            add_values(count, WIDE, here, dim, v + c, ps, to, after + c);
        }
        for (; c < dim; c += LANES) {
            float *to[4];
            for (int g = 0; g < count; g++) to[g] = outs[g] + c;
            add_values(count, 1, here, dim, v + c, ps, to, after + c);
        }
    }
}

/* The row and the head of a task: of rows that are together one head after another. */
static inline void place(const struct shape *sh, int64_t task, int64_t *row, int64_t *head) {
    const int64_t first = task / (sh->together * sh->heads) * sh->together;
    const int64_t rows = sh->rows - first < sh->together ? sh->rows - first : sh->together;
    *row = first + (task - first * sh->heads) % rows;
    *head = (task - first * sh->heads) / rows;
}

/* Store each row's new key and value [rows, heads, dim] at `position` of its sequence, and then attend to all up to
 * there, what other rows of the same sequence have stored before it among them: out [rows, heads * groups, dim] of q.
 * `sinks` [heads * groups] or NULL. Row strides are in floats. `page` is a multiple of 32, `dim` of 16 unless these are
 * latents, which have no `v` and `values`, and out [rows, groups, latent]. Returns nonzero when memory ran out. */
int weft_attend(
    const struct shape *sh, const int32_t *table, const int64_t *position, const float *q, int64_t q_stride,
    const float *k, int64_t k_stride, const float *v, int64_t v_stride, const float *sinks, float *keys, float *values,
    float *out) {
    const int64_t dim = sh->dim, page = sh->page, tile = dim * page, wide = sh->latent ? sh->latent : dim;
    const float scale = 1.0f / sqrtf((float)dim);
    int failed = 0;
#pragma omp parallel for schedule(static) num_threads(sh->threads) if (sh->threads > 1)
    for (int64_t task = 0; task < sh->rows * sh->heads; task++) {
        const int64_t row = task / sh->heads, head = task % sh->heads, at = position[row] % page;
        const int64_t last = table[row * sh->width + position[row] / page] * sh->heads + head;
        for (int64_t d = 0; d < dim; d++) keys[last * tile + d * page + at] = k[row * k_stride + head * dim + d];
        if (!sh->latent) memcpy(values + last * tile + at * dim, v + row * v_stride + head * dim, dim * sizeof *v);
    }
#pragma omp parallel for schedule(dynamic, 4) num_threads(sh->threads) if (sh->threads > 1)
    for (int64_t task = 0; task < sh->rows * sh->heads; task++) {
        int64_t row, head, row_after, head_after;
        place(sh, task, &row, &head);
        place(sh, task + 1 < sh->rows * sh->heads ? task + 1 : task, &row_after, &head_after);
        const int64_t length = position[row] + 1;
        const int32_t *pages = table + row * sh->width;
        /* Pages that lie before the window are not read. */
        const int64_t low = sh->window && length > sh->window ? length - sh->window : 0;
        const int32_t *mine = pages + low / page;
        const int64_t skip = low % page, seen = length - low / page * page;
        const int64_t room = (seen + page - 1) / page * page;
        float *scratch = malloc(4 * (room + sh->latent * LANES) * sizeof *scratch);
        if (!scratch) {
            failed = 1;
            continue;
        }
        const float *next = keys + (table[row_after * sh->width] * sh->heads + head_after) * tile;
        for (int64_t g = 0; g < sh->groups; g += 4) {
            const int64_t first = head * sh->groups + g;
            const float *from = q + row * q_stride + first * dim;
            const float *sink = sinks ? sinks + first : NULL;
            float *to = out + (row * sh->heads * sh->groups + first) * wide;
            switch (sh->groups - g) {
            case 1: attend_some(1, sh, mine, skip, seen, head, from, sink, keys, values, scale, to, scratch, next); break;
            case 2: attend_some(2, sh, mine, skip, seen, head, from, sink, keys, values, scale, to, scratch, next); break;
            case 3: attend_some(3, sh, mine, skip, seen, head, from, sink, keys, values, scale, to, scratch, next); break;
            default: attend_some(4, sh, mine, skip, seen, head, from, sink, keys, values, scale, to, scratch, next);
            }
        }
        free(scratch);
    }
    return failed;
}
