#include "vec_portable.h"
// The vocabulary comes first.
#include "kernels.inl"

namespace eyas {
extern const Kernels kPortableKernels;
const Kernels kPortableKernels = {"portable", P, format_of, rms_norm, add, swiglu, rotate, attend, fetch_bytes, log_sum_exp, exponentials_of, sum_floats, burn_flops};
}  // namespace eyas
