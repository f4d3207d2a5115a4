// Panel layout of a matrix [N, K], and the tile product over some panels.
//
// A matrix is cut into panels of PANEL outputs. Within a panel the weights of an input are adjacent,
// so the inner loop reads memory in order. If the processor adds pairs of bfloat16 products, the
// weights of two inputs are interleaved: an even one's and the next.
//
// Letters in shapes: N outputs, K inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;  // 24 of 32 registers are sums
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm512_fmadd_ps(a, b, c); }
inline Lanes spread(float x) { return (Lanes)_mm512_set1_ps(x); }
#else
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;  // 12 of 16 registers are sums
typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(32)));
#if defined(__AVX2__)
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return (Lanes)_mm256_fmadd_ps(a, b, c); }
inline Lanes spread(float x) { return (Lanes)_mm256_set1_ps(x); }
#else
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
inline Lanes spread(float x) { return x - Lanes{}; }
#endif
#endif

constexpr int PANEL = 2 * LANES;
constexpr int64_t BLOCK_INPUTS = 512;  // of a panel: 32 KB in float32, fits a near cache
constexpr int64_t CACHE_LINE = 64;     // bytes; a step's weights of a panel are at most two lines
constexpr int64_t BLOCK_TOKENS = 128;  // whose activations stay in the L2 cache

template <typename V, typename S> inline V load(const S* from) {
    V there;
    std::memcpy(&there, from, sizeof there);
    return there;
}

// Multiplication of weights of type W: STEP inputs at a time, of type Input, in registers of type
// Lanes. ``place`` is the index of an output's weight of an input within a panel.
template <typename W> struct Arithmetic;

// float32 weights are in order.
template <> struct Arithmetic<float> {
    using Input = float;
    static constexpr int STEP = 1;
    static int64_t place(int64_t lane, int64_t k) { return k * PANEL + lane; }
    static Lanes input(const float* x) { return spread(*x); }
    static Lanes add(Lanes input, Lanes weights, Lanes sum) { return fma(input, weights, sum); }
    static void weights(const float* from, Lanes& low, Lanes& high) {
        low = load<Lanes>(from);
        high = load<Lanes>(from + LANES);
    }
};

#if defined(__AVX512BF16__)
// bfloat16 weights of two inputs of an output are adjacent: one instruction adds their products in
// float32, twice as many as for float32.
template <> struct Arithmetic<bfloat16> {
    using Input = bfloat16;
    static constexpr int STEP = 2;
    static int64_t place(int64_t lane, int64_t k) {
        return (k - k % 2) * PANEL + 2 * lane + k % 2;
    }
    static Lanes input(const bfloat16* x) { return (Lanes)_mm512_set1_epi32(load<int32_t>(x)); }
    static Lanes add(Lanes input, Lanes weights, Lanes sum) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)input, (__m512bh)weights);
    }
    static void weights(const bfloat16* from, Lanes& low, Lanes& high) {
        low = load<Lanes>(from);
        high = load<Lanes>(from + 2 * LANES);
    }
};
#else
// bfloat16 weights are in pairs, 0 and LANES, 1 and LANES + 1, ...: a shift and a mask widen them in
// registers. Half the bytes of float32; sums are in float32.
template <> struct Arithmetic<bfloat16> {
    using Input = float;
    static constexpr int STEP = 1;
    static int64_t place(int64_t lane, int64_t k) {
        return k * PANEL + 2 * (lane % LANES) + lane / LANES;
    }
    static Lanes input(const float* x) { return spread(*x); }
    static Lanes add(Lanes input, Lanes weights, Lanes sum) { return fma(input, weights, sum); }
    static void weights(const bfloat16* from, Lanes& low, Lanes& high) {
        const Bits both = load<Bits>(from);
        low = (Lanes)(both << 16);
        high = (Lanes)(both & 0xFFFF0000u);
    }
};
#endif

// int8 weights are in order; the scales are applied at the end.
template <> struct Arithmetic<int8_t> {
    using Input = float;
    static constexpr int STEP = 1;
    static int64_t place(int64_t lane, int64_t k) { return k * PANEL + lane; }
    static Lanes input(const float* x) { return spread(*x); }
    static Lanes add(Lanes input, Lanes weights, Lanes sum) { return fma(input, weights, sum); }
    static void weights(const int8_t* from, Lanes& low, Lanes& high) {
#if defined(__AVX512F__)
        low = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
        high = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + LANES)));
#elif defined(__AVX2__)
        low = (Lanes)_mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
        high = (Lanes)_mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + LANES))));
#else
        for (int i = 0; i < LANES; i++) {
            low[i] = from[i];
            high[i] = from[i + LANES];
        }
#endif
    }
};

// Stored inputs of a matrix: whole steps; padding of the last one is 0.
template <typename W> inline int64_t stored_inputs(int64_t inputs) {
    return inputs + (Arithmetic<W>::STEP - inputs % Arithmetic<W>::STEP) % Arithmetic<W>::STEP;
}

// Multiply ROWS tokens by PANELS panels, over ``inputs`` inputs, continuing from ``sums``. Prefetches
// the next data meanwhile, ``ahead_step`` bytes further for each step.
template <typename W, int ROWS, int PANELS>
void add_tile(const typename Arithmetic<W>::Input* x, int64_t x_stride, const W* panels,
              int64_t panel_stride, int64_t inputs, const char* ahead, int64_t ahead_step,
              float* sums) {
    using A = Arithmetic<W>;
    Lanes total[ROWS][2 * PANELS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < 2 * PANELS; p++)
            total[r][p] = load<Lanes>(sums + (r * 2 * PANELS + p) * LANES);
    for (int64_t k = 0; k < inputs; k += A::STEP) {
        Lanes weights[2 * PANELS];
        for (int p = 0; p < PANELS; p++)
            A::weights(panels + p * panel_stride + k * PANEL, weights[2 * p], weights[2 * p + 1]);
        __builtin_prefetch(ahead);
        if (ahead_step > CACHE_LINE) __builtin_prefetch(ahead + CACHE_LINE);
        ahead += ahead_step;
        for (int r = 0; r < ROWS; r++) {
            const Lanes input = A::input(x + r * x_stride + k);
            for (int p = 0; p < 2 * PANELS; p++)
                total[r][p] = A::add(input, weights[p], total[r][p]);
        }
    }
    std::memcpy(sums, total, sizeof total);
}

// Few tokens have too few sums to keep the multipliers busy, so they take several panels at a time.
inline int64_t panels_at_once(int64_t tokens, int64_t left) {
    if (tokens == 1 && left >= 4) return 4;
    return tokens <= TILE_ROWS / 2 && left >= 2 ? 2 : 1;
}

template <typename W>
void add_tile(int64_t rows, int64_t panels, const typename Arithmetic<W>::Input* x,
              int64_t x_stride, const W* from, int64_t panel_stride, int64_t inputs,
              const char* ahead, int64_t ahead_step, float* sums) {
#define TILE_OF(ROWS, PANELS)                                                                      \
    case ROWS:                                                                                     \
        return add_tile<W, ROWS, PANELS>(x, x_stride, from, panel_stride, inputs, ahead,           \
                                         ahead_step, sums)
    if (panels == 4) switch (rows) { TILE_OF(1, 4); }
    if (panels == 2) switch (rows) {
            TILE_OF(1, 2);
            TILE_OF(2, 2);
            TILE_OF(3, 2);
#if defined(__AVX512F__)
            TILE_OF(4, 2);
            TILE_OF(5, 2);
            TILE_OF(6, 2);
#endif
        }
    switch (rows) {
        TILE_OF(1, 1);
        TILE_OF(2, 1);
        TILE_OF(3, 1);
        TILE_OF(4, 1);
        TILE_OF(5, 1);
        TILE_OF(6, 1);
#if defined(__AVX512F__)
        TILE_OF(7, 1);
        TILE_OF(8, 1);
        TILE_OF(9, 1);
        TILE_OF(10, 1);
        TILE_OF(11, 1);
        TILE_OF(12, 1);
#endif
    }
#undef TILE_OF
}

}  // namespace
