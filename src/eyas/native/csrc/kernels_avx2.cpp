#include "vec_avx2.h"
// The vocabulary comes first.
#include "kernels.inl"

namespace eyas {
extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = {"avx2", P, format_of, rms_norm, add, swiglu, rotate, attend, fetch_bytes, log_sum_exp, exponentials_of, sum_floats, burn_flops};
}  // namespace eyas
