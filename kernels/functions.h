// Declarations of the compiled functions that tg_layers and tg_decode call.
//
// Included by both caller and definitions, so that the compiler checks that they agree.
// kernels/native.py, weight_matrix.py, exact_matrix.py and rounded_matrix.py document the
// arguments.

#pragma once

#include <cstdint>

#define DECLARE_FOR_BOTH(NAME, ARGUMENTS)                                                          \
    extern "C" int64_t NAME##_float32 ARGUMENTS;                                                   \
    extern "C" int64_t NAME##_bfloat16 ARGUMENTS;

DECLARE_FOR_BOTH(tg_norm, (const void* x, const void* weight, void* out, int64_t rows, int64_t n,
                           float epsilon, int64_t adds_one))

DECLARE_FOR_BOTH(tg_gate, (const void* gate_up, void* out, int64_t rows, int64_t inner,
                           int64_t activation))

DECLARE_FOR_BOTH(tg_rotate_and_write,
                 (const void* qkv, const void* qk_norm, const void* table,
                  const int64_t* positions, const int64_t* blocks, const int64_t* offsets,
                  void* query, void* cache, int64_t tokens, int64_t heads, int64_t kv_heads,
                  int64_t head_dim, int64_t block_tokens, float epsilon, int64_t norm_adds_one))

DECLARE_FOR_BOTH(tg_attend_last,
                 (const void* query, const void* cache, const int64_t* tables,
                  const int64_t* lengths, void* out, int64_t rows, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, int64_t block_tokens, int64_t row_blocks,
                  float scale, int64_t window, float soft_cap, const float* sinks))

DECLARE_FOR_BOTH(tg_add_bits,
                 (void* packed, int64_t first, const int64_t* index, const void* difference,
                  int64_t count, int64_t inputs, int64_t* not_finite))

DECLARE_FOR_BOTH(tg_add_bits_plain,
                 (void* to, const int64_t* index, const void* difference, int64_t count,
                  int64_t* not_finite))

DECLARE_FOR_BOTH(tg_multiply,
                 (const void* x, const void* packed, const void* bias, void* out, int64_t tokens,
                  int64_t outputs, int64_t inputs, int64_t adds, int64_t threads_max))

DECLARE_FOR_BOTH(tg_multiply_int8,
                 (const void* x, const void* packed, const void* scales, const void* bias,
                  void* out, int64_t tokens, int64_t outputs, int64_t inputs, int64_t adds,
                  int64_t threads_max))

DECLARE_FOR_BOTH(tg_take, (const void* packed, const int64_t* rows, void* out, int64_t count,
                           int64_t inputs))

extern "C" int64_t tg_multiply_exact(const void* x, void* packed, const void* bias, void* out,
                                     int64_t tokens, int64_t outputs, int64_t inputs,
                                     int64_t adds, int64_t threads_max);

// Edits of a row's logits before its draw, in this order; as RowEdits in native.py.
struct Edits {
    const int64_t* biased_ids;
    const float* biases;
    int64_t biased;
    const int64_t* banned_ids;
    int64_t banned;
    const int64_t* seen_ids;
    const float* seen_counts;  // of the output
    int64_t seen;
    float repetition, frequency, presence;
    const uint32_t* allowed;  // one bit per token that may be drawn; null for all
};

// Edits, limits and reports of a draw that few rows ask for; as DrawReports in native.py.
struct Reports {
    const float* min_p;          // 0 keeps all
    const Edits* const* edits;   // null for none
    const uint8_t* bans;         // whether the edits' bans apply
    const int64_t* top_counts;  // how many of the likeliest tokens are reported
    int64_t top_stride;
    int32_t* top_ids;
    float* top_logprobs;
    const uint8_t* wants_raw;
    float* raw_logprobs;  // of the logits as they are
    const uint8_t* wants_kept;
    int64_t* kept_counts;
    int32_t* kept_ids;  // of one row after the other
};

extern "C" int64_t tg_draw(const float* logits, const float* temperatures, const int64_t* top_k,
                           const float* top_p, const uint64_t* seeds,
                           const uint64_t* indices, int32_t* ids, float* logprobs, int64_t rows,
                           int64_t vocab, const Reports* reports);
