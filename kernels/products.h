// Product of a step's activations with a matrix in panels.
//
// The matrix is read in order, panel by panel (panels.h), once from memory for up to BLOCK_TOKENS
// tokens. Each output is one chain of float32 additions over k = 0, 1, 2, ..., of products or of
// pairs of them, so it has the same bits for any number of tokens.
//
// Letters in shapes: T tokens, N outputs, K inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "panels.h"

namespace {

struct Matrix {
    int64_t outputs, inputs;
};

// Addresses of the weights. Panels need not be adjacent; only int8 weights have ``scales``.
template <typename W> struct Panels {
    const W* first;
    int64_t stride;
    const float* scales;
};

// Store or add the sums [rows, panels * PANEL] of outputs from ``first`` on.
template <typename T>
void write_out(const float* sums, int64_t rows, int64_t panels, int64_t first, Matrix matrix,
               const T* bias, bool adds, T* out) {
    const int64_t count = std::min(panels * PANEL, matrix.outputs - first);
    for (int64_t r = 0; r < rows; r++) {
        const float* sum = sums + r * panels * PANEL;
        T* row = out + r * matrix.outputs + first;
        if (bias && adds)
            for (int64_t n = 0; n < count; n++)
                narrow(widen(row[n]) + (sum[n] + widen(bias[first + n])), &row[n]);
        else if (bias)
            for (int64_t n = 0; n < count; n++) narrow(sum[n] + widen(bias[first + n]), &row[n]);
        else if (adds)
            for (int64_t n = 0; n < count; n++) narrow(widen(row[n]) + sum[n], &row[n]);
        else
            for (int64_t n = 0; n < count; n++) narrow(sum[n], &row[n]);
    }
}

// Multiply the sums [rows, panels * PANEL] of outputs from ``first`` on by each output's scale.
inline void scale_sums(float* sums, int64_t rows, int64_t panels, int64_t first, Matrix matrix,
                       const float* scales) {
    const int64_t count = std::min(panels * PANEL, matrix.outputs - first);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < count; n++) sums[r * panels * PANEL + n] *= scales[first + n];
}

// At most BLOCK_TOKENS tokens, and some panels. Tiles have about equal height, as low ones are slow.
template <typename W, typename T>
void multiply_block(const typename Arithmetic<W>::Input* x, Panels<W> all, Matrix matrix,
                    const T* bias, bool adds, T* out, int64_t tokens, int64_t panel,
                    int64_t end_panel) {
    const int64_t tiles = (tokens + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t stored = stored_inputs<W>(matrix.inputs);
    // Each tile prefetches its part of the next block.
    const int64_t ahead_step = PANEL * Arithmetic<W>::STEP * int64_t(sizeof(W)) / tiles;
    alignas(64) float sums[BLOCK_TOKENS * PANEL];
    while (panel < end_panel) {
        const int64_t panels = panels_at_once(tokens, end_panel - panel);
        const W* from = all.first + panel * all.stride;
        std::fill(sums, sums + tokens * panels * PANEL, 0.0f);
        for (int64_t k = 0; k < stored; k += BLOCK_INPUTS) {
            const int64_t inputs = std::min(BLOCK_INPUTS, stored - k);
            const int64_t next = k + inputs < stored ? (k + inputs) * PANEL : panels * all.stride;
            const char* ahead = (const char*)(from + next);
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t row = tile * tokens / tiles, end = (tile + 1) * tokens / tiles;
                add_tile(end - row, panels, x + row * stored + k, stored, from + k * PANEL,
                         all.stride, inputs, ahead, ahead_step, sums + row * panels * PANEL);
                ahead += inputs / Arithmetic<W>::STEP * ahead_step;
            }
        }
        if (all.scales) scale_sums(sums, tokens, panels, panel * PANEL, matrix, all.scales);
        write_out(sums, tokens, panels, panel * PANEL, matrix, bias, adds, out);
        panel += panels;
    }
}

// All tokens, and some panels.
template <typename W, typename T>
void multiply_panels(const typename Arithmetic<W>::Input* x, Panels<W> all, Matrix matrix,
                     const T* bias, bool adds, T* out, int64_t tokens, int64_t panel,
                     int64_t end_panel) {
    for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS)
        multiply_block(x + t * stored_inputs<W>(matrix.inputs), all, matrix, bias, adds,
                       out + t * matrix.outputs, std::min(BLOCK_TOKENS, tokens - t), panel,
                       end_panel);
}

// Activations [tokens, inputs] in the form of the product: widened, or padded to even length.
inline const float* as_inputs(const float* from, int64_t, int64_t, std::vector<float>&) {
    return from;
}

inline const float* as_inputs(const bfloat16* from, int64_t tokens, int64_t inputs,
                              std::vector<float>& room) {
    room.resize(tokens * inputs);
    for (int64_t i = 0; i < tokens * inputs; i++) room[i] = widen(from[i]);
    return room.data();
}

inline const bfloat16* as_inputs(const bfloat16* from, int64_t tokens, int64_t inputs,
                                 std::vector<bfloat16>& room) {
    if (inputs % 2 == 0) return from;
    room.resize(tokens * (inputs + 1));
    for (int64_t t = 0; t < tokens; t++)
        std::copy(from + t * inputs, from + (t + 1) * inputs, &room[t * (inputs + 1)]);
    return room.data();
}

// Multiply-adds per thread: starting a thread takes 15 us, and these take about 100.
constexpr int64_t THREAD_PRODUCTS = 1 << 22;

// Split the panels over at most ``threads_max`` threads: ``multiply_some(panel, end_panel)``.
template <typename F>
void share_panels(int64_t tokens, Matrix matrix, int64_t threads_max, F multiply_some) {
    const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL;
    const int64_t worth = tokens * matrix.outputs * matrix.inputs / THREAD_PRODUCTS;
    const int64_t threads = std::max<int64_t>(1, std::min(threads_max, worth));
    const auto multiply_part = [=](int64_t part) {
        multiply_some(panels * part / threads, panels * (part + 1) / threads);
    };
    std::vector<std::thread> others;
    int64_t part = 1;
    try {
        others.reserve(threads);
        for (; part < threads; part++) others.emplace_back(multiply_part, part);
    } catch (const std::exception&) {  // no further thread can be started
    }
    for (; part < threads; part++) multiply_part(part);
    multiply_part(0);
    for (std::thread& other : others) other.join();
}

}  // namespace
