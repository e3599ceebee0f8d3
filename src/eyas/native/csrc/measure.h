// What the machine can do, with all threads of a pool: the ceilings that passes are compared with.
#pragma once

#include "pool.h"

namespace eyas {

// Bytes per second read from a buffer of `megabytes`, best of `repeats`.
double read_bandwidth(Pool& pool, int megabytes, int repeats);
// Floating-point operations per second, best of `repeats`.
double peak_flops(Pool& pool, int64_t steps, int repeats);

}  // namespace eyas
