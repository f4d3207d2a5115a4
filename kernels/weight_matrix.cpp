// Product of a packed weight matrix with the activations of a step, and packing and unpacking.
//
// All weights have one type; products.h has the multiplication, and kernels/weight_matrix.py
// documents the arguments. kernels/compiled.py builds this file.
//
// Letters in shapes: T tokens, N outputs, K inputs.

#include "functions.h"
#include "packing.h"
#include "products.h"

namespace {

template <typename W, typename T>
void multiply(const T* x, const W* packed, const float* scales, const T* bias, T* out,
              int64_t tokens, Matrix matrix, bool adds, int64_t threads_max) {
    std::vector<typename Arithmetic<W>::Input> room;
    const auto* inputs = as_inputs(x, tokens, matrix.inputs, room);
    const Panels<W> all{packed, stored_inputs<W>(matrix.inputs) * PANEL, scales};
    share_panels(tokens, matrix, threads_max, [=](int64_t panel, int64_t end_panel) {
        multiply_panels(inputs, all, matrix, bias, adds, out, tokens, panel, end_panel);
    });
}

// Pack ``rows`` rows of a matrix, from output ``first`` on.
template <typename T>
void pack(const T* from, T* packed, int64_t first, int64_t rows, int64_t inputs) {
    const int64_t stride = stored_inputs<T>(inputs) * PANEL;
    pack_by_panels(from, first, rows, inputs,
                   [=](const T* source, int64_t panel, int64_t lane, int64_t count) {
                       pack_panel(source, packed + panel * stride, lane, count, inputs);
                   });
}

// Unpack some rows.
template <typename T>
void take(const T* packed, const int64_t* rows, T* out, int64_t count, int64_t inputs) {
    const int64_t stride = stored_inputs<T>(inputs) * PANEL;
    for (int64_t i = 0; i < count; i++)
        take_row(packed + rows[i] / PANEL * stride, rows[i] % PANEL, out + i * inputs, inputs);
}

// Add to the bits of the elements ``index`` of the rows from ``first`` on, which wrap around; count
// the results that are not finite.
template <typename T>
void add_bits(T* packed, int64_t first, const int64_t* index, const void* difference,
              int64_t count, int64_t inputs, int64_t* not_finite) {
    using Bits = typename BitsOf<T>::type;
    const int64_t stride = stored_inputs<T>(inputs) * PANEL;
    const Bits* add = (const Bits*)difference;
    int64_t wrong = 0;
    const auto place = [=](int64_t row, int64_t k) {
        return packed + row / PANEL * stride + Arithmetic<T>::place(row % PANEL, k);
    };
    for_elements(first, index, count, inputs, place, [&](T* to, int64_t i) {
        Bits bits;
        std::memcpy(&bits, to, sizeof bits);
        bits = Bits(bits + add[i]);
        std::memcpy(to, &bits, sizeof bits);
        wrong += !std::isfinite(widen(*to));
    });
    *not_finite = wrong;
}

template <typename T>
void add_bits_plain(T* to, const int64_t* index, const typename BitsOf<T>::type* difference,
                    int64_t count, int64_t* not_finite) {
    // As one long row.
    const auto place = [=](int64_t, int64_t k) { return to + k; };
    for_elements(0, index, count, INT64_MAX, place, [&](T* element, int64_t i) {
        typename BitsOf<T>::type bits;
        std::memcpy(&bits, element, sizeof bits);
        bits = bits + difference[i];
        std::memcpy(element, &bits, sizeof bits);
        *not_finite += !std::isfinite(widen(*element));
    });
}

}  // namespace

extern "C" int64_t tg_panel_outputs() { return PANEL; }

FOR_BOTH(tg_multiply,
         (const void* x, const void* packed, const void* bias, void* out, int64_t tokens,
          int64_t outputs, int64_t inputs, int64_t adds, int64_t threads_max),
         multiply((const T*)x, (const T*)packed, nullptr, (const T*)bias, (T*)out, tokens,
                  Matrix{outputs, inputs}, adds != 0, threads_max))

FOR_BOTH(tg_multiply_int8,
         (const void* x, const void* packed, const void* scales, const void* bias, void* out,
          int64_t tokens, int64_t outputs, int64_t inputs, int64_t adds, int64_t threads_max),
         multiply((const T*)x, (const int8_t*)packed, (const float*)scales, (const T*)bias,
                  (T*)out, tokens, Matrix{outputs, inputs}, adds != 0, threads_max))

FOR_BOTH(tg_pack,
         (const void* from, void* packed, int64_t first, int64_t rows, int64_t inputs),
         pack((const T*)from, (T*)packed, first, rows, inputs))

FOR_BOTH(tg_add_bits,
         (void* packed, int64_t first, const int64_t* index, const void* difference,
          int64_t count, int64_t inputs, int64_t* not_finite),
         add_bits((T*)packed, first, index, difference, count, inputs, not_finite))

// The same for elements of a tensor as published.
FOR_BOTH(tg_add_bits_plain,
         (void* to, const int64_t* index, const void* difference, int64_t count,
          int64_t* not_finite),
         add_bits_plain((T*)to, index, (const typename BitsOf<T>::type*)difference, count,
                        not_finite))

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
