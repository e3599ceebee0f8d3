#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"

const Kernels eyas::kAvx512Kernels = kernel_set("avx512", format_of);
