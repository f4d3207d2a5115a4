// Copies rows of a matrix into its panels, and back.
//
// panels.h has the panels' layout.
//
// Letters in shapes: K inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace {

// Pack a whole panel of bfloat16, two weights at a time; true if it did.
inline bool pack_pairs(const bfloat16* from, bfloat16* to, int64_t inputs) {
    if (Arithmetic<bfloat16>::STEP == 2 && inputs % 2) return false;
    for (int64_t k = 0; k < inputs; k += Arithmetic<bfloat16>::STEP)
        for (int64_t i = 0; i < LANES * Arithmetic<bfloat16>::STEP; i++) {
            const bfloat16* low = from + i * inputs + k;
            const bfloat16* high = Arithmetic<bfloat16>::STEP == 2 ? low + 1 : low + LANES * inputs;
            const uint32_t both = uint32_t(high->bits) << 16 | low->bits;
            std::memcpy(to + k * PANEL + 2 * i, &both, sizeof both);
        }
    return true;
}

inline bool pack_pairs(const float*, float*, int64_t) { return false; }
inline bool pack_pairs(const int8_t*, int8_t*, int64_t) { return false; }

// Copy ``count`` rows into a panel, from its output ``lane`` on.
template <typename T>
void pack_panel(const T* from, T* panel, int64_t lane, int64_t count, int64_t inputs) {
    if (count == PANEL && pack_pairs(from, panel, inputs)) return;
    for (int64_t k = 0; k < inputs; k++)
        for (int64_t i = 0; i < count; i++)
            panel[Arithmetic<T>::place(lane + i, k)] = from[i * inputs + k];
}

// Copy output ``lane`` of a panel back.
template <typename T> void take_row(const T* panel, int64_t lane, T* out, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++) out[k] = panel[Arithmetic<T>::place(lane, k)];
}

// Unsigned integers of an element's size.
template <typename T> struct BitsOf;
template <> struct BitsOf<float> { using type = uint32_t; };
template <> struct BitsOf<bfloat16> { using type = uint16_t; };

// Elements whose cache lines are requested ahead of the one that is changed: 32 of them cover a
// memory latency of 100 ns at 3 ns each.
constexpr int64_t ELEMENTS_AHEAD = 32;

// Call ``change(place(row, k), i)`` for each of ``count`` elements of the rows from ``first`` on.
// Their row-major indices ascend, so rows are followed without a division. Few elements change, each
// in a cache line of its own, so their lines are prefetched.
template <typename P, typename F>
void for_elements(int64_t first, const int64_t* index, int64_t count, int64_t inputs, P place,
                  F change) {
    struct Position {
        int64_t row, begin;
        auto follow(int64_t at, int64_t inputs, const P& place) {
            while (at >= begin + inputs) row++, begin += inputs;
            return place(row, at - begin);
        }
    };
    Position now{first, 0}, ahead{first, 0};
    for (int64_t i = -ELEMENTS_AHEAD; i < count; i++) {
        if (i + ELEMENTS_AHEAD < count)
            __builtin_prefetch(ahead.follow(index[i + ELEMENTS_AHEAD], inputs, place), 1);
        if (i >= 0) change(now.follow(index[i], inputs, place), i);
    }
}

// Split rows [first, first + rows) of a matrix by panels:
// ``pack_some(from, panel, lane, count)`` gets those of one.
template <typename T, typename F>
void pack_by_panels(const T* from, int64_t first, int64_t rows, int64_t inputs, F pack_some) {
    for (int64_t row = 0; row < rows;) {
        const int64_t panel = (first + row) / PANEL, lane = (first + row) % PANEL;
        const int64_t count = std::min(PANEL - lane, rows - row);
        pack_some(from + row * inputs, panel, lane, count);
        row += count;
    }
}

}  // namespace
