#include "vec_neon.h"
// The vocabulary comes first.
#include "kernels.inl"

namespace eyas {
extern const Kernels kNeonKernels;
const Kernels kNeonKernels = {"neon", P, format_of, rms_norm, add, swiglu, rotate, attend, fetch_bytes, log_sum_exp, exponentials_of, sum_floats, burn_flops};
}  // namespace eyas
