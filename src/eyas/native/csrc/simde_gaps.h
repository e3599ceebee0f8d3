// AVX-512 instructions that SIMDe 0.7 does not have, lane by lane; only for the test build.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

template <class To, class From, class Lane>
To each_lane(From from, Lane lane) {  // 16 lanes, whatever their sizes
  To to;
  lane(reinterpret_cast<char*>(&to), reinterpret_cast<const char*>(&from));
  return to;
}

template <class Out, class In, class To, class From, class Convert>
To convert(From from, Convert one) {
  return each_lane<To>(from, [&](char* out, const char* in) {
    for (int i = 0; i < 16; ++i) {
      In a;
      memcpy(&a, in + i * sizeof(In), sizeof(In));
      Out b = one(a);
      memcpy(out + i * sizeof(Out), &b, sizeof(Out));
    }
  });
}

inline simde__m512i gap_cvtepu16_epi32(simde__m256i a) {
  return convert<uint32_t, uint16_t, simde__m512i>(a, [](uint16_t x) { return uint32_t(x); });
}
inline simde__m256i gap_cvtepi32_epi16(simde__m512i a) {
  return convert<uint16_t, uint32_t, simde__m256i>(a, [](uint32_t x) { return uint16_t(x); });
}
inline simde__m128i gap_cvtepi32_epi8(simde__m512i a) {
  return convert<uint8_t, uint32_t, simde__m128i>(a, [](uint32_t x) { return uint8_t(x); });
}
inline simde__m512i gap_cvtps_epi32(simde__m512 a) {
  return convert<int32_t, float, simde__m512i>(a, [](float x) { return int32_t(std::lrint(x)); });
}
inline simde__m512 gap_cvtepi32_ps(simde__m512i a) {
  return convert<float, int32_t, simde__m512>(a, [](int32_t x) { return float(x); });
}
inline simde__m512 gap_cvtph_ps(simde__m256i a) {
  return convert<float, uint16_t, simde__m512>(a, [](uint16_t h) {
    const float sign = h & 0x8000 ? -1.0f : 1.0f;
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    return sign * (exponent ? std::ldexp(float(mantissa + 1024), exponent - 25) : std::ldexp(float(mantissa), -24));
  });
}

template <class T, class From, class Join>
T reduce(From from, Join join) {
  T lanes[16];
  memcpy(lanes, &from, sizeof lanes);
  for (int i = 1; i < 16; ++i) lanes[0] = join(lanes[0], lanes[i]);
  return lanes[0];
}
inline float gap_reduce_max_ps(simde__m512 a) {
  return reduce<float>(a, [](float x, float y) { return x > y ? x : y; });
}
inline int gap_reduce_add_epi32(simde__m512i a) {
  return reduce<int32_t>(a, [](int32_t x, int32_t y) { return x + y; });
}

}  // namespace

#define _mm512_cvtepu16_epi32(a) gap_cvtepu16_epi32(a)
#define _mm512_cvtepi32_epi16(a) gap_cvtepi32_epi16(a)
#define _mm512_cvtepi32_epi8(a) gap_cvtepi32_epi8(a)
#undef _mm512_reduce_max_ps
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_max_ps(a) gap_reduce_max_ps(a)
#define _mm512_reduce_add_epi32(a) gap_reduce_add_epi32(a)
#define _mm512_cvtps_epi32(a) gap_cvtps_epi32(a)
#define _mm512_cvtepi32_ps(a) gap_cvtepi32_ps(a)
#define _mm512_cvtph_ps(a) gap_cvtph_ps(a)
#undef _mm512_madd_epi16  // some SIMDe versions alias it with the wrong number of arguments
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
