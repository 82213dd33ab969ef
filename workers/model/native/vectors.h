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

/* As wide as the processor's own, and how many of them it has: a compiler takes wider ones apart in memory, and is then ten
 * times slower. */
#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#else
#define LANES 4
#ifdef __aarch64__
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#endif
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

/* a b + c, rounded once where the processor can. Asked for by name: left to itself a compiler fuses a sum in one loop and not in
 * another (gcc does, for Zen), and a row's bits would depend on how many rows are computed beside it. */
#if defined(__AVX512F__)
#include <immintrin.h>
static inline vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__FMA__)
#include <immintrin.h>
static inline vec fused(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
#include <arm_neon.h>
static inline vec fused(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
static inline vec fused(vec a, vec b, vec c) { return a * b + c; }
#endif

static inline float fused_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* exp(x) for x <= 0, to about 1e-7 relative; below -87 as of -87. Not-a-number stays that. */
static inline vec exp_of(vec x) {
    x = pick(x < splat(-87.0f), splat(-87.0f), x);
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to whole numbers */
    const vec n = fused(x, splat(1.44269504088896341f), magic) - magic;
    const vec r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    vec p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + splat(1.0f);
    const vec whole = pick(n == n, n, splat(0.0f));
    const ivec bits = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return p * (vec)bits;
}
