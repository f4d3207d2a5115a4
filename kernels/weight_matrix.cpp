// A weight matrix times the activations of a step, of a matrix that lies as its reader wants it.
//
// It is read in order, panel by panel (panels.h), from memory once for up to BLOCK_TOKENS tokens.
//
// Each output is one chain of additions in float32 over k = 0, 1, 2, ..., of products or of pairs of
// them, whatever the number of tokens, of which it so is independent to the last bit.
// kernels/weight_matrix.py says what the arguments are; kernels/compiled.py builds this file.
//
// Letters in shapes: T tokens, N outputs, K inputs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "panels.h"

namespace {

struct Matrix {
    int64_t outputs, inputs;
};

// What becomes of the sums [rows, panels * PANEL] of outputs from ``first`` on.
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

// At most BLOCK_TOKENS tokens, and some panels. Tiles are of about equal height: low ones are slow.
// Weights are of type W; only those in int8 have ``scales``.
template <typename W, typename T>
void multiply_block(const typename Arithmetic<W>::Input* x, const W* packed, const float* scales,
                    Matrix matrix, const T* bias, bool adds, T* out, int64_t tokens,
                    int64_t panel, int64_t end_panel) {
    const int64_t tiles = (tokens + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t stored = stored_inputs<W>(matrix.inputs), panel_stride = stored * PANEL;
    // Each tile asks for its part of the next block, which lies behind this one.
    const int64_t ahead_step = PANEL * Arithmetic<W>::STEP * int64_t(sizeof(W)) / tiles;
    alignas(64) float sums[BLOCK_TOKENS * PANEL];
    while (panel < end_panel) {
        const int64_t panels = panels_at_once(tokens, end_panel - panel);
        std::fill(sums, sums + tokens * panels * PANEL, 0.0f);
        for (int64_t k = 0; k < stored; k += BLOCK_INPUTS) {
            const int64_t inputs = std::min(BLOCK_INPUTS, stored - k);
            const W* from = packed + panel * panel_stride + k * PANEL;
            const char* ahead = (const char*)(from + inputs * PANEL);
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t row = tile * tokens / tiles, end = (tile + 1) * tokens / tiles;
                add_tile(end - row, panels, x + row * stored + k, stored, from, panel_stride,
                         inputs, ahead, ahead_step, sums + row * panels * PANEL);
                ahead += inputs / Arithmetic<W>::STEP * ahead_step;
            }
        }
        if (scales) scale_sums(sums, tokens, panels, panel * PANEL, matrix, scales);
        write_out(sums, tokens, panels, panel * PANEL, matrix, bias, adds, out);
        panel += panels;
    }
}

// Activations [tokens, inputs], as weights are multiplied by them: widened, or of even length.
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

template <typename W, typename T>
void multiply(const T* x, const W* packed, const float* scales, const T* bias, T* out,
              int64_t tokens, Matrix matrix, bool adds, int64_t threads) {
    using Input = typename Arithmetic<W>::Input;
    std::vector<Input> room;
    const Input* inputs = as_inputs(x, tokens, matrix.inputs, room);
    const int64_t stored = stored_inputs<W>(matrix.inputs);
    const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL;
    const auto multiply_some = [=](int64_t part) {
        for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS)
            multiply_block(inputs + t * stored, packed, scales, matrix, bias, adds,
                           out + t * matrix.outputs, std::min(BLOCK_TOKENS, tokens - t),
                           panels * part / threads, panels * (part + 1) / threads);
    };
    std::vector<std::thread> others;
    int64_t part = 1;
    try {
        others.reserve(threads);
        for (; part < threads; part++) others.emplace_back(multiply_some, part);
    } catch (const std::exception&) {  // no more threads are to be had
    }
    for (; part < threads; part++) multiply_some(part);
    multiply_some(0);
    for (std::thread& other : others) other.join();
}

// A whole panel of bfloat16, two weights at a time; true if that was done.
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

// Copy ``rows`` rows of a matrix into its packed form, from output ``first`` on.
template <typename T>
void pack(const T* from, T* packed, int64_t first, int64_t rows, int64_t inputs) {
    const int64_t panel_stride = stored_inputs<T>(inputs) * PANEL;
    for (int64_t row = 0; row < rows;) {
        const int64_t panel = (first + row) / PANEL, lane = (first + row) % PANEL;
        const int64_t count = std::min(PANEL - lane, rows - row);
        T* to = packed + panel * panel_stride;
        const T* source = from + row * inputs;
        row += count;
        if (count == PANEL && pack_pairs(source, to, inputs)) continue;
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t i = 0; i < count; i++)
                to[Arithmetic<T>::place(lane + i, k)] = source[i * inputs + k];
    }
}

// Copy some rows back.
template <typename T>
void take(const T* packed, const int64_t* rows, T* out, int64_t count, int64_t inputs) {
    const int64_t panel_stride = stored_inputs<T>(inputs) * PANEL;
    for (int64_t i = 0; i < count; i++) {
        const T* from = packed + rows[i] / PANEL * panel_stride;
        for (int64_t k = 0; k < inputs; k++)
            out[i * inputs + k] = from[Arithmetic<T>::place(rows[i] % PANEL, k)];
    }
}

}  // namespace

extern "C" int64_t tg_panel_outputs() { return PANEL; }

FOR_BOTH(tg_multiply,
         (const void* x, const void* packed, const void* bias, void* out, int64_t tokens,
          int64_t outputs, int64_t inputs, int64_t adds, int64_t threads),
         multiply((const T*)x, (const T*)packed, nullptr, (const T*)bias, (T*)out, tokens,
                  Matrix{outputs, inputs}, adds != 0, threads))

FOR_BOTH(tg_multiply_int8,
         (const void* x, const void* packed, const void* scales, const void* bias, void* out,
          int64_t tokens, int64_t outputs, int64_t inputs, int64_t adds, int64_t threads),
         multiply((const T*)x, (const int8_t*)packed, (const float*)scales, (const T*)bias,
                  (T*)out, tokens, Matrix{outputs, inputs}, adds != 0, threads))

FOR_BOTH(tg_pack,
         (const void* from, void* packed, int64_t first, int64_t rows, int64_t inputs),
         pack((const T*)from, (T*)packed, first, rows, inputs))

FOR_BOTH(tg_take,
         (const void* packed, const int64_t* rows, void* out, int64_t count, int64_t inputs),
         take((const T*)packed, rows, (T*)out, count, inputs))

extern "C" int64_t tg_pack_int8(const void* from, void* packed, int64_t first, int64_t rows,
                                int64_t inputs) {
    return lacks_memory([&] { pack((const int8_t*)from, (int8_t*)packed, first, rows, inputs); });
}

extern "C" int64_t tg_take_int8(const void* packed, const int64_t* rows, void* out, int64_t count,
                                int64_t inputs) {
    return lacks_memory([&] { take((const int8_t*)packed, rows, (int8_t*)out, count, inputs); });
}
