// Runs a step through all of a model's dense layers in one call, or a whole step of decodes.
//
// Calls the functions of the other files in the order and with the arguments of
// engine/models/model.py, so the results have the same bits; it saves nine Python calls per layer.
// kernels/layers.py documents the arguments; kernels/compiled.py builds this file.
//
// Letters in shapes: T tokens, H hidden, A query heads, K KV heads, D head_dim, I inner size.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "functions.h"
#include "numbers.h"

namespace {

struct Product {
    const void *weights, *scales, *bias;  // scales: of int8 weights only
    int64_t outputs, inputs;
};

struct Layer {
    const void *input_norm, *qk_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm, *rotations;
    void* cache;
    Product qkv, output, gate_up, down;
    int64_t window;
};

struct Sizes {
    int64_t layers, hidden, heads, kv_heads, head_dim, block_tokens, inner, activation, norm_adds_one;
    float epsilon, scale, soft_cap;
};

struct Step {
    const int64_t *positions, *tables;
    int64_t tokens, row_blocks, threads_max;
};

// A token's KV block, its offset in the block, and the length of its context.
struct Places {
    std::vector<int64_t> blocks, offsets, lengths;

    Places(const Step& step, int64_t block_tokens)
        : blocks(step.tokens), offsets(step.tokens), lengths(step.tokens) {
        for (int64_t t = 0; t < step.tokens; t++) {
            const int64_t position = step.positions[t];
            blocks[t] = step.tables[t * step.row_blocks + position / block_tokens];
            offsets[t] = position % block_tokens;
            lengths[t] = position + 1;
        }
    }
};

// What is before the layers and after them.
struct Ends {
    const void *embedding, *final_norm;
    void* head;
    int64_t embedding_is_packed, vocab;
    float embedding_scale;
};

// How each token's successor is drawn, and where it goes.
struct Draws {
    const float* temperatures;
    const int64_t* top_k;
    const float* top_p;
    const uint64_t *seeds, *indices;
    int32_t* ids;
    float* logprobs;
    const Reports* reports;
};

template <typename T> struct Functions;

#define FUNCTIONS_OF(T, DTYPE)                                                                     \
    template <> struct Functions<T> {                                                              \
        static constexpr auto norm = tg_norm_##DTYPE;                                              \
        static constexpr auto gate = tg_gate_##DTYPE;                                              \
        static constexpr auto rotate_and_write = tg_rotate_and_write_##DTYPE;                      \
        static constexpr auto attend_last = tg_attend_last_##DTYPE;                                \
        static constexpr auto multiply = tg_multiply_##DTYPE;                                      \
        static constexpr auto multiply_int8 = tg_multiply_int8_##DTYPE;                            \
        static constexpr auto take = tg_take_##DTYPE;                                              \
    }

FUNCTIONS_OF(float, float32);
FUNCTIONS_OF(bfloat16, bfloat16);

inline void must(int64_t lacked_memory) {
    if (lacked_memory) throw std::bad_alloc();
}

template <typename T>
void multiply(const T* x, const Product& by, T* out, bool adds, const Step& step) {
    using F = Functions<T>;
    if (by.scales)
        must(F::multiply_int8(x, by.weights, by.scales, by.bias, out, step.tokens, by.outputs,
                              by.inputs, adds, step.threads_max));
    else
        must(F::multiply(x, by.weights, by.bias, out, step.tokens, by.outputs, by.inputs, adds,
                         step.threads_max));
}

// Intermediate values, in memory that every layer reuses. Freed after each step, because it would
// lie above memory freed by prompts, and keep the allocator from returning that to the system.
template <typename T> class Room {
  public:
    T *narrow, *wide, *inner;

    Room(const Sizes& sizes, int64_t tokens) {
        const int64_t heads_size = sizes.heads * sizes.head_dim;
        const int64_t qkv_size = heads_size + 2 * sizes.kv_heads * sizes.head_dim;
        const int64_t narrow_size = lines(std::max(sizes.hidden, heads_size) * tokens);
        const int64_t wide_size =
            lines(std::max({qkv_size, 2 * sizes.inner, sizes.hidden}) * tokens);
        const int64_t inner_size = lines(std::max(heads_size, sizes.inner) * tokens);
        held.reset(new Line[narrow_size + wide_size + inner_size]);
        narrow = (T*)held.get();
        wide = (T*)(held.get() + narrow_size);
        inner = (T*)(held.get() + narrow_size + wide_size);
    }

  private:
    struct alignas(64) Line {
        char bytes[64];
    };

    static int64_t lines(int64_t elements) {
        return (elements * int64_t(sizeof(T)) + 63) / 64;
    }

    std::unique_ptr<Line[]> held;
};

// One layer, added to ``hidden`` [T, H].
template <typename T>
void add_layer(const Layer& layer, const Sizes& sizes, const Step& step, const Places& places,
               const Room<T>& room, T* hidden) {
    using F = Functions<T>;
    const auto norm = [&](const T* x, const void* weight) {
        must(F::norm(x, weight, room.narrow, step.tokens, sizes.hidden, sizes.epsilon,
                     sizes.norm_adds_one));
    };
    const auto add_product = [&](const T* x, const Product& by, const void* post_norm) {
        if (!post_norm) return multiply(x, by, hidden, true, step);
        multiply(x, by, room.wide, false, step);
        norm(room.wide, post_norm);
        for (int64_t i = 0; i < step.tokens * sizes.hidden; i++)
            narrow(widen(hidden[i]) + widen(room.narrow[i]), &hidden[i]);
    };
    norm(hidden, layer.input_norm);
    multiply(room.narrow, layer.qkv, room.wide, false, step);
    must(F::rotate_and_write(room.wide, layer.qk_norm, layer.rotations, step.positions,
                             places.blocks.data(), places.offsets.data(), room.inner, layer.cache,
                             step.tokens, sizes.heads, sizes.kv_heads, sizes.head_dim,
                             sizes.block_tokens, sizes.epsilon, sizes.norm_adds_one));
    must(F::attend_last(room.inner, layer.cache, step.tables, places.lengths.data(), room.narrow,
                        step.tokens, sizes.heads, sizes.kv_heads, sizes.head_dim,
                        sizes.block_tokens, step.row_blocks, sizes.scale, layer.window,
                        sizes.soft_cap, nullptr));
    add_product(room.narrow, layer.output, layer.attention_post_norm);
    norm(hidden, layer.mlp_norm);
    multiply(room.narrow, layer.gate_up, room.wide, false, step);
    must(F::gate(room.wide, room.inner, step.tokens, sizes.inner, sizes.activation));
    add_product(room.inner, layer.down, layer.mlp_post_norm);
}

template <typename T>
void add_layers(const Layer* layers, const Sizes& sizes, const Step& step, T* hidden) {
    const Places places(step, sizes.block_tokens);
    const Room<T> room(sizes, step.tokens);
    for (int64_t n = 0; n < sizes.layers; n++)
        add_layer(layers[n], sizes, step, places, room, hidden);
}

// Embed the tokens: [T, H].
template <typename T>
void embed(const Ends& ends, const int64_t* ids, const Sizes& sizes, const Step& step, T* hidden) {
    const int64_t size = sizes.hidden;
    if (ends.embedding_is_packed)
        must(Functions<T>::take(ends.embedding, ids, hidden, step.tokens, size));
    else
        for (int64_t t = 0; t < step.tokens; t++)
            std::copy_n((const T*)ends.embedding + ids[t] * size, size, hidden + t * size);
    if (ends.embedding_scale != 1.0f)
        for (int64_t i = 0; i < step.tokens * size; i++)
            narrow(widen(hidden[i]) * ends.embedding_scale, &hidden[i]);
}

// The head's outputs [T, V] of normed hidden states. A bfloat16 model's head is exact.
inline void multiply_head(const float* x, const Ends& ends, float* out, int64_t hidden,
                          const Step& step) {
    must(tg_multiply_float32(x, ends.head, nullptr, out, step.tokens, ends.vocab, hidden, false,
                             step.threads_max));
}

inline void multiply_head(const bfloat16* x, const Ends& ends, float* out, int64_t hidden,
                          const Step& step) {
    must(tg_multiply_exact(x, ends.head, nullptr, out, step.tokens, ends.vocab, hidden, false,
                           step.threads_max));
}

template <typename T>
void decode(const Layer* layers, const Sizes& sizes, const Ends& ends, const int64_t* ids,
            const Step& step, const Draws& draws) {
    const int64_t elements = step.tokens * sizes.hidden;
    const std::unique_ptr<T[]> hidden(new T[elements]), normed(new T[elements]);
    embed(ends, ids, sizes, step, hidden.get());
    add_layers(layers, sizes, step, hidden.get());
    must(Functions<T>::norm(hidden.get(), ends.final_norm, normed.get(), step.tokens, sizes.hidden,
                            sizes.epsilon, sizes.norm_adds_one));
    const std::unique_ptr<float[]> logits(new float[step.tokens * ends.vocab]);
    multiply_head(normed.get(), ends, logits.get(), sizes.hidden, step);
    must(tg_draw(logits.get(), draws.temperatures, draws.top_k, draws.top_p, draws.seeds,
                 draws.indices, draws.ids, draws.logprobs, step.tokens, ends.vocab,
                 draws.reports));
}

}  // namespace

FOR_BOTH(tg_layers,
         (const void* layers, const void* sizes, const int64_t* positions, const int64_t* tables,
          void* hidden, int64_t tokens, int64_t row_blocks, int64_t threads_max),
         add_layers((const Layer*)layers, *(const Sizes*)sizes,
                    Step{positions, tables, tokens, row_blocks, threads_max}, (T*)hidden))

FOR_BOTH(tg_decode,
         (const void* layers, const void* sizes, const void* ends, const int64_t* token_ids,
          const int64_t* positions, const int64_t* tables, const float* temperatures,
          const int64_t* top_k, const float* top_p, const uint64_t* seeds, const uint64_t* indices, int32_t* ids, float* logprobs,
          const void* reports, int64_t tokens, int64_t row_blocks, int64_t threads_max),
         decode<T>((const Layer*)layers, *(const Sizes*)sizes, *(const Ends*)ends, token_ids,
                   Step{positions, tables, tokens, row_blocks, threads_max},
                   Draws{temperatures, top_k, top_p, seeds, indices, ids, logprobs,
                         (const Reports*)reports}))
