/* One token of each row through a recurrence: its state of each head is a matrix S [dim, width], float32.
 *
 * S becomes decay S + k w^T, and the output is q^T S. What is written, w, is the value v, or, by the delta rule,
 * rate (v - decay k^T S). Heads in a row share queries and keys: `heads / groups` consecutive ones have the same.
 *
 * States are read and never written; the new ones lie elsewhere. A state is read from memory once: the second time it is
 * needed it is in the processor's own cache.
 *
 * What a row gets depends on the row alone, bit for bit: every sum is over `dim`, in order, whatever the threads and the
 * other rows.
 */

#include <stddef.h>

#include "vectors.h"

struct step {
    int64_t rows, heads, groups, dim, width, threads;
};

/* Columns that are summed together, in vectors: a row of most published states from end to end. */
#define WIDE (REGISTERS / 4)

/* `count` vectors of columns of one head. */
static inline __attribute__((always_inline)) void columns(
    const int count, const struct step *sh, const float *start, float *end, const float *q, const float *k, const float *v,
    float decay, const float *rate, float *out) {
    const int64_t dim = sh->dim, width = sh->width;
    const vec kept = splat(decay);
    vec written[WIDE], total[WIDE];
    for (int c = 0; c < count; c++) written[c] = load(v + c * LANES), total[c] = splat(0.0f);
    if (rate) {
        for (int64_t d = 0; d < dim; d++) {
            const vec key = splat(k[d]);
            for (int c = 0; c < count; c++) total[c] = fused(key, load(start + d * width + c * LANES), total[c]);
        }
        for (int c = 0; c < count; c++) {
            written[c] = splat(*rate) * (written[c] - kept * total[c]);
            total[c] = splat(0.0f);
        }
    }
    for (int64_t d = 0; d < dim; d++) {
        const vec key = splat(k[d]), query = splat(q[d]);
        for (int c = 0; c < count; c++) {
            const vec s = fused(kept, load(start + d * width + c * LANES), key * written[c]);
            store(end + d * width + c * LANES, s);
            total[c] = fused(query, s, total[c]);
        }
    }
    for (int c = 0; c < count; c++) store(out + c * LANES, total[c]);
}

/* The same for one column. */
static void column(
    const struct step *sh, const float *start, float *end, const float *q, const float *k, float v, float decay,
    const float *rate, float *out) {
    float total = 0.0f;
    if (rate) {
        for (int64_t d = 0; d < sh->dim; d++) total = fused_one(k[d], start[d * sh->width], total);
        v = *rate * (v - decay * total);
        total = 0.0f;
    }
    for (int64_t d = 0; d < sh->dim; d++) {
        const float s = fused_one(decay, start[d * sh->width], k[d] * v);
        end[d * sh->width] = s;
        total = fused_one(q[d], s, total);
    }
    *out = total;
}

/* start[row] and end[row] are the states of each row, [heads, dim, width]. q and k [rows, groups, dim], v and out
 * [rows, heads, width], decay and rate [rows, heads]; rate NULL: not by the delta rule. */
void weft_step(
    const struct step *sh, const float *const *start, float *const *end, const float *q, const float *k, const float *v,
    const float *decay, const float *rate, float *out) {
    const int64_t heads = sh->heads, width = sh->width, size = sh->dim * width;
#pragma omp parallel for schedule(static) num_threads(sh->threads) if (sh->threads > 1)
    for (int64_t task = 0; task < sh->rows * heads; task++) {
        const int64_t row = task / heads, head = task % heads;
        const int64_t shared = (row * sh->groups + head * sh->groups / heads) * sh->dim;
        const float *from = start[row] + head * size, *of_q = q + shared, *of_k = k + shared, *of_v = v + task * width;
        const float *by = rate ? rate + task : NULL, fade = decay[task];
        float *to = end[row] + head * size, *result = out + task * width;
        int64_t c = 0;
        for (; c + WIDE * LANES <= width; c += WIDE * LANES)
            columns(WIDE, sh, from + c, to + c, of_q, of_k, of_v + c, fade, by, result + c);
        for (; c + WIDE / 2 * LANES <= width; c += WIDE / 2 * LANES)
            columns(WIDE / 2, sh, from + c, to + c, of_q, of_k, of_v + c, fade, by, result + c);
        for (; c + LANES <= width; c += LANES)
            columns(1, sh, from + c, to + c, of_q, of_k, of_v + c, fade, by, result + c);
        for (; c < width; c++) column(sh, from + c, to + c, of_q, of_k, of_v[c], fade, by, result + c);
    }
}
