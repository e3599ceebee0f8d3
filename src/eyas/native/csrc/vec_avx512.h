// Vector vocabulary, AVX-512 F + BW + VL + DQ: 16 lanes. With EYAS_VNNI also VNNI.
#pragma once
#ifdef EYAS_SIMDE  // a test build runs this file's arithmetic on processors without AVX-512
#include "simde_gaps.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace {
using F = __m512;
using I = __m512i;
constexpr int L = 16;
constexpr int C = 2;
// 24 accumulators of 32 registers; where integer sums of a block are added to float ones, 12 of each.
constexpr int kFloatRows = 12, kBf16Rows = 12, kNibbleRows = 6;
#ifdef EYAS_VNNI
constexpr int kByteRows = 6;
#else
constexpr int kByteRows = 12;
#endif

inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline F f_set(float a) { return _mm512_set1_ps(a); }
inline F f_bcast(const float* p) { return _mm512_set1_ps(*p); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_abs(F a) { return _mm512_abs_ps(a); }
inline F f_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F f_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline I i_zero() { return _mm512_setzero_si512(); }
inline I i_set(int32_t a) { return _mm512_set1_epi32(a); }
inline I i_load(const void* p) { return _mm512_loadu_si512(p); }
inline void i_store(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
inline I i_bcast(const void* p) {
  int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_epi32(value);
}
inline I i_bits(F a) { return _mm512_castps_si512(a); }
inline F bf_lo(I w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline F bf_hi(I w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000))); }
inline I i_widen8(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }  // 2L values
inline I i_low_halves(I w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline I i_high_halves(I w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
#ifdef EYAS_VNNI
inline I dot_add(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
inline I dot_total(I acc) { return acc; }
#else
// Four products of unsigned (0 .. 15) by signed bytes per 32-bit lane, at most eight times between totals: each 16-bit
// half stays within 8 * 2 * 15 * 127 = 30480.
inline I dot_add(I acc, I w, I x) { return _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, x)); }
inline I dot_total(I acc) { return _mm512_madd_epi16(acc, _mm512_set1_epi16(1)); }
#endif
inline I i_madd(I acc, I w, I x) { return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x)); }
inline F i_float(I a) { return _mm512_cvtepi32_ps(a); }
inline I i_round(F a) { return _mm512_cvtps_epi32(a); }
inline F f_pow2(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
#ifdef EYAS_SIMDE
template <class V>
inline void keep(V&) {}
inline void fetch(const void*) {}
inline void fetch_far(const void*) {}
#else
inline void keep(F& a) { asm("" : "+v"(a)); }
inline void keep(I& a) { asm("" : "+v"(a)); }
inline void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void fetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
#endif
}  // namespace
