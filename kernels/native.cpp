// What a decode step computes beside its matrix products, each in one pass over its data.
//
// Plain C++ behind a C interface, so that building it takes a compiler and some seconds, and no
// headers of torch's. Every function works on one thread, allocates little or nothing, and computes
// a row from that row alone, in the same order of additions whatever else is in the batch.
// kernels/native.py says what the arguments are; kernels/compiled.py builds and loads this file.
//
// Letters in shapes: T tokens, R rows (turns), A query heads, K KV heads, D head_dim, I inner size,
// S rows to sample, V vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bfloat16.h"

#if !defined(__FMA__) && !defined(__aarch64__)
#error "without fused multiply-add in hardware torch's code is faster"
#endif

namespace {

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

// Sums in eight lanes, so that the compiler may use vectors without being allowed to reorder.
inline float sum_lanes(const float* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

// Several sums side by side: one alone would wait for each of its additions.
template <int D> inline float dot(const float* a, const float* b) {
    constexpr int LANES = D % 32 == 0 ? 32 : D % 16 == 0 ? 16 : 8;
    float lanes[LANES] = {};
    for (int i = 0; i < D; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] = std::fma(a[i + j], b[i + j], lanes[j]);
    for (int width = LANES / 2; width >= 8; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return sum_lanes(lanes);
}

template <typename T> float mean_square(const T* x, int64_t n) {
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) {
            const float value = widen(x[i + j]);
            lanes[j] = std::fma(value, value, lanes[j]);
        }
    float sum = sum_lanes(lanes);
    for (; i < n; i++) sum += widen(x[i]) * widen(x[i]);
    return sum / float(n);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t n, float epsilon) {
    const float scale = 1.0f / std::sqrt(mean_square(x, n) + epsilon);
    for (int64_t i = 0; i < n; i++)
        narrow(rounded<T>(widen(x[i]) * scale) * widen(weight[i]), &out[i]);
}

template <typename T>
void norm(const T* x, const T* weight, T* out, int64_t rows, int64_t n, float epsilon) {
    for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * n, weight, out + row * n, n, epsilon);
}

template <typename T> void gate(const T* gate_up, T* out, int64_t rows, int64_t inner) {
    for (int64_t row = 0; row < rows; row++) {
        const T* g = gate_up + row * 2 * inner;
        const T* up = g + inner;
        for (int64_t i = 0; i < inner; i++) {
            const float x = widen(g[i]);
            const float e = exp_of_negative(-std::fabs(x));
            const float sigmoid = (x >= 0.0f ? 1.0f : e) / (1.0f + e);
            narrow(rounded<T>(x * sigmoid) * widen(up[i]), &out[row * inner + i]);
        }
    }
}

// A head of x turned by its token's angles: the halves are the two coordinates of D/2 points.
template <typename T>
void turn(const T* x, const T* cosines, const T* sines, T* out, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[i + half]);
        const float ac = rounded<T>(a * widen(cosines[i]));
        const float bc = rounded<T>(b * widen(cosines[i + half]));
        narrow(std::fma(b, widen(sines[i]), ac), &out[i]);
        narrow(std::fma(a, widen(sines[i + half]), bc), &out[i + half]);
    }
}

template <typename T>
void rotate_and_write(const T* qkv, const T* qk_norm, const T* table, const int64_t* positions,
                      const int64_t* blocks, const int64_t* offsets, T* query, T* cache,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t block_tokens, float epsilon) {
    std::vector<T> normed(head_dim);
    for (int64_t t = 0; t < tokens; t++) {
        const T* cosines = table + positions[t] * 2 * head_dim;
        const T* row = qkv + t * (heads + 2 * kv_heads) * head_dim;
        T* block = cache + blocks[t] * 2 * kv_heads * block_tokens * head_dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            const T* x = row + h * head_dim;
            if (qk_norm) {
                norm_row(x, qk_norm + h * head_dim, normed.data(), head_dim, epsilon);
                x = normed.data();
            }
            T* key = block + ((h - heads) * block_tokens + offsets[t]) * head_dim;
            T* out = h < heads ? query + (t * heads + h) * head_dim : key;
            turn(x, cosines, cosines + head_dim, out, head_dim);
        }
        const T* values = row + (heads + kv_heads) * head_dim;
        for (int64_t h = 0; h < kv_heads; h++) {
            T* value = block + ((kv_heads + h) * block_tokens + offsets[t]) * head_dim;
            std::memcpy(value, values + h * head_dim, head_dim * sizeof(T));
        }
    }
}

// The scores of one query head over a context, and the shares that they come to; unnormalised.
inline float softmax_shares(float* scores, int64_t n, float scale, float soft_cap) {
    if (soft_cap > 0.0f)
        for (int64_t i = 0; i < n; i++)
            scores[i] = soft_cap * std::tanh(scores[i] * scale / soft_cap) / scale;
    float most = scores[0];
    for (int64_t i = 1; i < n; i++) most = scores[i] > most ? scores[i] : most;
    for (int64_t i = 0; i < n; i++) scores[i] = exp_of_negative((scores[i] - most) * scale);
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += scores[i + j];
    float total = sum_lanes(lanes);
    for (; i < n; i++) total += scores[i];
    return total;
}

// Memory that is used again for every head.
struct Room {
    std::vector<float> scores, queries, sums, block;
};

struct Paging {
    int64_t kv_heads, block_tokens, row_blocks;
};

inline const float* widened(const float* from, int64_t, float*) { return from; }

inline const float* widened(const bfloat16* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] = widen(from[i]);
    return to;
}

// Add ``count`` values to a sum that stays in registers meanwhile, each with its share.
template <int D>
inline void add_shares(const float* values, const float* shares, int64_t count, float* sum) {
    float added[D];
    for (int d = 0; d < D; d++) added[d] = sum[d];
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < D; d++) added[d] = std::fma(shares[i], values[i * D + d], added[d]);
    for (int d = 0; d < D; d++) sum[d] = added[d];
}

// One KV head of one row: the query heads that share it, over the positions [first, length).
template <typename T, int D>
void attend_head(const T* query, const T* cache, const int64_t* table, int64_t head, Paging paging,
                 int64_t shared, int64_t first, int64_t length, float scale, float soft_cap,
                 Room& room, T* out) {
    const int64_t seen = length - first, tokens = paging.block_tokens;
    room.scores.resize(shared * seen);
    room.queries.resize(shared * D);
    room.sums.assign(shared * D, 0.0f);
    room.block.resize(tokens * D);
    float *scores = room.scores.data(), *queries = room.queries.data();
    for (int64_t i = 0; i < shared * D; i++) queries[i] = widen(query[i]);
    for (int64_t p = first; p < length;) {
        const int64_t block = table[p / tokens] * 2 * paging.kv_heads + head;
        const int64_t count = std::min(length - p, tokens - p % tokens);
        const float* keys =
            widened(cache + (block * tokens + p % tokens) * D, count * D, room.block.data());
        for (int64_t g = 0; g < shared; g++)
            for (int64_t i = 0; i < count; i++)
                scores[g * seen + p - first + i] = dot<D>(queries + g * D, keys + i * D);
        p += count;
    }
    for (int64_t g = 0; g < shared; g++) {
        const float total = softmax_shares(scores + g * seen, seen, scale, soft_cap);
        for (int64_t i = 0; i < seen; i++) scores[g * seen + i] /= total;
    }
    for (int64_t p = first; p < length;) {
        const int64_t block = (table[p / tokens] * 2 + 1) * paging.kv_heads + head;
        const int64_t count = std::min(length - p, tokens - p % tokens);
        const float* values =
            widened(cache + (block * tokens + p % tokens) * D, count * D, room.block.data());
        for (int64_t g = 0; g < shared; g++)
            add_shares<D>(values, scores + g * seen + p - first, count, &room.sums[g * D]);
        p += count;
    }
    for (int64_t i = 0; i < shared * D; i++) narrow(room.sums[i], &out[i]);
}

// One query per row, the last of its context.
template <typename T, int D>
void attend_rows(const T* query, const T* cache, const int64_t* tables, const int64_t* lengths,
                 T* out, int64_t rows, int64_t heads, Paging paging, float scale, int64_t window,
                 float soft_cap) {
    const int64_t shared = heads / paging.kv_heads;
    Room room;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t length = lengths[r];
        const int64_t first = window > 0 ? std::max<int64_t>(0, length - window) : 0;
        for (int64_t k = 0; k < paging.kv_heads; k++) {
            const int64_t at = (r * heads + k * shared) * D;
            attend_head<T, D>(query + at, cache, tables + r * paging.row_blocks, k, paging, shared,
                              first, length, scale, soft_cap, room, out + at);
        }
    }
}

template <typename T>
void attend_last(const T* query, const T* cache, const int64_t* tables, const int64_t* lengths,
                 T* out, int64_t rows, int64_t heads, int64_t head_dim, Paging paging, float scale,
                 int64_t window, float soft_cap) {
#define WITH_HEADS_OF(D)                                                                           \
    case D:                                                                                        \
        return attend_rows<T, D>(query, cache, tables, lengths, out, rows, heads, paging, scale,   \
                                 window, soft_cap)
    switch (head_dim) {  // HEAD_DIMS in native.py: known to the compiler, a head stays in registers
        WITH_HEADS_OF(8);
        WITH_HEADS_OF(16);
        WITH_HEADS_OF(32);
        WITH_HEADS_OF(64);
        WITH_HEADS_OF(80);
        WITH_HEADS_OF(96);
        WITH_HEADS_OF(128);
        WITH_HEADS_OF(256);
    }
#undef WITH_HEADS_OF
}

constexpr int64_t DRAW_BLOCK = 512;

// Temperature, then a draw by inverting the cumulative distribution: to a block, then within it.
void draw_row(const float* logits, int64_t vocab, float temperature, double uniform, int64_t* id,
              float* logprob, std::vector<float>& weights, std::vector<float>& blocks) {
    float lanes[8];
    std::fill(lanes, lanes + 8, -INFINITY);
    int64_t i = 0;
    for (; i + 8 <= vocab; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] = std::max(lanes[j], logits[i + j]);
    float most = *std::max_element(lanes, lanes + 8);
    for (; i < vocab; i++) most = std::max(most, logits[i]);
    const bool greedy = temperature == 0.0f;
    const float divisor = greedy ? 1.0f : temperature;
    double total = 0.0;
    for (int64_t b = 0; b < int64_t(blocks.size()); b++) {
        const int64_t from = b * DRAW_BLOCK, to = std::min(vocab, from + DRAW_BLOCK);
        float sums[8] = {};
        for (int64_t n = from; n < to; n++)
            weights[n] = exp_of_negative((logits[n] - most) / divisor);
        int64_t n = from;
        for (; n + 8 <= to; n += 8)
            for (int j = 0; j < 8; j++) sums[j] += weights[n + j];
        float sum = sum_lanes(sums);
        for (; n < to; n++) sum += weights[n];
        blocks[b] = sum;
        total += sum;
    }
    int64_t chosen = 0;
    if (greedy) {
        while (chosen + 1 < vocab && logits[chosen] != most) chosen++;
    } else {
        double rest = uniform * total;
        int64_t b = 0, last = int64_t(blocks.size()) - 1;
        while (b < last && rest >= blocks[b]) rest -= blocks[b++];
        const int64_t to = std::min(vocab, (b + 1) * DRAW_BLOCK);
        chosen = b * DRAW_BLOCK;
        int64_t possible = chosen;  // the last with a weight: rounding may leave some of the rest
        for (; chosen < to; chosen++) {
            if (weights[chosen] > 0.0f) possible = chosen;
            if (rest < weights[chosen]) break;
            rest -= weights[chosen];
        }
        chosen = std::min(chosen, possible);
    }
    *id = chosen;
    *logprob = (logits[chosen] - most) / divisor - float(std::log(total));
}

}  // namespace

#define FOR_BOTH(NAME, ARGUMENTS, CALL)                                                            \
    extern "C" void NAME##_float32 ARGUMENTS {                                                     \
        using T = float;                                                                           \
        CALL;                                                                                      \
    }                                                                                              \
    extern "C" void NAME##_bfloat16 ARGUMENTS {                                                    \
        using T = bfloat16;                                                                        \
        CALL;                                                                                      \
    }

FOR_BOTH(tg_norm,
         (const void* x, const void* weight, void* out, int64_t rows, int64_t n, float epsilon),
         norm((const T*)x, (const T*)weight, (T*)out, rows, n, epsilon))

FOR_BOTH(tg_gate, (const void* gate_up, void* out, int64_t rows, int64_t inner),
         gate((const T*)gate_up, (T*)out, rows, inner))

FOR_BOTH(tg_rotate_and_write,
         (const void* qkv, const void* qk_norm, const void* table, const int64_t* positions,
          const int64_t* blocks, const int64_t* offsets, void* query, void* cache, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_tokens, float epsilon),
         rotate_and_write((const T*)qkv, (const T*)qk_norm, (const T*)table, positions, blocks,
                          offsets, (T*)query, (T*)cache, tokens, heads, kv_heads, head_dim,
                          block_tokens, epsilon))

FOR_BOTH(tg_attend_last,
         (const void* query, const void* cache, const int64_t* tables, const int64_t* lengths,
          void* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
          int64_t block_tokens, int64_t row_blocks, float scale, int64_t window, float soft_cap),
         attend_last((const T*)query, (const T*)cache, tables, lengths, (T*)out, rows, heads,
                     head_dim, Paging{kv_heads, block_tokens, row_blocks}, scale, window, soft_cap))

extern "C" void tg_draw(const float* logits, const float* temperatures, const double* uniforms,
                        int64_t* ids, float* logprobs, int64_t rows, int64_t vocab) {
    std::vector<float> weights(vocab), blocks((vocab + DRAW_BLOCK - 1) / DRAW_BLOCK);
    for (int64_t r = 0; r < rows; r++)
        draw_row(logits + r * vocab, vocab, temperatures[r], uniforms[r], ids + r, logprobs + r,
                 weights, blocks);
}
