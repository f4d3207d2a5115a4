// Decode attention over a paged KV cache: the last token of each turn attends to its context.
//
// Reads keys and values in place, block after block, all heads of a block together because they are
// adjacent, and prefetches the next block, which is elsewhere. A row is summed in the order of its
// positions, whatever the batch. kernels/native.py documents the arguments; kernels/compiled.py
// builds this file.
//
// Letters in shapes: R rows (turns), A query heads, K KV heads, D head_dim, B blocks per row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "functions.h"
#include "numbers.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float Eight __attribute__((vector_size(32)));

template <typename V> inline V load(const float* from) {
    V there;
    std::memcpy(&there, from, sizeof there);
    return there;
}

#if defined(__AVX2__)
inline Eight fma(Eight a, Eight b, Eight c) { return (Eight)_mm256_fmadd_ps(a, b, c); }

// The sums of eight vectors, for as many instructions as one sum would take.
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

#if defined(__AVX512F__)
typedef float Sixteen __attribute__((vector_size(64)));

inline Sixteen fma(Sixteen a, Sixteen b, Sixteen c) { return (Sixteen)_mm512_fmadd_ps(a, b, c); }

// The sums of sixteen vectors: pairs are added crosswise, halving their number each time.
inline Sixteen sums_of(const Sixteen* v) {
    __m512 four[4];
    for (int i = 0; i < 4; i++) {
        const __m512 *one = (const __m512*)v + 4 * i;
        const __m512d a = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(one[0], one[1]),
                                                 _mm512_unpackhi_ps(one[0], one[1]));
        const __m512d b = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(one[2], one[3]),
                                                 _mm512_unpackhi_ps(one[2], one[3]));
        four[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    const auto folded = [](__m512 a, __m512 b) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    };
    return (Sixteen)folded(folded(four[0], four[1]), folded(four[2], four[3]));
}

template <int D> using Vector = std::conditional_t<D % 16 == 0, Sixteen, Eight>;
#else
template <int D> using Vector = Eight;
#endif

template <int D> constexpr int LANES = sizeof(Vector<D>) / sizeof(float);

// Scores of one query for as many keys as a vector has lanes.
template <int D, typename Key> inline Vector<D> scores_of(const float* query, Key key) {
    using V = Vector<D>;
    V sums[LANES<D>] = {};
    for (int d = 0; d < D; d += LANES<D>) {
        const V part = load<V>(query + d);
        for (int j = 0; j < LANES<D>; j++) sums[j] = fma(part, load<V>(key(j) + d), sums[j]);
    }
    return sums_of(sums);
}

// Scores of one query for ``count`` keys; the last key is repeated to fill a vector.
template <int D>
inline void score(const float* query, const float* keys, int64_t count, float* scores) {
    int64_t i = 0;
    for (; i + LANES<D> <= count; i += LANES<D>) {
        const auto found = scores_of<D>(query, [&](int64_t j) { return keys + (i + j) * D; });
        std::memcpy(scores + i, &found, sizeof found);
    }
    if (i == count) return;
    const auto found = scores_of<D>(
        query, [&](int64_t j) { return keys + std::min(i + j, count - 1) * D; });
    std::memcpy(scores + i, &found, (count - i) * sizeof(float));
}

// The scores of one query head over a context, and their softmax weights, unnormalised. Returns the
// weights' sum, in which a sink, if there is one, counts as one more score.
inline float softmax_shares(float* scores, int64_t n, float scale, float soft_cap,
                            const float* sink) {
    if (soft_cap > 0.0f)
        for (int64_t i = 0; i < n; i++) {
            const float x = scores[i] * scale / soft_cap;
            const float e = exp_of_negative(-2.0f * std::fabs(x));
            scores[i] = std::copysign(soft_cap * (1.0f - e) / (1.0f + e), x) / scale;  // tanh
        }
    float peaks[8], lanes[8] = {};
    std::fill(peaks, peaks + 8, scores[0]);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) peaks[j] = scores[i + j] > peaks[j] ? scores[i + j] : peaks[j];
    float most = *std::max_element(peaks, peaks + 8);
    for (; i < n; i++) most = scores[i] > most ? scores[i] : most;
    if (sink) most = *sink / scale > most ? *sink / scale : most;
    for (i = 0; i < n; i++) scores[i] = exp_of_negative((scores[i] - most) * scale);
    for (i = 0; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += scores[i + j];
    float total = sum_lanes(lanes);
    for (; i < n; i++) total += scores[i];
    if (sink) total += exp_of_negative(std::min(0.0f, *sink - most * scale));
    return total;
}

#if defined(__AVX512BF16__)
// bfloat16 keys and values are read as they lie, without a copy in float32. Pairs of products of
// query and key are added by one instruction; values are widened in registers, once for all heads
// that share them.
template <typename T, int D>
constexpr bool IN_PLACE = std::is_same_v<T, bfloat16> && D % 32 == 0;

template <int D>
inline void score(const bfloat16* query, const bfloat16* keys, int64_t count, float* scores) {
    for (int64_t i = 0; i < count; i += 16) {
        Sixteen sums[16] = {};
        for (int d = 0; d < D; d += 32) {
            const __m512i part = _mm512_loadu_si512(query + d);
            for (int j = 0; j < 16; j++) {
                const bfloat16* key = keys + std::min(i + j, count - 1) * D + d;
                sums[j] = (Sixteen)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)part,
                                                    (__m512bh)_mm512_loadu_si512(key));
            }
        }
        const Sixteen found = sums_of(sums);
        std::memcpy(scores + i, &found, std::min<int64_t>(16, count - i) * sizeof(float));
    }
}

// Add ``count`` values to the sums [HEADS, D] of heads whose shares are ``stride`` apart. Few heads
// of few parts use several sums each, because a single one would wait for each of its additions.
template <int D, int HEADS>
inline void add_shares(const bfloat16* values, const float* shares, int64_t stride, int64_t count,
                       float* sum) {
    constexpr int PARTS = D / 16;
    constexpr int SUMS = HEADS * PARTS >= 4 ? 1 : 2;
    Sixteen added[SUMS][HEADS][PARTS] = {};
    std::memcpy(added[0], sum, sizeof added[0]);
    const auto add = [&](int s, int64_t i) {
        for (int d = 0; d < PARTS; d++) {
            const __m256i narrow = _mm256_loadu_si256((const __m256i*)(values + i * D + 16 * d));
            const Sixteen value = (Sixteen)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
            for (int h = 0; h < HEADS; h++)
                added[s][h][d] = fma((Sixteen)_mm512_set1_ps(shares[h * stride + i]), value,
                                     added[s][h][d]);
        }
    };
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int s = 0; s < SUMS; s++) add(s, i + s);
    for (; i < count; i++) add(0, i);
    for (int s = 1; s < SUMS; s++)
        for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < PARTS; d++) added[0][h][d] += added[s][h][d];
    std::memcpy(sum, added[0], sizeof added[0]);
}

template <int D>
inline void add_shares_of_all(const bfloat16* values, const float* shares, int64_t stride,
                              int64_t count, float* sums, int64_t heads) {
    constexpr int MOST = D <= 64 ? 4 : D <= 128 ? 2 : 1;  // whose sums fit the registers
    int64_t h = 0;
    for (; h + MOST <= heads; h += MOST)
        add_shares<D, MOST>(values, shares + h * stride, stride, count, sums + h * D);
    if constexpr (MOST > 2)
        for (; h + 2 <= heads; h += 2)
            add_shares<D, 2>(values, shares + h * stride, stride, count, sums + h * D);
    for (; h < heads; h++)
        add_shares<D, 1>(values, shares + h * stride, stride, count, sums + h * D);
}
#else
template <typename T, int D> constexpr bool IN_PLACE = false;
template <int D>
void add_shares_of_all(const bfloat16*, const float*, int64_t, int64_t, float*, int64_t);
#endif

// Scratch memory, reused for every row.
struct Room {
    std::vector<float> scores, totals, queries, sums, block;
};

struct Paging {
    int64_t kv_heads, block_tokens, row_blocks;
};

inline const float* widened(const float* from, int64_t, float*) { return from; }

inline const float* widened(const bfloat16* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i++) to[i] = widen(from[i]);
    return to;
}

// Add ``count`` weighted values to a sum that stays in registers. Small heads use several sums, of
// every n-th value, because a single one would wait for each of its additions.
template <int D>
inline void add_shares(const float* values, const float* shares, int64_t count, float* sum) {
    using V = Vector<D>;
    constexpr int PARTS = D / LANES<D>;
    constexpr int SUMS = PARTS >= 8 ? 1 : PARTS >= 4 ? 2 : PARTS >= 2 ? 4 : 8;
    V added[SUMS][PARTS] = {};
    for (int d = 0; d < PARTS; d++) added[0][d] = load<V>(sum + LANES<D> * d);
    const auto add = [&](int s, int64_t i) {
        for (int d = 0; d < PARTS; d++)
            added[s][d] = fma(shares[i] - V{}, load<V>(values + i * D + LANES<D> * d), added[s][d]);
    };
    int64_t i = 0;
    for (; i + SUMS <= count; i += SUMS)
        for (int s = 0; s < SUMS; s++) add(s, i + s);
    for (; i < count; i++) add(0, i);
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int s = 0; s < half; s++)
            for (int d = 0; d < PARTS; d++) added[s][d] += added[s + half][d];
    std::memcpy(sum, added[0], sizeof added[0]);
}

constexpr int64_t LINE_BYTES = 64;

// Prefetch memory: the hardware prefetcher does not cross a page.
template <typename T> inline void ask_for(const T* from, int64_t n) {
    for (int64_t i = 0; i < n; i += LINE_BYTES / sizeof(T)) __builtin_prefetch(from + i);
}

// Walk one row's keys or values at positions [first, length), block after block: ``use`` gets each
// head's [count, D] and their positions. ``ahead`` is prefetched.
template <typename T, int D, typename Use>
inline void walk(const T* cache, const int64_t* table, const Paging& paging, int64_t first,
                 int64_t length, const T* ahead, Room& room, Use use) {
    const int64_t tokens = paging.block_tokens, head_size = tokens * D;
    const int64_t block_size = 2 * paging.kv_heads * head_size;
    for (int64_t p = first; p < length;) {
        const int64_t place = p / tokens, offset = p % tokens;
        const int64_t count = std::min(length - p, tokens - offset);
        const T* block = cache + table[place] * block_size;
        const T* next = p + count < length ? cache + table[place + 1] * block_size : ahead;
        for (int64_t k = 0; k < paging.kv_heads; k++) {
            if (next) ask_for(next + k * head_size, head_size);
            const T* there = block + k * head_size + offset * D;
            if constexpr (IN_PLACE<T, D>)
                use(k, there, p - first, count);
            else
                use(k, widened(there, count * D, room.block.data()), p - first, count);
        }
        p += count;
    }
}

// Attention of one row's query over the positions [first, length); ``ahead`` are the next keys.
template <typename T, int D>
void attend_row(const T* query, const T* cache, const int64_t* table, const Paging& paging,
                int64_t shared, int64_t first, int64_t length, float scale, float soft_cap,
                const float* sinks, const T* ahead, Room& room, T* out) {
    const int64_t seen = length - first, heads = shared * paging.kv_heads;
    room.scores.resize(heads * seen);
    room.totals.resize(heads);
    room.sums.assign(heads * D, 0.0f);
    float *scores = room.scores.data(), *sums = room.sums.data(), *totals = room.totals.data();
    std::conditional_t<IN_PLACE<T, D>, const T*, const float*> queries;
    if constexpr (IN_PLACE<T, D>) {
        queries = query;
    } else {
        room.block.resize(paging.block_tokens * D);
        room.queries.resize(heads * D);
        queries = widened(query, heads * D, room.queries.data());
    }
    const int64_t values_size = paging.kv_heads * paging.block_tokens * D;
    const T* values = cache + values_size;
    walk<T, D>(cache, table, paging, first, length,
               values + table[first / paging.block_tokens] * 2 * values_size, room,
               [&](int64_t k, auto keys, int64_t at, int64_t count) {
                   for (int64_t h = k * shared; h < (k + 1) * shared; h++)
                       score<D>(queries + h * D, keys, count, scores + h * seen + at);
               });
    for (int64_t h = 0; h < heads; h++)
        totals[h] = softmax_shares(scores + h * seen, seen, scale, soft_cap,
                                   sinks ? sinks + h : nullptr);
    walk<T, D>(values, table, paging, first, length, ahead, room,
               [&](int64_t k, auto there, int64_t at, int64_t count) {
                   if constexpr (IN_PLACE<T, D>)
                       add_shares_of_all<D>(there, scores + k * shared * seen + at, seen, count,
                                            sums + k * shared * D, shared);
                   else
                       for (int64_t h = k * shared; h < (k + 1) * shared; h++)
                           add_shares<D>(there, scores + h * seen + at, count, sums + h * D);
               });
    for (int64_t h = 0; h < heads; h++)
        for (int64_t d = h * D; d < (h + 1) * D; d++) narrow(sums[d] / totals[h], &out[d]);
}

// One query per row, the last of its context.
template <typename T, int D>
void attend_rows(const T* query, const T* cache, const int64_t* tables, const int64_t* lengths,
                 T* out, int64_t rows, int64_t heads, Paging paging, float scale, int64_t window,
                 float soft_cap, const float* sinks) {
    const auto first = [&](int64_t r) {
        return window > 0 ? std::max<int64_t>(0, lengths[r] - window) : 0;
    };
    const auto keys = [&](int64_t r) {
        const int64_t block = tables[r * paging.row_blocks + first(r) / paging.block_tokens];
        return cache + block * 2 * paging.kv_heads * paging.block_tokens * D;
    };
    Room room;
    for (int64_t r = 0; r < rows; r++)
        attend_row<T, D>(query + r * heads * D, cache, tables + r * paging.row_blocks, paging,
                         heads / paging.kv_heads, first(r), lengths[r], scale, soft_cap, sinks,
                         r + 1 < rows ? keys(r + 1) : nullptr, room, out + r * heads * D);
}

template <typename T>
void attend_last(const T* query, const T* cache, const int64_t* tables, const int64_t* lengths,
                 T* out, int64_t rows, int64_t heads, int64_t head_dim, Paging paging, float scale,
                 int64_t window, float soft_cap, const float* sinks) {
#define WITH_HEADS_OF(D)                                                                           \
    case D:                                                                                        \
        return attend_rows<T, D>(query, cache, tables, lengths, out, rows, heads, paging, scale,   \
                                 window, soft_cap, sinks)
    switch (head_dim) {  // HEAD_DIMS in native.py: as constants, so that a head stays in registers
        WITH_HEADS_OF(8);
        WITH_HEADS_OF(16);
        WITH_HEADS_OF(24);
        WITH_HEADS_OF(32);
        WITH_HEADS_OF(40);
        WITH_HEADS_OF(48);
        WITH_HEADS_OF(56);
        WITH_HEADS_OF(64);
        WITH_HEADS_OF(72);
        WITH_HEADS_OF(80);
        WITH_HEADS_OF(88);
        WITH_HEADS_OF(96);
        WITH_HEADS_OF(104);
        WITH_HEADS_OF(112);
        WITH_HEADS_OF(120);
        WITH_HEADS_OF(128);
        WITH_HEADS_OF(160);
        WITH_HEADS_OF(192);
        WITH_HEADS_OF(256);
    }
#undef WITH_HEADS_OF
}

}  // namespace

FOR_BOTH(tg_attend_last,
         (const void* query, const void* cache, const int64_t* tables, const int64_t* lengths,
          void* out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
          int64_t block_tokens, int64_t row_blocks, float scale, int64_t window, float soft_cap,
          const float* sinks),
         attend_last((const T*)query, (const T*)cache, tables, lengths, (T*)out, rows, heads,
                     head_dim, Paging{kv_heads, block_tokens, row_blocks}, scale, window, soft_cap,
                     sinks))
