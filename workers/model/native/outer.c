/* Gradients of factors: what the rows of a segment add to its W. The order of every sum is that of the rows, whatever the
 * threads, which share the columns, and the other segments.
 */

#include "segments.h"

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

/* outer_block for all of a segment's rows of W, where it has many rows of y: `TALL` of them are copied side by side, as many
 * columns as fit; the sums so far wait in `part`. */
#define TALL 64
#define STRIP 64
#define MOST_FACTORS 512

/* Rows of W whose sums stay in registers. */
#define HELD (REGISTERS == 16 ? 6 : 12)

static inline __attribute__((always_inline)) void outer_piece(
    const int factors, int64_t rows, const float *u, int64_t u_stride, const float *piece, float *part) {
    vec low[HELD], high[HELD];
    for (int i = 0; i < factors; i++) low[i] = load(part + i * STRIP), high[i] = load(part + i * STRIP + LANES);
    for (int64_t row = 0; row < rows; row++) {
        const vec a = load(piece + row * STRIP), b = load(piece + row * STRIP + LANES);
        for (int i = 0; i < factors; i++) {
            const vec x = splat(u[row * u_stride + i]);
            low[i] = fused(x, a, low[i]);
            high[i] = fused(x, b, high[i]);
        }
    }
    for (int i = 0; i < factors; i++) store(part + i * STRIP, low[i]), store(part + i * STRIP + LANES, high[i]);
}

static void outer_strip(
    const Segment *segment, int64_t n, int64_t from, int64_t columns, const float *u, int64_t u_stride, const float *y,
    int64_t y_stride) {
    float piece[TALL * STRIP] __attribute__((aligned(64))), part[MOST_FACTORS * STRIP] __attribute__((aligned(64)));
    const int64_t r = segment->r;
    memset(part, 0, r * STRIP * sizeof *part);
    for (int64_t first = segment->first; first < segment->last; first += TALL) {
        const int64_t rows = segment->last - first < TALL ? segment->last - first : TALL;
        const float *by = u + first * u_stride + segment->column;
        for (int64_t row = 0; row < rows; row++)
            memcpy(piece + row * STRIP, y + (first + row) * y_stride + from, columns * sizeof *piece);
        for (int64_t k = 0, many; k < r; k += many) {
            many = r - k < HELD ? r - k < 4 ? r - k < 2 ? 1 : 2 : 4 : HELD;
            for (int64_t c = 0; c < columns; c += 2 * LANES) {
                float *sums = part + k * STRIP + c;
                switch (many) {
                case HELD: outer_piece(HELD, rows, by + k, u_stride, piece + c, sums); break;
                case 4: outer_piece(4, rows, by + k, u_stride, piece + c, sums); break;
                case 2: outer_piece(2, rows, by + k, u_stride, piece + c, sums); break;
                default: outer_piece(1, rows, by + k, u_stride, piece + c, sums);
                }
            }
        }
    }
    const vec scale = splat(segment->alpha);
    for (int64_t k = 0; k < r; k++)
        for (int64_t c = 0; c < columns; c += LANES) {
            float *to = segment->w + k * n + from + c;
            store(to, load(to) + scale * load(part + k * STRIP + c));
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
            int64_t k = 0, rest = from;
            if (segment.last - row >= MANY && segment.r <= MOST_FACTORS)
                for (int64_t columns; rest + 2 * LANES <= to; rest += columns) {
                    columns = (to - rest < STRIP ? to - rest : STRIP) / (2 * LANES) * (2 * LANES);
                    outer_strip(&segment, n, rest, columns, u, u_stride, y, y_stride);
                }
            for (; k + FACTORS <= segment.r; k += FACTORS)
                outer_block(FACTORS, &segment, n, k, rest, to, u, u_stride, y, y_stride);
            for (; k < segment.r; k++) outer_block(1, &segment, n, k, rest, to, u, u_stride, y, y_stride);
        }
    }
}
