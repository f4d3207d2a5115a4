// A weight matrix times the activations of a step, of a matrix that lies as its reader wants it.
//
// The matrix [N, K] is cut into panels of PANEL outputs. Within a panel the weights of an input lie
// side by side, so the inner loop reads memory in order, once per TILE_ROWS tokens, and a weight in
// bfloat16 is widened in registers: half the bytes, and sums in float32.
//
// Each output is one chain of fused multiply-adds over k = 0, 1, 2, ..., whatever the number of
// tokens, of which it so is independent to the last bit. kernels/weight_matrix.py says what the
// arguments are; kernels/compiled.py builds this file.
//
// Letters in shapes: T tokens, N outputs, K inputs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

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
constexpr int64_t BLOCK_INPUTS = 512;  // of a panel 32 KB in float32: in a near cache
constexpr int64_t BLOCK_TOKENS = 128;  // their activations stay in the L2 cache

template <typename V, typename S> inline V load(const S* from) {
    V there;
    std::memcpy(&there, from, sizeof there);
    return there;
}

// The weights of one input in one panel.
inline void weights_at(const float* from, Lanes& low, Lanes& high) {
    low = load<Lanes>(from);
    high = load<Lanes>(from + LANES);
}

// In bfloat16 they lie in pairs, 0 and LANES, 1 and LANES + 1, ...: a shift and a mask widen them.
inline void weights_at(const bfloat16* from, Lanes& low, Lanes& high) {
    const Bits both = load<Bits>(from);
    low = (Lanes)(both << 16);
    high = (Lanes)(both & 0xFFFF0000u);
}

// In int8 they lie in order; what they are multiples of is multiplied in at the end.
inline void weights_at(const int8_t* from, Lanes& low, Lanes& high) {
#if defined(__AVX512F__)
    low = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
    high = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + LANES)));
#elif defined(__AVX2__)
    low = (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
    high = (Lanes)_mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + LANES))));
#else
    for (int i = 0; i < LANES; i++) {
        low[i] = from[i];
        high[i] = from[i + LANES];
    }
#endif
}

// Where output ``lane`` of a panel lies among the weights of an input.
inline int place_of(int lane, float) { return lane; }
inline int place_of(int lane, int8_t) { return lane; }
inline int place_of(int lane, bfloat16) { return 2 * (lane % LANES) + lane / LANES; }

// ROWS tokens times PANELS panels, over ``inputs`` inputs; ``sums`` are where they were left.
template <typename T, int ROWS, int PANELS>
void add_tile(const float* x, int64_t x_stride, const T* panels, int64_t panel_stride,
              int64_t inputs, float* sums) {
    Lanes total[ROWS][2 * PANELS];
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < 2 * PANELS; p++)
            total[r][p] = load<Lanes>(sums + (r * 2 * PANELS + p) * LANES);
    for (int64_t k = 0; k < inputs; k++) {
        Lanes weights[2 * PANELS];
        for (int p = 0; p < PANELS; p++)
            weights_at(panels + p * panel_stride + k * PANEL, weights[2 * p], weights[2 * p + 1]);
        for (int r = 0; r < ROWS; r++) {
            const Lanes input = spread(x[r * x_stride + k]);
            for (int p = 0; p < 2 * PANELS; p++) total[r][p] = fma(input, weights[p], total[r][p]);
        }
    }
    std::memcpy(sums, total, sizeof total);
}

// One token alone has too few sums to keep the multipliers busy; so it takes several panels.
template <typename T>
void add_tile(int64_t rows, int64_t panels, const float* x, int64_t x_stride, const T* from,
              int64_t panel_stride, int64_t inputs, float* sums) {
#define TILE_OF(ROWS, PANELS)                                                                      \
    case ROWS:                                                                                     \
        return add_tile<T, ROWS, PANELS>(x, x_stride, from, panel_stride, inputs, sums)
    if (panels == 4) return add_tile<T, 1, 4>(x, x_stride, from, panel_stride, inputs, sums);
    if (panels == 2) switch (rows) {
            TILE_OF(1, 2);
            TILE_OF(2, 2);
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
void multiply_block(const float* x, const W* packed, const float* scales, Matrix matrix,
                    const T* bias, bool adds, T* out, int64_t tokens, int64_t panel,
                    int64_t end_panel) {
    const int64_t tiles = (tokens + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t panel_stride = matrix.inputs * PANEL;
    alignas(64) float sums[BLOCK_TOKENS * PANEL];
    while (panel < end_panel) {
        const int64_t left = end_panel - panel;
        const int64_t panels = tokens == 1 && left >= 4 ? 4 : tokens <= 2 && left >= 2 ? 2 : 1;
        std::fill(sums, sums + tokens * panels * PANEL, 0.0f);
        for (int64_t k = 0; k < matrix.inputs; k += BLOCK_INPUTS) {
            const int64_t inputs = std::min(BLOCK_INPUTS, matrix.inputs - k);
            const W* from = packed + panel * panel_stride + k * PANEL;
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t row = tile * tokens / tiles, end = (tile + 1) * tokens / tiles;
                add_tile(end - row, panels, x + row * matrix.inputs + k, matrix.inputs, from,
                         panel_stride, inputs, sums + row * panels * PANEL);
            }
        }
        if (scales) scale_sums(sums, tokens, panels, panel * PANEL, matrix, scales);
        write_out(sums, tokens, panels, panel * PANEL, matrix, bias, adds, out);
        panel += panels;
    }
}

inline const float* widened(const float* from, int64_t, std::vector<float>&) { return from; }

inline const float* widened(const bfloat16* from, int64_t n, std::vector<float>& room) {
    room.resize(n);
    for (int64_t i = 0; i < n; i++) room[i] = widen(from[i]);
    return room.data();
}

template <typename W, typename T>
void multiply(const T* x, const W* packed, const float* scales, const T* bias, T* out,
              int64_t tokens, Matrix matrix, bool adds, int64_t threads) {
    std::vector<float> room;
    const float* inputs = widened(x, tokens * matrix.inputs, room);
    const int64_t panels = (matrix.outputs + PANEL - 1) / PANEL;
    const auto multiply_some = [=](int64_t part) {
        for (int64_t t = 0; t < tokens; t += BLOCK_TOKENS)
            multiply_block(inputs + t * matrix.inputs, packed, scales, matrix, bias, adds,
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

// A whole panel of bfloat16, two outputs at a time; true if that was done.
inline bool pack_pairs(const bfloat16* from, bfloat16* to, int64_t inputs) {
    for (int64_t k = 0; k < inputs; k++)
        for (int i = 0; i < LANES; i++) {
            const uint32_t high = from[(i + LANES) * inputs + k].bits;
            const uint32_t both = high << 16 | from[i * inputs + k].bits;
            std::memcpy(to + k * PANEL + 2 * i, &both, sizeof both);
        }
    return true;
}

inline bool pack_pairs(const float*, float*, int64_t) { return false; }
inline bool pack_pairs(const int8_t*, int8_t*, int64_t) { return false; }

// Copy ``rows`` rows of a matrix into its packed form, from output ``first`` on.
template <typename T>
void pack(const T* from, T* packed, int64_t first, int64_t rows, int64_t inputs) {
    for (int64_t row = 0; row < rows;) {
        const int64_t panel = (first + row) / PANEL, lane = (first + row) % PANEL;
        const int64_t count = std::min(PANEL - lane, rows - row);
        T* to = packed + panel * inputs * PANEL;
        const T* source = from + row * inputs;
        row += count;
        if (count == PANEL && pack_pairs(source, to, inputs)) continue;
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t i = 0; i < count; i++)
                to[k * PANEL + place_of(lane + i, T{})] = source[i * inputs + k];
    }
}

// Copy some rows back.
template <typename T>
void take(const T* packed, const int64_t* rows, T* out, int64_t count, int64_t inputs) {
    for (int64_t i = 0; i < count; i++) {
        const T* from = packed + rows[i] / PANEL * inputs * PANEL + place_of(rows[i] % PANEL, T{});
        for (int64_t k = 0; k < inputs; k++) out[i * inputs + k] = from[k * PANEL];
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
