// AVX-512 with VNNI but without BF16, as in Cascade Lake and Ice Lake.
#define EYAS_VNNI
#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"
#include "kernels/linear_byte_dot.inl"

namespace {
const Format* format_of(Type type) { return find(kFloatFormats, kByteDotFormats, type); }
}  // namespace

namespace eyas {
extern const Kernels kAvx512VnniKernels;
const Kernels kAvx512VnniKernels = {"avx512_vnni", P,           format_of,  rms_norm, add, swiglu, rotate,
                                    attend, fetch_bytes, log_sum_exp, exponentials_of, sum_floats, burn_flops};
}  // namespace eyas
