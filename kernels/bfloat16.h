// The number that is the upper half of a float32: how to read it, and how to round to it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

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

inline void narrow(float x, bfloat16* to) {  // to the nearest, ties to even, as torch rounds
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = std::isnan(x) ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
