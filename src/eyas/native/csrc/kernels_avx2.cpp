#include "vec_avx2.h"
// The vocabulary comes first.
#include "kernels.inl"

const Kernels eyas::kAvx2Kernels = kernel_set("avx2", format_of);
