/* Vectors of 16 numbers, for all kernels. Compiled once per WIDTH of a head and element type: HALF for bfloat16, else float32.
 * Arithmetic is float32 throughout. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define PADDED ((WIDTH + LANES - 1) / LANES * LANES)
#define PARTS (PADDED / LANES)

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vfu __attribute__((vector_size(64), aligned(4), may_alias));

#ifdef HALF
typedef uint16_t elem;
typedef uint16_t vh __attribute__((vector_size(32)));
typedef uint16_t vhu __attribute__((vector_size(32), aligned(2), may_alias));
static inline vf load(const elem *from) { return (vf)(__builtin_convertvector(*(const vhu *)from, vu) << 16); }
static inline void store(elem *to, vf x) {
    vu bits = (vu)x;
    bits += 0x7fff + ((bits >> 16) & 1); /* to the nearest, ties to even */
    *(vhu *)to = __builtin_convertvector(bits >> 16, vh);
}
#else
typedef float elem;
static inline vf load(const elem *from) { return *(const vfu *)from; }
static inline void store(elem *to, vf x) { *(vfu *)to = x; }
#endif

static inline vf load_some(const elem *from, int64_t count) {
    if (count >= LANES) return load(from);
    elem buffer[LANES] = {0};
    memcpy(buffer, from, count * sizeof(elem));
    return load(buffer);
}

static inline void store_some(elem *to, vf x, int64_t count) {
    if (count >= LANES) {
        store(to, x);
        return;
    }
    elem buffer[LANES];
    store(buffer, x);
    memcpy(to, buffer, count * sizeof(elem));
}

static inline vf load_floats(const float *from) { return *(const vfu *)from; }
static inline void store_floats(float *to, vf x) { *(vfu *)to = x; }
static inline vf all(float x) { return x - (vf){0}; }
static inline vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

#ifdef __AVX512F__
static inline vf larger(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
static inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
static inline float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
#else
static inline vf larger(vf a, vf b) { return pick(a > b, a, b); }
static inline float largest(vf x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}
static inline float sum_of(vf x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
#endif

/* exp(x) within 2 units of the last place; exactly 0 below -87, and that of 88 above. */
static inline vf exponential(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vi alive = x >= -87.0f;
    vf clipped = pick(x > 88.0f, all(88.0f), pick(alive, x, all(-87.0f)));
    vf shifted = clipped * 1.44269504f + magic;
    vf whole = shifted - magic;
    vf rest = clipped - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    vi power = (__builtin_convertvector(whole, vi) + 127) << 23;
    return pick(alive, sum * (vf)power, all(0.0f));
}

static inline float exponential_of(float x) { return exponential(all(x))[0]; }

#if defined(HALF) && defined(__AVX512BF16__)
/* sum + a b for 16 pairs: each number of 32 bits holds two neighbours in the sum, `factors` the pair that they are multiplied with */
static inline vf add_pairs(vf sum, __m512i pairs, const elem *factors) {
    int32_t both;
    memcpy(&both, factors, sizeof both);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(both));
}
#endif

/* Matrix products of our own sum over STEP neighbours at a time. They are made where they are faster than the matrix libraries: with
 * vectors of 512 bits, for bfloat16 with products of pairs but no matrix unit. */
#if defined(HALF) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define STEP 2
#define add_products add_pairs
#elif defined(__AVX512F__) && !defined(HALF)
#define STEP 1
static inline vf add_products(vf sum, __m512i numbers, const elem *factor) {
    return (vf)_mm512_fmadd_ps(_mm512_castsi512_ps(numbers), _mm512_set1_ps(*factor), (__m512)sum);
}
#endif
