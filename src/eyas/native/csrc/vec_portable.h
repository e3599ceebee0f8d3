// Vector vocabulary in GNU vector extensions: 8 lanes on any processor, no fused multiply-add.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
typedef float F __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
constexpr int L = 8;
constexpr int C = 2;
constexpr int kFloatRows = 4, kBf16Rows = 4, kByteRows = 4, kNibbleRows = 4;

inline F f_zero() { return F{}; }
inline F f_load(const float* p) {
  F a;
  memcpy(&a, p, sizeof a);
  return a;
}
inline void f_store(float* p, F a) { memcpy(p, &a, sizeof a); }
inline F f_set(float a) { return F{a, a, a, a, a, a, a, a}; }
inline F f_bcast(const float* p) { return f_set(*p); }
inline F f_add(F a, F b) { return a + b; }
inline F f_sub(F a, F b) { return a - b; }
inline F f_mul(F a, F b) { return a * b; }
inline F f_div(F a, F b) { return a / b; }
inline F f_max(F a, F b) { return a > b ? a : b; }
inline F f_min(F a, F b) { return a < b ? a : b; }
inline F f_fma(F a, F b, F c) { return a * b + c; }
inline F f_abs(F a) { return (F)((I)a & 0x7fffffff); }
inline F f_bf16(const uint16_t* p) {
  typedef uint16_t Halves __attribute__((vector_size(2 * L)));
  Halves a;
  memcpy(&a, p, sizeof a);
  return (F)(__builtin_convertvector(a, I) << 16);
}
inline float f16_to_float(uint16_t h);
inline F f_f16(const uint16_t* p) {
  F a;
  for (int i = 0; i < L; ++i) a[i] = f16_to_float(p[i]);
  return a;
}

inline I i_zero() { return I{}; }
inline I i_load(const void* p) {
  I a;
  memcpy(&a, p, sizeof a);
  return a;
}
inline void i_store(int32_t* p, I a) { memcpy(p, &a, sizeof a); }
inline I i_bcast(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return I{v, v, v, v, v, v, v, v};
}
inline F bf_lo(I w) { return (F)(w << 16); }
inline F bf_hi(I w) { return (F)(w & (int32_t)0xffff0000); }
inline I i_widen8(const int8_t* p) {
  int16_t wide[2 * L];
  for (int i = 0; i < 2 * L; ++i) wide[i] = p[i];
  return i_load(wide);
}
inline I i_low_halves(I w) { return w & 0x0f0f0f0f; }
inline I i_high_halves(I w) { return (w >> 4) & 0x0f0f0f0f; }
inline I dot_add(I acc, I w, I x) {  // four products of bytes per lane, w in 0 .. 15
  for (int shift = 0; shift < 32; shift += 8) acc += ((w >> shift) & 255) * ((x << (24 - shift)) >> 24);
  return acc;
}
inline I dot_total(I acc) { return acc; }
inline I i_madd(I acc, I w, I x) { return acc + ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16); }
inline F i_float(I a) { return __builtin_convertvector(a, F); }
inline I i_round(F a) {
  I r;
  for (int i = 0; i < L; ++i) r[i] = int32_t(lrintf(a[i]));
  return r;
}
inline F f_pow2(I n) { return (F)((n + 127) << 23); }
template <class V>
inline void keep(V&) {}
inline void fetch(const void* p) { __builtin_prefetch(p); }
inline void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
}  // namespace
