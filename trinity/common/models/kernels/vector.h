// Sixteen floats at a time, from memory that holds float32 or bfloat16; compilers map them to
// whatever registers the machine has.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

constexpr long LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct BFloat16 {
    uint16_t bits;
};

static inline Floats all(float value) { return Floats{} + value; }

static inline Floats load(const float* from) {
    Floats found;
    memcpy(&found, from, sizeof found);
    return found;
}

// Between bfloat16 and float32. To the nearest, ties to even; NaN stays NaN. Compilers make a dozen
// instructions of what some processors do in one (which takes numbers below 1e-38 for 0).
#ifdef __AVX512BF16__
static inline Floats widened(Halves halves) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
}

static inline Halves narrowed(Floats values) { return (Halves)_mm512_cvtneps_pbh((__m512)values); }
#else
static inline Floats widened(Halves halves) {
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

static inline Halves narrowed(Floats values) {
    Words bits = (Words)values, is_nan = (Words)(values != values);
    Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((nearest & ~is_nan) | (is_nan & 0x7fc0), Halves);
}
#endif

static inline Floats load(const BFloat16* from) {
    Halves bits;
    memcpy(&bits, from, sizeof bits);
    return widened(bits);
}

static inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

static inline void store(BFloat16* to, Floats values) {
    Halves bits = narrowed(values);
    memcpy(to, &bits, sizeof bits);
}

// The values as T holds them.
template <class T>
static inline Floats rounded(Floats values);

template <>
inline Floats rounded<float>(Floats values) {
    return values;
}

template <>
inline Floats rounded<BFloat16>(Floats values) {
    return widened(narrowed(values));
}

// The first `count` values; the others are `fill`.
template <class T>
static inline Floats load(const T* from, long count, float fill = 0) {
    if (count >= LANES) return load(from);
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    Floats found = load(padded);
    for (long i = count; i < LANES; i++) found[i] = fill;
    return found;
}

template <class T>
static inline void store(T* to, Floats values, long count) {
    if (count >= LANES) return store(to, values);
    T padded[LANES];
    store(padded, values);
    memcpy(to, padded, count * sizeof(T));
}

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

static inline float sum(Floats values) {
    float folded[LANES];
    store(folded, values);
    for (long half = LANES / 2; half; half /= 2)
        for (long i = 0; i < half; i++) folded[i] += folded[i + half];
    return folded[0];
}

static inline float largest(Floats values) {
    float found = values[0];
    for (long i = 1; i < LANES; i++) found = found > values[i] ? found : values[i];
    return found;
}

// e^x within 2 units of the last place; 0 below -87.
static inline Floats exponential(Floats x) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to whole numbers
    Floats bounded = x < -87.0f ? all(-87.0f) : x > 88.0f ? all(88.0f) : x;
    Floats shifted = bounded * 1.44269504f + shift;
    Floats whole = shifted - shift;
    Floats rest = bounded - whole * 0.693145752f;  // ln 2 in two parts
    rest -= whole * 1.42860677e-6f;
    Floats series = rest * (1 / 5040.0f) + 1 / 720.0f;
    series = series * rest + 1 / 120.0f;
    series = series * rest + 1 / 24.0f;
    series = series * rest + 1 / 6.0f;
    series = (series * rest + 0.5f) * rest + 1.0f;
    series = series * rest + 1.0f;
    Floats found = (Floats)((Ints)series + (((Ints)shifted - (Ints)shift) << 23));
    return x < -87.0f ? all(0) : found;
}

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// A kernel's rows, shared out to threads.
#define EACH_ROW _Pragma("omp parallel for num_threads(threads) schedule(static)")

// Where Python finds a kernel: a pointer for each dtype.
#define EXPORT(name)                                        \
    extern "C" {                                            \
    extern void* const name##_float32 = (void*)name<float>; \
    extern void* const name##_bfloat16 = (void*)name<BFloat16>; \
    }
