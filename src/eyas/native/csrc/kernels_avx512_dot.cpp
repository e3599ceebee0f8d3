// AVX-512 with BF16 and VNNI.
#define EYAS_VNNI
#define EYAS_BF16_DOT
#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"
#include "kernels/linear_bf16_dot.inl"
#include "kernels/linear_byte_dot.inl"

namespace {

constexpr Format kFloatFormats[] = {
    float_format<FloatFormat<F32>>(Type::f32),
    float_format<BF16Dot>(Type::bf16),
};
const Format* format_of(Type type) { return find(kFloatFormats, kByteDotFormats, type); }

double burn_dots(int64_t steps) {
  constexpr int n = 16;
  F acc[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) acc[i] = f_set(float(i));
  const __m512bh a = as_bf16(i_set(0x00003f00)), b = as_bf16(i_set(0x00003c00));
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
      keep(acc[i]);
    }
  }
  F total = acc[0];
#pragma GCC unroll 16
  for (int i = 1; i < n; ++i) total = f_add(total, acc[i]);
  return double(steps) * n * L * 4 + (lane_sum(total) > 1e30f);  // the sum must be seen to be needed
}

}  // namespace

const Kernels eyas::kAvx512DotKernels = kernel_set("avx512_dot", format_of, burn_dots);
