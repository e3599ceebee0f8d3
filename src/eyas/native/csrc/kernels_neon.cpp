#include "vec_neon.h"
// The vocabulary comes first.
#include "kernels.inl"

const Kernels eyas::kNeonKernels = kernel_set("neon", format_of);
