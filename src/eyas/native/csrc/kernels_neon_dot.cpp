#include "vec_neon.h"
// The vocabulary comes first.
#include "kernels.inl"

const Kernels eyas::kNeonDotKernels = kernel_set("neon_dot", format_of);
