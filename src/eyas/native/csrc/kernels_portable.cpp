#include "vec_portable.h"
// The vocabulary comes first.
#include "kernels.inl"

const Kernels eyas::kPortableKernels = kernel_set("portable", format_of);
