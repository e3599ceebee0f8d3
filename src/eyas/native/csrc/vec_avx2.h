// Vector vocabulary, AVX2 + FMA + F16C: 8 lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {
using F = __m256;
using I = __m256i;
constexpr int L = 8;         // float lanes
constexpr int C = 2;         // vectors per panel
// Rows per tile: as many as 16 registers hold with what each format needs to unpack.
constexpr int kFloatRows = 6;
constexpr int kBf16Rows = 5;
constexpr int kByteRows = 4;
constexpr int kNibbleRows = 4;

inline F f_zero() { return _mm256_setzero_ps(); }
inline F f_load(const float* p) { return _mm256_loadu_ps(p); }
inline void f_store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline F f_set(float a) { return _mm256_set1_ps(a); }
inline F f_bcast(const float* p) { return _mm256_broadcast_ss(p); }
inline F f_add(F a, F b) { return _mm256_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm256_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm256_div_ps(a, b); }
inline F f_max(F a, F b) { return _mm256_max_ps(a, b); }
inline F f_min(F a, F b) { return _mm256_min_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F f_abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F f_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F f_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

inline I i_zero() { return _mm256_setzero_si256(); }
inline I i_load(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void i_store(int32_t* p, I a) { _mm256_storeu_si256((__m256i*)p, a); }
inline I i_bcast(const void* p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p)); }
inline F bf_lo(I w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline F bf_hi(I w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000))); }
inline I i_widen8(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }  // 2L values
inline I i_low_halves(I w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
inline I i_high_halves(I w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }
// Four products of unsigned (0 .. 15) by signed bytes per 32-bit lane, at most eight times between totals: each 16-bit
// half stays within 8 * 2 * 15 * 127 = 30480.
inline I dot_add(I acc, I w, I x) { return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x)); }
inline I dot_total(I acc) { return _mm256_madd_epi16(acc, _mm256_set1_epi16(1)); }
inline I i_madd(I acc, I w, I x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }
inline F i_float(I a) { return _mm256_cvtepi32_ps(a); }
inline I i_round(F a) { return _mm256_cvtps_epi32(a); }
inline F f_pow2(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline void keep(F& a) { asm("" : "+x"(a)); }
inline void keep(I& a) { asm("" : "+x"(a)); }
inline void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
inline void fetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
}  // namespace
