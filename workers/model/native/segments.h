/* The segments of rows that have a factor of their own, for kernels that go from one to the next (kernels.c, outer.c). */

#include "products.h"

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

/* With so many rows of a segment it pays to copy what they are multiplied with, piece by piece, into a place where it lies side
 * by side: a factor's rows lie so that a cache has few places for a column of them, and would be read from afar again for
 * every few rows. The order of every sum is the same. */
#define MANY 16
