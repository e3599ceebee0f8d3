#include <cstring>

#ifdef EYAS_NEON
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace eyas {

extern const Kernels kPortableKernels;
#ifdef EYAS_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512DotKernels;
#endif
#ifdef EYAS_NEON
extern const Kernels kNeonKernels;
extern const Kernels kNeonDotKernels;
#endif

namespace {

int runnable(const Kernels** sets) {  // best first
  int n = 0;
#ifdef EYAS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef EYAS_SIMDE
  sets[n++] = &kAvx512DotKernels;
  sets[n++] = &kAvx512Kernels;
#endif
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifndef EYAS_SIMDE
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    sets[n++] = &kAvx512DotKernels;
  if (avx512) sets[n++] = &kAvx512Kernels;
#endif
  if (avx2) sets[n++] = &kAvx2Kernels;
#endif
#ifdef EYAS_NEON
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) sets[n++] = &kNeonDotKernels;
  sets[n++] = &kNeonKernels;
#endif
  sets[n++] = &kPortableKernels;
  return n;
}

}  // namespace

const Kernels* select_kernels(const char* name) {
  const Kernels* sets[8];
  const int n = runnable(sets);
  if (!name || !*name) return sets[0];
  for (int i = 0; i < n; ++i)
    if (!std::strcmp(sets[i]->name, name)) return sets[i];
  return nullptr;
}

int list_kernels(const char** names, int capacity) {
  const Kernels* sets[8];
  const int n = runnable(sets);
  for (int i = 0; i < n && i < capacity; ++i) names[i] = sets[i]->name;
  return n;
}

}  // namespace eyas
