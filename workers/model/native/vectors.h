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
