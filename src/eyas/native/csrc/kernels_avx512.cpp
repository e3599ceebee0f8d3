#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"

namespace eyas {
extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = {"avx512", P, format_of, rms_norm, add, swiglu, rotate, attend, fetch_bytes, log_sum_exp, exponentials_of, sum_floats, burn_flops};
}  // namespace eyas
