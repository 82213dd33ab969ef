/* What a step computes without a gradient, in one call: a linear with its adapters, and a mixture of experts with theirs.
 *
 * The factors of many adapters lie anywhere, and are more than a processor's own cache holds: reading them takes as long as
 * the memory takes. So they are fetched while the base, which the processor is busy with, is multiplied (`Soon`). What a
 * row gets depends on itself and its adapter alone, bit for bit: everything here goes row by row in one order.
 */

#include <math.h>
#include <stdlib.h>

#include "products.h"

/* At most this much is fetched ahead: more would push itself out of the caches. */
#define MOST ((8 << 20) / BLOCK)

/* y = x W^T and, where there are adapters, y += alpha (x A^T) B^T: as weft_gemm and weft_add. `u_stride` numbers are taken
 * for each row's x A^T. Returns nonzero when memory ran out. */
int weft_linear(
    const Weight *weight, const float *packed, const float *x, int64_t x_stride, const Factor *a, int64_t parts,
    const Factor *b, int64_t u_stride, int32_t rows, float *y, int64_t y_stride) {
    if (!a) {
        weft_gemm(weight, packed, &rows, x, x_stride, y, y_stride, NULL);
        return 0;
    }
    const char **blocks = malloc(MOST * sizeof *blocks);
    float *u = malloc(rows * u_stride * sizeof *u + 1);
    if (blocks && u) {
        Factor all[4] = {*a};
        memcpy(all + 1, b, parts * sizeof *b);
        const Soon soon = {weft_blocks(all, 1 + parts, blocks, MOST), blocks};
        weft_gemm(weight, packed, &rows, x, x_stride, y, y_stride, &soon);
        weft_add(a, x, x_stride, u, u_stride, parts, b, y, y_stride);
    }
    const int failed = !blocks || !u;
    free(blocks);
    free(u);
    return failed;
}

typedef struct {
    int64_t rows, heads, dim, turned, threads;
    float eps;
} Heads;

/* Of every head of every row: its numbers over the root of their mean square, times `norm` (unless NULL); and then the first
 * `turned` of them turned by the row's angles, whose cosines and sines are [rows, turned]. `out` may be x. */
void weft_heads(
    const Heads *h, const float *x, int64_t x_stride, const float *norm, const float *cosines, const float *sines, float *out,
    int64_t out_stride) {
    const int64_t dim = h->dim, half = h->turned / 2;
#pragma omp parallel for schedule(static) num_threads(h->threads) if (h->threads > 1)
    for (int64_t row = 0; row < h->rows; row++) {
        for (int64_t head = 0; head < h->heads; head++) {
            const float *from = x + row * x_stride + head * dim;
            float *to = out + row * out_stride + head * dim;
            if (norm) {
                vec squares = splat(0.0f);
                int64_t c = 0;
                for (; c + LANES <= dim; c += LANES) squares += load(from + c) * load(from + c);
                float total = 0.0f;
                for (int i = 0; i < LANES; i++) total += squares[i];
                for (; c < dim; c++) total += from[c] * from[c];
                const float scale = 1.0f / sqrtf(total / (float)dim + h->eps);
                for (c = 0; c < dim; c++) to[c] = from[c] * scale * norm[c];
            } else if (to != from)
                memcpy(to, from, dim * sizeof *to);
            const float *cosine = cosines + row * h->turned, *sine = sines + row * h->turned;
            for (int64_t c = 0; c < half; c++) {
                const float first = to[c], second = to[half + c];
                to[c] = first * cosine[c] - second * sine[c];
                to[half + c] = second * cosine[half + c] + first * sine[half + c];
            }
        }
    }
}

typedef struct {
    int64_t rows, experts, choices, normed, threads;
    float scaling;
} Router;

/* The `choices` likeliest experts of each row, the likeliest first and of equals the first, and softmax(logits) of each times
 * `scaling`; `normed`: over their sum. */
void weft_choose(const Router *r, const float *logits, int64_t stride, float *weights, int64_t *chosen) {
#pragma omp parallel for schedule(static) num_threads(r->threads) if (r->threads > 1)
    for (int64_t row = 0; row < r->rows; row++) {
        const float *own = logits + row * stride;
        float *weight = weights + row * r->choices, total = 0.0f, taken = 0.0f;
        int64_t *to = chosen + row * r->choices;
        for (int64_t k = 0; k < r->choices; k++) {
            int64_t best = -1;
            for (int64_t e = 0; e < r->experts; e++) {
                if (best >= 0 && !(own[e] > own[best])) continue;
                int64_t i = 0;
                while (i < k && to[i] != e) i++;
                if (i == k) best = e;
            }
            to[k] = best;
        }
        const vec top = splat(own[to[0]]);
        for (int64_t e = 0; e < r->experts; e += LANES) {
            vec own_e = splat(-INFINITY);
            memcpy(&own_e, own + e, (r->experts - e < LANES ? r->experts - e : LANES) * sizeof *own);
            const vec p = exp_of(own_e - top);
            for (int i = 0; i < LANES && e + i < r->experts; i++) total += p[i];
        }
        for (int64_t k = 0; k < r->choices; k++) {
            weight[k] = exp_of(splat(own[to[k]]) - top)[0] / total;
            taken += weight[k];
        }
        for (int64_t k = 0; k < r->choices; k++) weight[k] *= r->scaling / (r->normed ? taken : 1.0f);
    }
}

typedef struct {
    int64_t tokens, choices, hidden, width;
    int64_t rank; /* the largest; 0: no adapters */
    const int64_t *group_of_token;
    Factor gate_up_a, gate_b, up_b, down_a, down_b; /* rows and segments of gate_b, up_b and down_a are filled in here */
} Mixture;

/* The tokens' pairs with their experts, sorted by expert and, within, by token. */
typedef struct {
    int64_t *token, *segment, *place; /* of each pair; `place` [tokens, choices]: where a token's pairs lie */
    int32_t *ends;
} Pairs;

static void sort_pairs(const Mixture *m, int64_t experts, const int64_t *chosen, Pairs *pairs) {
    int32_t *next = pairs->ends;
    const int64_t count = m->tokens * m->choices;
    memset(next, 0, experts * sizeof *next);
    for (int64_t i = 0; i < count; i++) next[chosen[i]]++;
    for (int64_t e = 0, before = 0; e < experts; e++) {
        const int32_t own = next[e];
        next[e] = (int32_t)before;
        before += own;
    }
    for (int64_t i = 0; i < count; i++) { /* leaves next[e] where the pairs of e end */
        const int64_t at = next[chosen[i]]++, token = i / m->choices;
        pairs->place[i] = at;
        pairs->token[at] = token;
        if (m->rank) pairs->segment[at] = chosen[i] * m->down_a.groups + m->group_of_token[token];
    }
}

/* out[token] = the sum of its pairs' rows of y, weighted, in the order of its choices. */
static void combine(
    const Mixture *m, int64_t threads, const Pairs *pairs, const float *weights, const float *y, int64_t columns,
    float *out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t token = 0; token < m->tokens; token++) {
        float *restrict own = out + token * columns;
        memset(own, 0, columns * sizeof *own);
        for (int64_t i = token * m->choices; i < (token + 1) * m->choices; i++) {
            const float weight = weights[i], *restrict from = y + pairs->place[i] * columns;
            for (int64_t c = 0; c < columns; c++) own[c] += weight * from[c];
        }
    }
}

static void gather(int64_t threads, int64_t rows, const int64_t *token, const float *x, int64_t columns, float *to) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) memcpy(to + row * columns, x + token[row] * columns, columns * sizeof *to);
}

static void with_pairs(Factor *factor, int64_t count, const Pairs *pairs) { factor->rows = count, factor->segment = pairs->segment; }

/* out [tokens, hidden] = sum over a token's choices of weight * down(silu(gate x) * up x), each with the adapter of its
 * token, whose outer factors are shared by all experts: that of gate and up is applied once for each token, before its
 * pairs part, and that of down once, after they are added up. x [tokens, hidden], `weights` and `chosen` [tokens, choices].
 * Returns nonzero when memory ran out. */
int weft_mixture(
    Mixture *m, const Weight *gate_up, const float *gate_up_packed, const Weight *down, const float *down_packed,
    const float *x, const float *weights, const int64_t *chosen, float *out) {
    const int64_t count = m->tokens * m->choices, d = m->hidden, f = m->width, r = m->rank, threads = gate_up->threads;
    int64_t *numbers = malloc((3 * count + 1) * sizeof *numbers + gate_up->experts * sizeof(int32_t));
    float *rows = malloc((count * (d + 2 * f + 3 * r) + m->tokens * 3 * r + 1) * sizeof *rows);
    const char **blocks = malloc(MOST * sizeof *blocks);
    const int failed = !numbers || !rows || !blocks;
    if (!failed) {
        Pairs pairs = {numbers, numbers + count, numbers + 2 * count, (int32_t *)(numbers + 3 * count)};
        float *y = rows, *inner = y + count * d, *u = inner + count * 2 * f, *v = u + count * 2 * r;
        float *u_token = v + count * r, *v_token = u_token + m->tokens * 2 * r;
        sort_pairs(m, gate_up->experts, chosen, &pairs);
        Factor *of_pairs[] = {&m->gate_b, &m->up_b, &m->down_a};
        for (int i = 0; i < 3; i++) with_pairs(of_pairs[i], count, &pairs);
        Factor b[] = {m->gate_b, m->up_b};
        Soon soon = {0, blocks};
        if (r) soon.count = weft_blocks(&m->gate_up_a, 1, blocks, MOST);
        if (r) soon.count += weft_blocks(b, 2, blocks + soon.count, MOST - soon.count);
        gather(threads, count, pairs.token, x, d, y);
        weft_gemm(gate_up, gate_up_packed, pairs.ends, y, d, inner, 2 * f, &soon);
        if (r) {
            weft_add(&m->gate_up_a, x, d, u_token, 2 * r, 0, NULL, NULL, 0);
            gather(threads, count, pairs.token, u_token, 2 * r, u);
            weft_add(NULL, NULL, 0, u, 2 * r, 2, b, inner, 2 * f);
        }
        weft_swiglu(threads, count, f, inner, 2 * f, inner, 2 * f); /* over gate */
        if (r) soon.count = weft_blocks(&m->down_a, 1, blocks, MOST);
        if (r) soon.count += weft_blocks(&m->down_b, 1, blocks + soon.count, MOST - soon.count);
        weft_gemm(down, down_packed, pairs.ends, inner, 2 * f, y, d, &soon);
        combine(m, threads, &pairs, weights, y, d, out);
        if (r) {
            memset(v, 0, count * r * sizeof *v); /* an adapter of a smaller rank fills a part */
            weft_add(&m->down_a, inner, 2 * f, v, r, 0, NULL, NULL, 0);
            combine(m, threads, &pairs, weights, v, r, v_token);
            weft_add(NULL, NULL, 0, v_token, r, 1, &m->down_b, out, d);
        }
    }
    free(numbers);
    free(rows);
    free(blocks);
    return failed;
}
