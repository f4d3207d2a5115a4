// Functions of a decode step besides its matrix products, each in one pass over its data.
//
// Plain C++ behind a C interface, so that building needs a compiler and some seconds, and no torch
// headers. Every function runs on one thread, allocates little or nothing, and computes a row from
// that row alone, in the same order of additions whatever the batch. kernels/native.py documents
// the arguments; kernels/compiled.py builds and loads this file.
//
// Letters in shapes: T tokens, R rows (turns), A query heads, K KV heads, D head_dim, I inner size,
// S rows to sample, V vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "functions.h"
#include "numbers.h"

namespace {

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

// A gain of 1 + weight is multiplied in float32 and rounded once, as in norm.py.
template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t n, float epsilon, bool adds_one) {
    const float scale = 1.0f / std::sqrt(mean_square(x, n) + epsilon);
    if (adds_one)
        for (int64_t i = 0; i < n; i++)
            narrow(widen(x[i]) * scale * (1.0f + widen(weight[i])), &out[i]);
    else
        for (int64_t i = 0; i < n; i++)
            narrow(rounded<T>(widen(x[i]) * scale) * widen(weight[i]), &out[i]);
}

template <typename T>
void norm(const T* x, const T* weight, T* out, int64_t rows, int64_t n, float epsilon,
          bool adds_one) {
    for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * n, weight, out + row * n, n, epsilon, adds_one);
}

inline float sigmoid(float x) {
    const float e = exp_of_negative(-std::fabs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

inline float silu(float x) { return x * sigmoid(x); }

// (1 + tanh(u)) / 2 is sigmoid(2u).
inline float gelu_tanh(float x) {
    constexpr float TWO_ROOT_2_OVER_PI = 1.59576912f;
    return x * sigmoid(TWO_ROOT_2_OVER_PI * std::fma(0.044715f * x * x, x, x));
}

// x times the normal distribution function. erfc is Chebyshev's fit in Numerical Recipes, section
// 6.2 (erfcc), to 1.2e-7 of its value.
inline float gelu(float x) {
    const float z = std::fabs(x) * 0.707106781f;
    const float t = 1.0f / std::fma(0.5f, z, 1.0f);
    float p = 0.17087277f;
    p = std::fma(p, t, -0.82215223f);
    p = std::fma(p, t, 1.48851587f);
    p = std::fma(p, t, -1.13520398f);
    p = std::fma(p, t, 0.27886807f);
    p = std::fma(p, t, -0.18628806f);
    p = std::fma(p, t, 0.09678418f);
    p = std::fma(p, t, 0.37409196f);
    p = std::fma(p, t, 1.00002368f);
    p = std::fma(p, t, -1.26551223f);
    const float tail = 0.5f * t * exp_of_negative(std::fma(-z, z, p));
    return x * (x >= 0.0f ? 1.0f - tail : tail);
}

template <typename T, typename Activate>
void gate_by(const T* gate_up, T* out, int64_t rows, int64_t inner, Activate activate) {
    for (int64_t row = 0; row < rows; row++) {
        const T* g = gate_up + row * 2 * inner;
        const T* up = g + inner;
        for (int64_t i = 0; i < inner; i++)
            narrow(rounded<T>(activate(widen(g[i]))) * widen(up[i]), &out[row * inner + i]);
    }
}

// gpt-oss's gate: gate and up alternate, and are limited to 7.
template <typename T> void swigluoai(const T* gate_up, T* out, int64_t rows, int64_t inner) {
    for (int64_t i = 0; i < rows * inner; i++) {
        const float gate = std::min(widen(gate_up[2 * i]), 7.0f);
        const float up = std::min(std::max(widen(gate_up[2 * i + 1]), -7.0f), 7.0f);
        narrow((up + 1.0f) * gate * sigmoid(1.702f * gate), &out[i]);
    }
}

// ``activation``: an index of ACTIVATIONS in native.py.
template <typename T>
void gate(const T* gate_up, T* out, int64_t rows, int64_t inner, int64_t activation) {
    switch (activation) {
        case 0: return gate_by(gate_up, out, rows, inner, silu);
        case 1: return gate_by(gate_up, out, rows, inner, gelu);
        case 2: return gate_by(gate_up, out, rows, inner, gelu_tanh);
        case 3: return swigluoai(gate_up, out, rows, inner);
    }
}

// Rotate a head of x by its token's angles: the halves are the two coordinates of D/2 points.
template <typename T>
void turn(const T* __restrict x, const T* __restrict cosines, const T* __restrict sines,
          T* __restrict out, int64_t half) {
    T* __restrict out_b = out + half;  // tells the compiler that the halves do not overlap
    for (int64_t i = 0; i < half; i++) {
        const float a = widen(x[i]), b = widen(x[i + half]);
        const float ac = rounded<T>(a * widen(cosines[i]));
        const float bc = rounded<T>(b * widen(cosines[i + half]));
        narrow(std::fma(b, widen(sines[i]), ac), &out[i]);
        narrow(std::fma(a, widen(sines[i + half]), bc), &out_b[i]);
    }
}

template <typename T>
void rotate_and_write(const T* qkv, const T* qk_norm, const T* table, const int64_t* positions,
                      const int64_t* blocks, const int64_t* offsets, T* query, T* cache,
                      int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      int64_t block_tokens, float epsilon, bool norm_adds_one) {
    std::vector<T> normed(head_dim);
    for (int64_t t = 0; t < tokens; t++) {
        const T* cosines = table + positions[t] * 2 * head_dim;
        const T* row = qkv + t * (heads + 2 * kv_heads) * head_dim;
        T* block = cache + blocks[t] * 2 * kv_heads * block_tokens * head_dim;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            const T* x = row + h * head_dim;
            if (qk_norm) {
                norm_row(x, qk_norm + h * head_dim, normed.data(), head_dim, epsilon,
                         norm_adds_one);
                x = normed.data();
            }
            T* key = block + ((h - heads) * block_tokens + offsets[t]) * head_dim;
            T* out = h < heads ? query + (t * heads + h) * head_dim : key;
            turn(x, cosines, cosines + head_dim, out, head_dim / 2);
        }
        const T* values = row + (heads + kv_heads) * head_dim;
        for (int64_t h = 0; h < kv_heads; h++) {
            T* value = block + ((kv_heads + h) * block_tokens + offsets[t]) * head_dim;
            std::memcpy(value, values + h * head_dim, head_dim * sizeof(T));
        }
    }
}

uint64_t scrambled(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// The index-th number of a seed, in [0, 1), as in uniforms.py.
double uniform(uint64_t seed, uint64_t index) {
    constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;
    const uint64_t state = scrambled(seed + GOLDEN_GAMMA) + (index + 1) * GOLDEN_GAMMA;
    return double(scrambled(state) >> 11) * 0x1p-53;
}

constexpr int64_t DRAW_BLOCK = 512;

// Sum the weights by blocks; return their total.
double sum_blocks(const std::vector<float>& weights, std::vector<float>& blocks) {
    const int64_t vocab = weights.size();
    double total = 0.0;
    for (int64_t b = 0; b < int64_t(blocks.size()); b++) {
        const int64_t from = b * DRAW_BLOCK, to = std::min(vocab, from + DRAW_BLOCK);
        float sums[8] = {};
        int64_t n = from;
        for (; n + 8 <= to; n += 8)
            for (int j = 0; j < 8; j++) sums[j] += weights[n + j];
        float sum = sum_lanes(sums);
        for (; n < to; n++) sum += weights[n];
        blocks[b] = sum;
        total += sum;
    }
    return total;
}

// Working memory of the draws of one call.
struct DrawScratch {
    std::vector<float> scaled, weights, blocks, ranked, edited;
};

// The logits after bias, bans, penalties and mask.
const float* edit(const float* logits, int64_t vocab, const Edits& edits, bool bans,
                  std::vector<float>& edited) {
    edited.assign(logits, logits + vocab);
    for (int64_t i = 0; i < edits.biased; i++) edited[edits.biased_ids[i]] += edits.biases[i];
    for (int64_t i = 0; bans && i < edits.banned; i++) edited[edits.banned_ids[i]] = -INFINITY;
    for (int64_t i = 0; i < edits.seen; i++) {
        float& logit = edited[edits.seen_ids[i]];
        const float count = edits.seen_counts[i];
        logit = logit > 0.0f ? logit / edits.repetition : logit * edits.repetition;
        logit -= edits.frequency * count + (count > 0.0f ? edits.presence : 0.0f);
    }
    for (int64_t from = 0; edits.allowed && from < vocab; from += 32) {
        const uint32_t bits = edits.allowed[from / 32];
        const int64_t count = std::min<int64_t>(32, vocab - from);
        for (int64_t j = 0; j < count; j++)
            edited[from + j] = (bits >> j) & 1 ? edited[from + j] : -INFINITY;
    }
    return edited.data();
}

// Return the largest logit; write the logits, less the largest and divided by the temperature, and
// their weights.
float scale(const float* logits, float divisor, std::vector<float>& scaled,
            std::vector<float>& weights) {
    const int64_t vocab = scaled.size();
    float lanes[8];
    std::fill(lanes, lanes + 8, -INFINITY);
    int64_t i = 0;
    for (; i + 8 <= vocab; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] = std::max(lanes[j], logits[i + j]);
    float most = *std::max_element(lanes, lanes + 8);
    for (; i < vocab; i++) most = std::max(most, logits[i]);
    for (int64_t n = 0; n < vocab; n++) scaled[n] = (logits[n] - most) / divisor;
    for (int64_t n = 0; n < vocab; n++) weights[n] = exp_of_negative(scaled[n]);
    return most;
}

double mass_of(const float* scaled, int64_t count) {
    double lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++) lanes[j] += exp_of_negative(scaled[i + j]);
    double mass = 0.0;
    for (; i < count; i++) mass += exp_of_negative(scaled[i]);
    for (const double lane : lanes) mass += lane;
    return mass;
}

// Numbers among which one is looked for by Hoare's quickselect (1961). Without branches on the
// numbers, half of which would be mispredicted.
struct Candidates {
    float *numbers, *spare;  // as long as each other
    int64_t count;
    float pivot = 0.0f;
    int64_t above = 0, equal = 0;

    // Choose a pivot: move the numbers above it to `spare`, and those below it to the front.
    void split() {
        const float a = numbers[0], b = numbers[count / 2], c = numbers[count - 1];
        pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        int64_t below = 0;
        above = 0;
        for (int64_t i = 0; i < count; i++) {
            const float number = numbers[i];
            spare[above] = numbers[below] = number;
            above += number > pivot;
            below += number < pivot;
        }
        equal = count - above - below;
    }
    void continue_above() {
        std::swap(numbers, spare);
        count = above;
    }
    void continue_below() { count -= above + equal; }
};

// The k-th largest number, from 1.
float kth_of(Candidates all, int64_t k) {
    for (;;) {
        all.split();
        if (k <= all.above) {
            all.continue_above();
        } else if (k <= all.above + all.equal) {
            return all.pivot;
        } else {
            k -= all.above + all.equal;
            all.continue_below();
        }
    }
}

// The last of the fewest largest numbers whose exponentials sum to `share`, at least one; the
// smallest if rounding keeps all below it.
float last_within(Candidates all, double share) {
    for (;;) {
        all.split();
        const double mass = mass_of(all.spare, all.above);
        if (all.above && mass >= share) {
            all.continue_above();
            continue;
        }
        share -= mass + double(all.equal) * exp_of_negative(all.pivot);
        if (share <= 0.0 || all.count == all.above + all.equal) return all.pivot;
        all.continue_below();
    }
}

// The last scaled logit that top-k and top-p keep of those that are not below `floor`; -INFINITY if
// the weights are not finite.
float cutoff_of(DrawScratch& scratch, double total, float floor, int64_t top_k, float top_p) {
    const std::vector<float>&scaled = scratch.scaled, &weights = scratch.weights;
    const int64_t vocab = weights.size();
    // Tokens below this weight have together less than half of what top-p cuts off.
    const float lightest =
        top_k > 0 ? 0.0f : float(0.5 * (1.0 - double(top_p)) * total / double(vocab));
    scratch.ranked.resize(2 * vocab);
    float* ranked = scratch.ranked.data();
    const auto gather = [&](const auto& is_ranked) {
        int64_t found = 0;
        for (int64_t n = 0; n < vocab; n++) {
            ranked[found] = scaled[n];
            found += is_ranked(n);
        }
        return found;
    };
    int64_t found = gather([&](int64_t n) { return weights[n] >= lightest && scaled[n] >= floor; });
    if (!found || !std::isfinite(total)) return -INFINITY;
    if (top_k > 0) {
        const int64_t kept = std::min(top_k, found);
        const float last = kth_of({ranked, ranked + vocab, found}, kept);
        if (!(top_p < 1.0f)) return last;
        found = gather([&](int64_t n) { return scaled[n] > last; });
        std::fill(ranked + found, ranked + kept, last);
        found = kept;
        total = mass_of(ranked, found);
    }
    return last_within({ranked, ranked + vocab, found}, double(top_p) * total);
}

// What a row was drawn from.
struct Drawn {
    const float *logits, *scaled;
    float most, divisor;
    float cutoff;  // lower scaled logits are excluded
    double total, unlimited_total;
};

// Exclude the scaled logits below the cutoff; return the weights' total.
double exclude(float cutoff, DrawScratch& scratch) {
    for (int64_t n = 0; n < int64_t(scratch.weights.size()); n++)
        scratch.weights[n] = scratch.scaled[n] < cutoff ? 0.0f : scratch.weights[n];
    return sum_blocks(scratch.weights, scratch.blocks);
}

// Apply temperature, min-p, top-k and top-p, then invert the cumulative distribution: to a block,
// then within it.
Drawn draw_row(const float* logits, int64_t vocab, float temperature, float min_p, int64_t top_k,
               float top_p, double uniform, int32_t* id, float* logprob, DrawScratch& scratch) {
    const std::vector<float>&weights = scratch.weights, &blocks = scratch.blocks;
    const bool greedy = temperature == 0.0f;
    const float divisor = greedy ? 1.0f : temperature;
    const float most = scale(logits, divisor, scratch.scaled, scratch.weights);
    if (top_k >= vocab) top_k = 0;
    const double unlimited_total = sum_blocks(weights, scratch.blocks);
    double total = unlimited_total;
    float cutoff = -INFINITY;
    if (!greedy && min_p > 0.0f) {
        cutoff = std::log(min_p);
        total = exclude(cutoff, scratch);
    }
    if (!greedy && (top_k > 0 || top_p < 1.0f)) {
        const float last = cutoff_of(scratch, total, cutoff, top_k, top_p);
        if (last > cutoff) {
            cutoff = last;
            total = exclude(cutoff, scratch);
        }
    }
    int64_t chosen = 0;
    if (greedy) {
        while (chosen + 1 < vocab && logits[chosen] != most) chosen++;
    } else {
        double rest = uniform * total;
        int64_t b = 0, last = int64_t(blocks.size()) - 1;
        while (last > 0 && blocks[last] == 0.0f) last--;  // all of its tokens are cut off
        while (b < last && rest >= blocks[b]) rest -= blocks[b++];
        const int64_t to = std::min(vocab, (b + 1) * DRAW_BLOCK);
        chosen = b * DRAW_BLOCK;
        int64_t possible = chosen;  // the last token with a weight: rounding may leave a remainder
        for (; chosen < to; chosen++) {
            if (weights[chosen] > 0.0f) possible = chosen;
            if (rest < weights[chosen]) break;
            rest -= weights[chosen];
        }
        chosen = std::min(chosen, possible);
    }
    *id = int32_t(chosen);
    *logprob = scratch.scaled[chosen] - float(std::log(total));
    return Drawn{logits, scratch.scaled.data(), most, divisor, cutoff, total, unlimited_total};
}

// The likeliest tokens, in order; of equal ones the first.
void report_top(const Drawn& drawn, int64_t vocab, int64_t count, int32_t* ids, float* logprobs) {
    using Entry = std::pair<float, int32_t>;
    const auto is_better = [](const Entry& a, const Entry& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<Entry> heap;  // with the worst in front
    for (int64_t n = 0; n < vocab; n++) {
        if (int64_t(heap.size()) == count) {
            if (!(drawn.logits[n] > heap.front().first)) continue;
            std::pop_heap(heap.begin(), heap.end(), is_better);
            heap.pop_back();
        }
        heap.push_back({drawn.logits[n], int32_t(n)});
        std::push_heap(heap.begin(), heap.end(), is_better);
    }
    std::sort_heap(heap.begin(), heap.end(), is_better);
    const float log_total = float(std::log(drawn.total));
    for (int64_t i = 0; i < count; i++) {
        const float scaled = drawn.scaled[heap[i].second];
        ids[i] = heap[i].second;
        logprobs[i] = scaled < drawn.cutoff ? -INFINITY : scaled - log_total;
    }
}

// The ids of the tokens that limits and bans leave; returns their number.
int64_t report_kept(const Drawn& drawn, int64_t vocab, int32_t* ids) {
    int64_t kept = 0;
    for (int64_t n = 0; n < vocab; n++) {
        ids[kept] = int32_t(n);
        kept += drawn.scaled[n] > -INFINITY && drawn.scaled[n] >= drawn.cutoff;
    }
    return kept;
}

// The log-prob of a token under the logits as they are, without edits, temperature and limits.
// Overwrites what the row was drawn from.
float raw_logprob(const float* logits, const Drawn& drawn, int32_t id, DrawScratch& scratch) {
    double total = drawn.unlimited_total;
    float most = drawn.most;
    if (drawn.divisor != 1.0f || drawn.logits != logits) {
        most = scale(logits, 1.0f, scratch.scaled, scratch.weights);
        total = sum_blocks(scratch.weights, scratch.blocks);
    }
    return (logits[id] - most) - float(std::log(total));
}

}  // namespace

FOR_BOTH(tg_norm,
         (const void* x, const void* weight, void* out, int64_t rows, int64_t n, float epsilon,
          int64_t adds_one),
         norm((const T*)x, (const T*)weight, (T*)out, rows, n, epsilon, adds_one != 0))

FOR_BOTH(tg_gate,
         (const void* gate_up, void* out, int64_t rows, int64_t inner, int64_t activation),
         gate((const T*)gate_up, (T*)out, rows, inner, activation))

FOR_BOTH(tg_rotate_and_write,
         (const void* qkv, const void* qk_norm, const void* table, const int64_t* positions,
          const int64_t* blocks, const int64_t* offsets, void* query, void* cache, int64_t tokens,
          int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_tokens, float epsilon,
          int64_t norm_adds_one),
         rotate_and_write((const T*)qkv, (const T*)qk_norm, (const T*)table, positions, blocks,
                          offsets, (T*)query, (T*)cache, tokens, heads, kv_heads, head_dim,
                          block_tokens, epsilon, norm_adds_one != 0))

extern "C" int64_t tg_draw(const float* logits, const float* temperatures, const int64_t* top_k,
                           const float* top_p, const uint64_t* seeds, const uint64_t* indices,
                           int32_t* ids, float* logprobs, int64_t rows, int64_t vocab,
                           const Reports* reports) {
    return lacks_memory([&] {
        DrawScratch scratch;
        scratch.scaled.resize(vocab);
        scratch.weights.resize(vocab);
        scratch.blocks.resize((vocab + DRAW_BLOCK - 1) / DRAW_BLOCK);
        int32_t* kept_ids = reports ? reports->kept_ids : nullptr;
        for (int64_t r = 0; r < rows; r++) {
            const float* row = logits + r * vocab;
            const Edits* edits = reports ? reports->edits[r] : nullptr;
            const float* drawn_from =
                edits ? edit(row, vocab, *edits, reports->bans[r], scratch.edited) : row;
            const Drawn drawn = draw_row(drawn_from, vocab, temperatures[r],
                                         reports ? reports->min_p[r] : 0.0f, top_k[r], top_p[r],
                                         uniform(seeds[r], indices[r]), ids + r, logprobs + r,
                                         scratch);
            if (!reports) continue;
            if (edits && edits->allowed && drawn.most == -INFINITY &&
                std::all_of(drawn_from, drawn_from + vocab,
                            [](float logit) { return logit == -INFINITY; }))
                logprobs[r] = -INFINITY;
            if (reports->top_counts[r]) {
                const int64_t at = r * reports->top_stride;
                report_top(drawn, vocab, reports->top_counts[r], reports->top_ids + at,
                           reports->top_logprobs + at);
            }
            if (reports->wants_kept[r])
                kept_ids += reports->kept_counts[r] = report_kept(drawn, vocab, kept_ids);
            if (reports->wants_raw[r])
                reports->raw_logprobs[r] = raw_logprob(row, drawn, ids[r], scratch);
        }
    });
}
