// Shared by the compiled files: bfloat16 (the upper half of a float32), sums, exponentials, and a
// macro for functions in both dtypes, which return 0, or 1 if they could not allocate memory.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add in hardware torch's code is faster"
#endif

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void narrow(float x, float* to) { *to = x; }

inline void narrow(float x, bfloat16* to) {  // round to nearest, ties to even, as torch does
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = std::isnan(x) ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename T> inline float rounded(float x) {
    T there;
    narrow(x, &there);
    return widen(there);
}

// exp for x <= 0: 2^n times a polynomial, to 2 units in the last place; vectorised by the compiler.
inline float exp_of_negative(float x) {
    const bool vanishes = x < -87.0f;
    x = std::max(x, -87.0f);
    const float t = x * 1.44269504f;
    const float n = std::floor(t + 0.5f);
    const float f = std::fma(n, -0.693145752f, x);
    const float r = std::fma(n, -1.42860677e-6f, f);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r + 1.0f);
    const int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return vanishes ? 0.0f : p * scale;
}

// Sums in eight lanes, so that the compiler can vectorise without permission to reorder.
inline float sum_lanes(const float* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// Return whether allocation failed: an exception would end the process, not the step.
template <typename F> inline int64_t lacks_memory(F compute) {
    try {
        compute();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

#define FOR_BOTH(NAME, ARGUMENTS, CALL)                                                            \
    extern "C" int64_t NAME##_float32 ARGUMENTS {                                                  \
        using T = float;                                                                           \
        return lacks_memory([&] { CALL; });                                                        \
    }                                                                                              \
    extern "C" int64_t NAME##_bfloat16 ARGUMENTS {                                                 \
        using T = bfloat16;                                                                        \
        return lacks_memory([&] { CALL; });                                                        \
    }
