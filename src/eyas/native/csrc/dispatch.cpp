#include <cstring>

#ifdef EYAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef EYAS_NEON
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace eyas {

namespace {

#ifdef EYAS_AMX
// Whether there are tiles for bfloat16 and bytes, and Linux lets this process use them: they enlarge what is saved of a
// thread, so it wants to be asked.
bool has_tiles() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return (d & wanted) == wanted && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

int runnable(const Kernels** sets) {  // best first
  int n = 0;
#ifdef EYAS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef EYAS_SIMDE
  sets[n++] = &kAvx512DotKernels;
  sets[n++] = &kAvx512VnniKernels;
  sets[n++] = &kAvx512Kernels;
#endif
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifndef EYAS_SIMDE
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool dot = vnni && __builtin_cpu_supports("avx512bf16");
#ifdef EYAS_AMX
  static const bool tiles = has_tiles();
  if (dot && tiles) sets[n++] = &kAmxKernels;
#endif
  if (dot) sets[n++] = &kAvx512DotKernels;
  if (vnni) sets[n++] = &kAvx512VnniKernels;
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
