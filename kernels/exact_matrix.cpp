// Product of a float32 matrix with bfloat16 activations, as exact as with widened activations.
//
// Each panel has a slot of its own. If all of its weights are representable in bfloat16, as they are
// if published in it, they are stored as bfloat16: half the bytes to read, and the processor's own
// instructions. Products are exact either way and sums are float32, except that such instructions
// flush values below 1.2e-38 to 0. After the slots there is one flag per panel: 1 for bfloat16.
//
// Letters in shapes: T tokens, N outputs, K inputs.

#include "functions.h"
#include "packing.h"
#include "products.h"

namespace {

// Locations of a matrix's panels.
struct Places {
    float* packed;
    Matrix matrix;

    int64_t stride() const { return stored_inputs<bfloat16>(matrix.inputs) * PANEL; }
    float* at(int64_t panel) const { return packed + panel * stride(); }
    float& is_half(int64_t panel) const {
        return at((matrix.outputs + PANEL - 1) / PANEL)[panel];
    }
};

inline bool are_halves(const float* weights, int64_t n) {
    uint32_t low = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, weights + i, 4);
        low |= bits << 16;
    }
    return low == 0;
}

inline void take_row(const Places& places, int64_t row, float* out) {
    const int64_t panel = row / PANEL, inputs = places.matrix.inputs;
    const float* from = places.at(panel);
    if (places.is_half(panel) == 0.0f) return take_row(from, row % PANEL, out, inputs);
    for (int64_t k = 0; k < inputs; k++)
        out[k] = widen(((const bfloat16*)from)[Arithmetic<bfloat16>::place(row % PANEL, k)]);
}

// Store a whole panel, in bfloat16 if that is exact.
inline void put(const Places& places, const float* from, int64_t panel,
                std::vector<bfloat16>& room) {
    const int64_t inputs = places.matrix.inputs;
    float* to = places.at(panel);
    places.is_half(panel) = are_halves(from, PANEL * inputs) ? 1.0f : 0.0f;
    if (places.is_half(panel) == 0.0f) return pack_panel(from, to, 0, PANEL, inputs);
    room.resize(PANEL * inputs);
    for (int64_t i = 0; i < PANEL * inputs; i++) narrow(from[i], &room[i]);
    std::fill_n((bfloat16*)to, places.stride(), bfloat16{0});
    pack_panel(room.data(), (bfloat16*)to, 0, PANEL, inputs);
}

void pack(const float* from, const Places& places, int64_t first, int64_t rows) {
    const int64_t inputs = places.matrix.inputs;
    std::vector<bfloat16> halves;
    std::vector<float> whole(PANEL * inputs);
    pack_by_panels(from, first, rows, inputs,
                   [&](const float* source, int64_t panel, int64_t lane, int64_t count) {
                       if (count < PANEL) {
                           for (int64_t i = 0; i < PANEL; i++)
                               take_row(places, panel * PANEL + i, &whole[i * inputs]);
                           std::copy_n(source, count * inputs, &whole[lane * inputs]);
                           source = whole.data();
                       }
                       put(places, source, panel, halves);
                   });
}

// Add to the bits that bfloat16 elements of the rows from ``first`` on have, which wrap around; count
// the results that are not finite. If a panel is not stored in bfloat16, change nothing and
// return false.
bool add_bits(const Places& places, int64_t first, const int64_t* index, const uint16_t* difference,
              int64_t count, int64_t* not_finite) {
    const int64_t inputs = places.matrix.inputs;
    if (count == 0) return true;
    const int64_t last_panel = (first + index[count - 1] / inputs) / PANEL;
    for (int64_t panel = (first + index[0] / inputs) / PANEL; panel <= last_panel; panel++)
        if (places.is_half(panel) == 0.0f) return false;
    int64_t wrong = 0;
    const auto place = [&](int64_t row, int64_t k) {
        return (bfloat16*)places.at(row / PANEL) + Arithmetic<bfloat16>::place(row % PANEL, k);
    };
    for_elements(first, index, count, inputs, place, [&](bfloat16* to, int64_t i) {
        to->bits = uint16_t(to->bits + difference[i]);
        wrong += !std::isfinite(widen(*to));
    });
    *not_finite = wrong;
    return true;
}

void multiply(const bfloat16* x, const Places& places, const float* bias, float* out,
              int64_t tokens, bool adds, int64_t threads_max) {
    const Matrix matrix = places.matrix;
    std::vector<Arithmetic<bfloat16>::Input> half_room;
    std::vector<float> whole_room;
    const auto* halves = as_inputs(x, tokens, matrix.inputs, half_room);
    const float* wholes = as_inputs(x, tokens, matrix.inputs, whole_room);
    const Panels<bfloat16> half{(const bfloat16*)places.packed, 2 * places.stride(), nullptr};
    const Panels<float> whole{places.packed, places.stride(), nullptr};
    share_panels(tokens, matrix, threads_max, [=](int64_t panel, int64_t end_panel) {
        while (panel < end_panel) {
            const float is_half = places.is_half(panel);
            int64_t end = panel + 1;
            while (end < end_panel && places.is_half(end) == is_half) end++;
            if (is_half != 0.0f)
                multiply_panels(halves, half, matrix, bias, adds, out, tokens, panel, end);
            else
                multiply_panels(wholes, whole, matrix, bias, adds, out, tokens, panel, end);
            panel = end;
        }
    });
}

}  // namespace

extern "C" int64_t tg_multiply_exact(const void* x, void* packed, const void* bias, void* out,
                                     int64_t tokens, int64_t outputs, int64_t inputs,
                                     int64_t adds, int64_t threads_max) {
    return lacks_memory([&] {
        multiply((const bfloat16*)x, Places{(float*)packed, {outputs, inputs}},
                 (const float*)bias, (float*)out, tokens, adds != 0, threads_max);
    });
}

extern "C" int64_t tg_pack_exact(const void* from, void* packed, int64_t first, int64_t rows,
                                 int64_t outputs, int64_t inputs) {
    return lacks_memory(
        [&] { pack((const float*)from, Places{(float*)packed, {outputs, inputs}}, first, rows); });
}

extern "C" int64_t tg_take_exact(void* packed, const int64_t* rows, void* out, int64_t count,
                                 int64_t outputs, int64_t inputs) {
    return lacks_memory([&] {
        const Places places{(float*)packed, {outputs, inputs}};
        for (int64_t i = 0; i < count; i++)
            take_row(places, rows[i], (float*)out + i * inputs);
    });
}

extern "C" int64_t tg_add_bits_exact(void* packed, int64_t first, const int64_t* index,
                                     const void* difference, int64_t count, int64_t outputs,
                                     int64_t inputs, int64_t* not_finite, int64_t* is_done) {
    const Places places{(float*)packed, {outputs, inputs}};
    *is_done = add_bits(places, first, index, (const uint16_t*)difference, count, not_finite);
    return 0;
}
