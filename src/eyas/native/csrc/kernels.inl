// The kernels themselves, written once over the vector vocabulary (F, I, L, C, kFloatRows, kBf16Rows, ...) that the
// including file defines for its instruction set. Everything lives in an unnamed namespace, and nothing from the
// standard library's templates is used, so that no function compiled for one instruction set can be picked by the
// linker for another.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {
using eyas::Attention;
using eyas::attend_stride;
using eyas::Format;
using eyas::Kernels;
using eyas::kKeyBlock;
using eyas::kPageTokens;
using eyas::Type;
}  // namespace

// Each part builds on those before it.
#include "kernels/scalars.inl"
#include "kernels/lanes.inl"
#include "kernels/tiles.inl"

#include "kernels/linear_float.inl"
#include "kernels/int_rows.inl"
#include "kernels/linear_int8.inl"
#include "kernels/linear_q4.inl"

#include "kernels/attention.inl"
#include "kernels/rowwise.inl"

#include "kernels/measure.inl"

namespace {

template <int n>
const Format* find(const Format (&formats)[n], Type type) {
  for (const Format& format : formats)
    if (format.type == type) return &format;
  return nullptr;
}
template <int n, int m>
[[maybe_unused]] const Format* find(const Format (&first)[n], const Format (&second)[m], Type type) {
  const Format* found = find(first, type);
  return found ? found : find(second, type);
}

// Processors with instructions for dot products have formats of their own.
#ifndef EYAS_BF16_DOT
constexpr Format kFloatFormats[] = {
    float_format<FloatFormat<F32>>(Type::f32),
    float_format<FloatFormat<BF16>>(Type::bf16),
};
#endif
#ifndef EYAS_VNNI
constexpr Format kIntFormats[] = {
    int_format<Int8>(Type::int8, Int8::pack, nullptr),
    int_format<Q8_0>(Type::q8_0, nullptr, Q8_0::pack_blocks),
    int_format<Q4>(Type::q4_0, nullptr, Q4::pack_blocks<false>),
    int_format<Q4>(Type::q4_1, nullptr, Q4::pack_blocks<true>),
};
const Format* format_of(Type type) { return find(kFloatFormats, kIntFormats, type); }
#endif

// What all kernel sets share, and what one says itself: its name, its formats, how it is made to work hardest.
constexpr Kernels kernel_set(const char* name, const Format* (*format)(Type), double (*burn)(int64_t) = burn_flops) {
  return {
      .name = name,
      .panel_cols = P,
      .format = format,
      .rms_norm = rms_norm,
      .add = add,
      .swiglu = swiglu,
      .rotate = rotate,
      .attend = attend,
      .fetch = fetch_bytes,
      .log_sum_exp = log_sum_exp,
      .exponentials = exponentials_of,
      .sum = sum_floats,
      .burn = burn,
  };
}

}  // namespace
