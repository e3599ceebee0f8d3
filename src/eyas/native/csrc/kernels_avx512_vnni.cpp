// AVX-512 with VNNI but without BF16, as in Cascade Lake and Ice Lake.
#define EYAS_VNNI
#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"
#include "kernels/linear_byte_dot.inl"

namespace {
const Format* format_of(Type type) { return find(kFloatFormats, kByteDotFormats, type); }
}  // namespace

const Kernels eyas::kAvx512VnniKernels = kernel_set("avx512_vnni", format_of);
