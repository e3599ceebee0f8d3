// Vector vocabulary, AArch64 NEON: 4 lanes. Where the dot-product extension is compiled for, 4-bit weights use it; sums
// of integers are the same either way.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {
using F = float32x4_t;
using I = int32x4_t;
constexpr int L = 4;
constexpr int C = 4;
// Up to 24 accumulators of 32 registers.
constexpr int kFloatRows = 6, kBf16Rows = 6, kByteRows = 4, kNibbleRows = 5;

inline F f_zero() { return vdupq_n_f32(0); }
inline F f_load(const float* p) { return vld1q_f32(p); }
inline void f_store(float* p, F a) { vst1q_f32(p, a); }
inline F f_set(float a) { return vdupq_n_f32(a); }
inline F f_bcast(const float* p) { return vld1q_dup_f32(p); }
inline F f_add(F a, F b) { return vaddq_f32(a, b); }
inline F f_sub(F a, F b) { return vsubq_f32(a, b); }
inline F f_mul(F a, F b) { return vmulq_f32(a, b); }
inline F f_div(F a, F b) { return vdivq_f32(a, b); }
inline F f_max(F a, F b) { return vmaxq_f32(a, b); }
inline F f_min(F a, F b) { return vminq_f32(a, b); }
inline F f_fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F f_abs(F a) { return vabsq_f32(a); }
inline F f_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline F f_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

inline I i_zero() { return vdupq_n_s32(0); }
inline I i_load(const void* p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p)); }
inline void i_store(int32_t* p, I a) { vst1q_s32(p, a); }
inline I i_bcast(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return vdupq_n_s32(v);
}
inline F bf_lo(I w) { return vreinterpretq_f32_s32(vshlq_n_s32(w, 16)); }
inline F bf_hi(I w) { return vreinterpretq_f32_s32(vandq_s32(w, vdupq_n_s32((int32_t)0xffff0000))); }
inline I i_widen8(const int8_t* p) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p))); }  // 2L values
inline I i_low_halves(I w) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(w), vdupq_n_u8(15))); }
inline I i_high_halves(I w) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(w), 4)); }
inline I dot_add(I acc, I w, I x) {  // four products of bytes per lane, w in 0 .. 15
  const int8x16_t a = vreinterpretq_s8_s32(w), b = vreinterpretq_s8_s32(x);
#ifdef __ARM_FEATURE_DOTPROD
  return vdotq_s32(acc, a, b);
#else
  const I low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b))), high = vpaddlq_s16(vmull_high_s8(a, b));
  return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
inline I dot_total(I acc) { return acc; }
inline I i_madd(I acc, I w, I x) {  // two products of 16-bit halves per lane
  const int16x8_t a = vreinterpretq_s16_s32(w), b = vreinterpretq_s16_s32(x);
  return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
}
inline F i_float(I a) { return vcvtq_f32_s32(a); }
inline I i_round(F a) { return vcvtnq_s32_f32(a); }
inline F f_pow2(I n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
inline void keep(F& a) { asm("" : "+w"(a)); }
inline void keep(I& a) { asm("" : "+w"(a)); }
inline void fetch(const void* p) { __builtin_prefetch(p); }
inline void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
}  // namespace
