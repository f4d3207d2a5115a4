// How does the last token of each turn attend to its context? A decode step's attention.
//
// It reads keys and values where they lie, one block after another, each once for all query heads
// that share them. A row's sums are in the order of its positions, whatever else is in the batch.
// kernels/native.py says what the arguments are; kernels/compiled.py builds this file.
//
// Letters in shapes: R rows (turns), A query heads, K KV heads, D head_dim, B blocks per row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef float Eight __attribute__((vector_size(32)));

inline Eight eight(const float* from) {
    Eight there;
    std::memcpy(&there, from, sizeof there);
    return there;
}

#if defined(__AVX2__)
inline Eight fma(Eight a, Eight b, Eight c) { return (Eight)_mm256_fmadd_ps(a, b, c); }

// The sum of each of eight vectors: one alone takes as many instructions as all.
inline Eight sums_of(const Eight* v) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return (Eight)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                                _mm256_permute2f128_ps(a, b, 0x31));
}
#else
inline Eight fma(Eight a, Eight b, Eight c) {
    for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

inline Eight sums_of(const Eight* v) {
    Eight sums;
    for (int i = 0; i < 8; i++)
        sums[i] = ((v[i][0] + v[i][1]) + (v[i][2] + v[i][3])) +
                  ((v[i][4] + v[i][5]) + (v[i][6] + v[i][7]));
    return sums;
}
#endif

// Scores of one query for ``count`` keys, eight at a time; the last ones are repeated to fill up.
template <int D>
inline void score(const float* query, const float* keys, int64_t count, float* scores) {
    for (int64_t i = 0; i < count; i += 8) {
        Eight sums[8] = {};
        for (int d = 0; d < D; d += 8) {
            const Eight part = eight(query + d);
            for (int64_t j = 0; j < 8; j++)
                sums[j] = fma(part, eight(keys + std::min(i + j, count - 1) * D + d), sums[j]);
        }
        const Eight found = sums_of(sums);
        std::memcpy(scores + i, &found, std::min<int64_t>(8, count - i) * sizeof(float));
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

// Add ``count`` values to a sum that stays in registers meanwhile, each with its share. Small heads
// have two sums, of every other value: one would wait for each of its additions.
template <int D>
inline void add_shares(const float* values, const float* shares, int64_t count, float* sum) {
    constexpr int SUMS = D <= 32 ? 2 : 1;
    Eight added[SUMS][D / 8] = {};
    for (int d = 0; d < D / 8; d++) added[0][d] = eight(sum + 8 * d);
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int s = 0; s < SUMS; s++)
            for (int d = 0; d < D / 8; d++)
                added[s][d] = fma(shares[i + s] - Eight{}, eight(values + (i + s) * D + 8 * d),
                                  added[s][d]);
    for (; i < count; i++)
        for (int d = 0; d < D / 8; d++)
            added[0][d] = fma(shares[i] - Eight{}, eight(values + i * D + 8 * d), added[0][d]);
    for (int s = 1; s < SUMS; s++)
        for (int d = 0; d < D / 8; d++) added[0][d] += added[s][d];
    std::memcpy(sum, added[0], sizeof added[0]);
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
            score<D>(queries + g * D, keys, count, scores + g * seen + p - first);
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

}  // namespace

FOR_BOTH(tg_attend_last,
         (const void* query, const void* cache, const int64_t* tables, const int64_t* lengths,
          void* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
          int64_t block_tokens, int64_t row_blocks, float scale, int64_t window, float soft_cap),
         attend_last((const T*)query, (const T*)cache, tables, lengths, (T*)out, rows, heads,
                     head_dim, Paging{kv_heads, block_tokens, row_blocks}, scale, window, soft_cap))
