/* What an MLP computes between its products, silu(gate) * up, and its gradient, in float32.
 *
 * A row holds its gate and, beside it, its up. Every number has the same bits wherever it stands and whatever else is there:
 * what is left over at the end of a row goes through the same operations as what fills a vector, and threads share rows.
 * (A library's vectorised functions round otherwise where less than a vector is left, at the end of a row or of a thread's
 * share.)
 */

#include "products.h"

static inline vec sigmoid(vec x) {
    const ivec below = x < splat(0.0f);
    const vec z = exp_of(pick(below, x, -x)), one = splat(1.0f);
    return pick(below, z, one) / (one + z);
}

static inline vec some(const float *p, int64_t count) {
    vec v = splat(0.0f);
    memcpy(&v, p, count * sizeof *p);
    return v;
}

/* h [rows, width] = silu(gate) * up; it may lie where gate does. */
void weft_swiglu(
    int64_t threads, int64_t rows, int64_t width, const float *gate_up, int64_t stride, float *h, int64_t h_stride) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * stride, *up = gate + width;
        float *to = h + row * h_stride;
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) {
            const vec g = load(gate + c);
            store(to + c, g * sigmoid(g) * load(up + c));
        }
        if (c < width) {
            const int64_t left = width - c;
            const vec g = some(gate + c, left), v = g * sigmoid(g) * some(up + c, left);
            memcpy(to + c, &v, left * sizeof *to);
        }
    }
}

static inline void gradients(vec g, vec up, vec dh, vec *dgate, vec *dup) {
    const vec s = sigmoid(g), one = splat(1.0f);
    *dup = dh * (g * s);
    *dgate = dh * up * (s * (one + g * (one - s)));
}

/* The gradient of gate and up, side by side, [rows, 2 * width], from that of h [rows, width]. */
void weft_swiglu_back(
    int64_t threads, int64_t rows, int64_t width, const float *gate_up, int64_t stride, const float *dh, int64_t dh_stride,
    float *dgate_up, int64_t d_stride) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * stride, *up = gate + width, *from = dh + row * dh_stride;
        float *dgate = dgate_up + row * d_stride, *dup = dgate + width;
        for (int64_t c = 0; c < width; c += LANES) {
            const int64_t here = width - c < LANES ? width - c : LANES;
            vec a, b;
            if (here == LANES) {
                gradients(load(gate + c), load(up + c), load(from + c), &a, &b);
                store(dgate + c, a);
                store(dup + c, b);
            } else {
                gradients(some(gate + c, here), some(up + c, here), some(from + c, here), &a, &b);
                memcpy(dgate + c, &a, here * sizeof a[0]);
                memcpy(dup + c, &b, here * sizeof b[0]);
            }
        }
    }
}
