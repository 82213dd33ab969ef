/* Vectors of float32, and the threads of a parallel region (one, where the compiler has no OpenMP): what kernels share. */

#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define threads_here() omp_get_num_threads()
#define thread_here() omp_get_thread_num()
#else
#define threads_here() 1
#define thread_here() 0
#endif

#define LANES 16
typedef float vec __attribute__((vector_size(4 * LANES)));

static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

static inline vec splat(float x) { return x - (vec){0}; }

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

static inline vec pick(ivec where, vec yes, vec no) { return (vec)(((ivec)yes & where) | ((ivec)no & ~where)); }

/* exp(x) for x <= 0, to about 1e-7 relative; below -87 as of -87. Not-a-number stays that. */
static inline vec exp_of(vec x) {
    x = pick(x < splat(-87.0f), splat(-87.0f), x);
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
    const vec n = (x * splat(1.44269504088896341f) + magic) - magic;
    const vec r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const vec whole = pick(n == n, n, splat(0.0f));
    const ivec bits = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return p * (vec)bits;
}
