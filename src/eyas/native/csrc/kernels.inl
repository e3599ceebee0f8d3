// The kernels themselves, written once over the vector vocabulary (F, I, L, C, kFloatRows, kBf16Rows, ...) that the including file
// defines for its instruction set. Everything lives in an unnamed namespace, and nothing from the standard library's
// templates is used, so that no function compiled for one instruction set can be picked by the linker for another.
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

using eyas::Attention;
using eyas::Format;
using eyas::kKeyBlock;
using eyas::kPageTokens;
using eyas::Type;

constexpr int P = L * C;  // columns per panel

// `keep(accumulator)` at the end of a loop tells the compiler to hold it in a register there: left alone, it spills one
// of a full set and pays a trip through memory per step.

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }
constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// ---- scalar conversions --------------------------------------------------------------------------------------------

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float bf16_to_float(uint16_t h) { return from_bits(uint32_t(h) << 16); }
inline uint16_t float_to_bf16(float value) {  // nearest, ties to even
  uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 64);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float f16_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return from_bits(sign) + (sign ? -1.0f : 1.0f) * float(mantissa) * from_bits(0x33800000u);  // 2^-24
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t load16(const uint8_t* p) {
  uint16_t value;
  memcpy(&value, p, 2);
  return value;
}

// ---- reductions and exp --------------------------------------------------------------------------------------------

inline float lane_sum(F v) {  // fixed tree over the lanes
  float a[L];
  f_store(a, v);
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  return a[0];
}
inline float lane_max(F v) {
  float a[L];
  f_store(a, v);
  float best = a[0];
  for (int i = 1; i < L; ++i) best = a[i] > best ? a[i] : best;
  return best;
}

// exp to about 2 units in the last place: 2^n * e^r, |r| <= ln2 / 2, degree-6 polynomial (Taylor coefficients refit
// are not needed at this width). Below -87 the result is the smallest it can be, about 1e-38.
inline F f_exp(F x) {
  x = f_min(f_max(x, f_set(-87.0f)), f_set(88.0f));
  I n = i_round(f_mul(x, f_set(1.44269504f)));
  F nf = i_float(n);
  F r = f_fma(nf, f_set(-0.693359375f), x);  // ln2 in two parts
  r = f_fma(nf, f_set(2.12194440e-4f), r);
  F p = f_set(1.0f / 720);
  p = f_fma(p, r, f_set(1.0f / 120));
  p = f_fma(p, r, f_set(1.0f / 24));
  p = f_fma(p, r, f_set(1.0f / 6));
  p = f_fma(p, r, f_set(0.5f));
  p = f_fma(p, r, f_set(1.0f));
  p = f_fma(p, r, f_set(1.0f));
  return f_mul(p, f_pow2(n));
}

// ---- products over float rows: f32 and bf16 weights ----------------------------------------------------------------

struct F32 {
  using Element = float;
  static constexpr int kRows = kFloatRows;
  // [K rounded up to even][P]
  static constexpr int pair_elements = 2 * P;
  static size_t index(int k, int c) { return size_t(k) * P + c; }
  static float encode(float x) { return x; }
  static float decode(float x) { return x; }
  static F lo(const float* w, int c) { return f_load(w + c * L); }
  static F hi(const float* w, int c) { return f_load(w + P + c * L); }
};

struct BF16 {
  using Element = uint16_t;
  static constexpr int kRows = kBf16Rows;
  // [K/2][C][L][2]: a 32-bit lane holds the weights of an even k (low half) and the odd k after it.
  static constexpr int pair_elements = 2 * P;
  static size_t index(int k, int c) { return size_t(k / 2) * (2 * P) + c * 2 + (k & 1); }
  static uint16_t encode(float x) { return float_to_bf16(x); }
  static float decode(uint16_t x) { return bf16_to_float(x); }
  static F lo(const uint16_t* w, int c) { return bf_lo(i_load(w + c * 2 * L)); }
  static F hi(const uint16_t* w, int c) { return bf_hi(i_load(w + c * 2 * L)); }
};

// R rows by P columns over the whole of K. Each sum runs over k in increasing order in one accumulator, so R does not
// matter to it.
template <class W, int R>
inline void float_tile(const typename W::Element* w, const float* x, size_t ldx, int pairs, float* out,
                       const char* next, size_t step) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = f_zero();
  for (int k = 0; k < pairs; ++k) {
    fetch(next);
    next += step;
    F b[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) b[c] = W::lo(w, c);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F a = f_bcast(x + r * ldx);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = f_fma(a, b[c], acc[r][c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) b[c] = W::hi(w, c);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F a = f_bcast(x + r * ldx + 1);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = f_fma(a, b[c], acc[r][c]);
    }
    w += W::pair_elements;
    x += 2;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) keep(acc[r][c]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) f_store(out + r * P + c * L, acc[r][c]);
}

// Calls tile<R>() over all rows in tiles as even as can be: 8 rows are 4 + 4, not 6 + 2.
template <int R, class Tile>
inline void run_tile(int rows, Tile&& tile) {
  if constexpr (R > 0) {
    if (rows == R) return tile.template run<R>();
    run_tile<R - 1>(rows, tile);
  }
}

template <int most, class Tile>
inline void for_tiles(int rows, Tile&& tile) {
  int tiles = (rows + most - 1) / most;
  tile.tiles = tiles;
  for (int t = 0; t < tiles; ++t) {
    tile.first = int(int64_t(rows) * t / tiles);
    int count = int(int64_t(rows) * (t + 1) / tiles) - tile.first;
    tile.index = t;
    run_tile<most>(count, tile);
  }
}

template <class W>
struct FloatFormat {
  static int padded(int k) { return round_up(k, 2); }
  static size_t panel_bytes(int k) { return size_t(padded(k)) * P * sizeof(typename W::Element); }
  static size_t row_bytes(int k) { return round_up(size_t(padded(k)) * 4, size_t(64)); }
  static void prepare(const float* x, int k, void* row) {
    memcpy(row, x, size_t(k) * 4);
    memset((char*)row + size_t(k) * 4, 0, row_bytes(k) - size_t(k) * 4);
  }

  struct Tile {
    const typename W::Element* w;
    const char* acts;
    size_t stride;
    int pairs;
    float* out;
    const char* next;
    size_t bytes;
    int tiles = 0, first = 0, index = 0;
    template <int R>
    void run() const {
      size_t step = next == (const char*)w ? 0 : bytes / pairs / tiles;
      float_tile<W, R>(w, (const float*)(acts + first * stride), stride / 4, pairs, out + size_t(first) * P,
                       next + bytes / tiles * index, step);
    }
  };
  static void multiply(const void* panel, const void* acts, size_t stride, int rows, int k, float* out,
                       const void* next) {
    Tile tile{(const typename W::Element*)panel, (const char*)acts, stride, padded(k) / 2, out,
              (const char*)(next ? next : panel), next ? panel_bytes(k) : 0};
    for_tiles<W::kRows>(rows, tile);
  }
  static void pack(const float* const* rows, int k, void* panel) {
    auto* w = (typename W::Element*)panel;
    memset(panel, 0, panel_bytes(k));
    for (int c = 0; c < P; ++c)
      if (rows[c])
        for (int i = 0; i < k; ++i) w[W::index(i, c)] = W::encode(rows[c][i]);
  }
  static void unpack(const void* panel, int column, int k, float* out) {
    auto* w = (const typename W::Element*)panel;
    for (int i = 0; i < k; ++i) out[i] = W::decode(w[W::index(i, column)]);
  }
};

// ---- products over integer rows: int8, Q8_0, Q4 weights -------------------------------------------------------------
//
// A row is prepared twice. For 8-bit weights it is scaled to +-32767 and rounded, so that activations with a few huge
// dimensions keep their small ones: sums of 64 products of 16 by 8 bits stay below 2^28, exact in 32 bits. For 4-bit
// weights each 32 values have a scale of their own and are rounded to +-127: sums of 32 products stay below 2^16 / 2
// per pair of lanes, exact even in 16 bits. Nothing saturates anywhere. Each group of weights along k has one scale per
// column; group sums are added in float in the order of the groups.

constexpr int kRowUnit = 64;

// Header of a prepared row. Then int16 [K'], int8 [K'], and per block of 32: float scales, float scale times the sum of
// its bytes, int32 minus 128 times that sum; with K' = K rounded up to 64.
struct Row {
  float scale;
  float pad[15];
};
inline const int16_t* row_words(const void* row) { return (const int16_t*)((const char*)row + sizeof(Row)); }
inline size_t bytes_offset(int k) { return sizeof(Row) + size_t(round_up(k, kRowUnit)) * 2; }
inline size_t blocks_offset(int k) { return sizeof(Row) + size_t(round_up(k, kRowUnit)) * 3; }
inline size_t int_row_bytes(int k) {
  return round_up(blocks_offset(k) + size_t(round_up(k, kRowUnit)) / 32 * 12, size_t(64));
}

inline float most_of(const float* x, int n) {  // largest absolute value; n a multiple of L
  F top = f_zero();
  for (int i = 0; i < n; i += L) top = f_max(top, f_abs(f_load(x + i)));
  return lane_max(top);
}
inline void round_block(const float* x, float inverse, int32_t* out) {  // 32 values
  for (int i = 0; i < 32; i += L) i_store(out + i, i_round(f_mul(f_load(x + i), f_set(inverse))));
}

void prepare_int_row(const float* x, int k, void* row) {
  const int padded = round_up(k, kRowUnit), blocks = padded / 32;
  auto* words = (int16_t*)((char*)row + sizeof(Row));
  auto* bytes = (int8_t*)((char*)row + bytes_offset(k));
  auto* scales = (float*)((char*)row + blocks_offset(k));
  float most = 0;
  for (int b = 0; b < blocks; ++b) {
    float tail[32] = {};
    const float* block = x + b * 32;
    if (b * 32 + 32 > k) {
      for (int i = b * 32; i < k; ++i) tail[i - b * 32] = x[i];
      block = tail;
    }
    const float top = most_of(block, 32);
    most = top > most ? top : most;
    const bool live = top > 1e-30f;
    int32_t q[32], sum = 0;
    round_block(block, live ? 127.0f / top : 0.0f, q);
    for (int i = 0; i < 32; ++i) {
      bytes[b * 32 + i] = int8_t(q[i]);
      sum += q[i];
    }
    scales[b] = live ? top / 127.0f : 0.0f;
    scales[blocks + b] = scales[b] * float(sum);
    const int32_t start = -128 * sum;
    memcpy(scales + 2 * blocks + b, &start, 4);
  }
  if (!kRowWords) return;
  const bool live = most > 1e-30f;
  const float inverse = live ? 32767.0f / most : 0.0f;
  ((Row*)row)->scale = live ? most / 32767.0f : 0.0f;
  for (int b = 0; b < blocks; ++b) {
    float tail[32] = {};
    const float* block = x + b * 32;
    if (b * 32 + 32 > k) {
      for (int i = b * 32; i < k; ++i) tail[i - b * 32] = x[i];
      block = tail;
    }
    int32_t q[32];
    round_block(block, inverse, q);
    for (int i = 0; i < 32; ++i) words[b * 32 + i] = int16_t(q[i]);
  }
}

// int8 weights in groups of G along k, one 16-bit scale per group and column.
template <int G_, bool kHalfScale>
struct Bytes {
  static constexpr int G = G_;
  static constexpr int group_bytes = G * P;  // [G/2][C][L][2]
  static constexpr int scale_count = P;
  static F scale(const uint16_t* s, int c) {
    if constexpr (kHalfScale) return f_f16(s + c * L);
    return f_bf16(s + c * L);
  }
  template <int R>
  static inline void group(const uint8_t* w, const int16_t* x, size_t ldx, I (&acc)[R][C], const char* next,
                           size_t step) {
    for (int k = 0; k < G / 4; ++k) {
      fetch(next);
      next += step;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        I b[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) b[c] = i_widen8((const int8_t*)w + half * 2 * P + c * 2 * L);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          I a = i_bcast(x + r * ldx + half * 2);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) acc[r][c] = i_madd(acc[r][c], b[c], a);
        }
      }
      w += 4 * P;
      x += 4;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) keep(acc[r][c]);
    }
  }
  static constexpr int fetches = G / 4;  // per group
};

template <class W, int R>
inline void byte_tile(const uint8_t* w, const uint16_t* scales, const char* acts, size_t stride, int k, float* out,
                      const char* next, size_t step) {
  const int16_t* x = row_words(acts);
  const int groups = round_up(k, kRowUnit) / W::G;
  for (int i = 0; i < R * P; i += L) f_store(out + i, f_zero());
  for (int g = 0; g < groups; ++g) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = i_zero();
    W::template group<R>(w, x, stride / 2, acc, next, step);
    next += step * W::fetches;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      F d = W::scale(scales, c);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* o = out + r * P + c * L;
        f_store(o, f_fma(i_float(acc[r][c]), d, f_load(o)));
      }
    }
    w += W::group_bytes;
    x += W::G;
    scales += W::scale_count;
  }
  for (int r = 0; r < R; ++r) {
    F s = f_bcast(&((const Row*)(acts + r * stride))->scale);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) f_store(out + r * P + c * L, f_mul(f_load(out + r * P + c * L), s));
  }
}

// 4-bit weights in groups of 32 along k: value = d * q + m, q in 0 .. 15. Four steps of [C][L] 32-bit lanes per group:
// the low halves of a lane's bytes are the q of four successive k of one column, the high halves of the next four.
struct Nibbles {
  static constexpr int G = 32;
  static constexpr int group_bytes = 16 * P;
  static constexpr int scale_count = 2 * P;  // d, then m
  static constexpr int fetches = 4;          // per group
};

template <class W, int R>
inline void nibble_tile(const uint8_t* w, const uint16_t* scales, const char* acts, size_t stride, int k, float* out,
                        const char* next, size_t step) {
  const int8_t* x = (const int8_t*)(acts + bytes_offset(k));
  const int groups = round_up(k, kRowUnit) / 32;
  const float* d_row = (const float*)(acts + blocks_offset(k));
  const float* s_row = d_row + groups;
  const size_t row = stride / 4;
  for (int i = 0; i < R * P; i += L) f_store(out + i, f_zero());
  for (int g = 0; g < groups; ++g) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = i_zero();
#pragma GCC unroll 1
    for (int t = 0; t < 4; ++t) {
      fetch(next);
      next += step;
      I b[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) b[c] = i_low_halves(i_load(w + c * 4 * L));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        I a = i_bcast(x + r * stride);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = dot_add(acc[r][c], b[c], a);
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) b[c] = i_high_halves(i_load(w + c * 4 * L));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        I a = i_bcast(x + r * stride + 4);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = dot_add(acc[r][c], b[c], a);
      }
      w += 4 * P;
      x += 8;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) keep(acc[r][c]);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      F d = f_f16(scales + c * L), m = f_f16(scales + P + c * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* o = out + r * P + c * L;
        F sum = f_fma(i_float(dot_total(acc[r][c])), f_mul(d, f_bcast(d_row + r * row + g)), f_load(o));
        f_store(o, f_fma(f_bcast(s_row + r * row + g), m, sum));
      }
    }
    scales += 2 * P;
  }
}

template <class W>
constexpr bool kIsNibbles = W::scale_count == 2 * P;

template <class W>
struct IntFormat {
  static int groups(int k) { return round_up(k, kRowUnit) / W::G; }
  static size_t scales_at(int k) { return size_t(groups(k)) * W::group_bytes; }
  static size_t panel_bytes(int k) {
    return round_up(scales_at(k) + size_t(groups(k)) * W::scale_count * 2, size_t(64));
  }
  struct Tile {
    const uint8_t* w;
    const uint16_t* scales;
    const char* acts;
    size_t stride;
    int k;
    float* out;
    const char* next;
    size_t bytes;
    int fetches;
    int tiles = 0, first = 0, index = 0;
    template <int R>
    void run() const {
      const char* ahead = next + bytes / tiles * index;
      const size_t step = (bytes + size_t(fetches) * tiles - 1) / (size_t(fetches) * tiles);
      if constexpr (kIsNibbles<W>)
        nibble_tile<W, R>(w, scales, acts + first * stride, stride, k, out + size_t(first) * P, ahead, step);
      else
        byte_tile<W, R>(w, scales, acts + first * stride, stride, k, out + size_t(first) * P, ahead, step);
    }
  };
  static void multiply(const void* panel, const void* acts, size_t stride, int rows, int k, float* out,
                       const void* next) {
    auto* w = (const uint8_t*)panel;
    Tile tile{w,
              (const uint16_t*)(w + scales_at(k)),
              (const char*)acts,
              stride,
              k,
              out,
              (const char*)(next ? next : panel),
              next ? panel_bytes(k) : 0,
              groups(k) * W::fetches};
    for_tiles<kIsNibbles<W> ? kNibbleRows : kByteRows>(rows, tile);
  }
};

// Where the int8 of (k, c) lies, and the scale of its group.
template <int G>
inline size_t byte_index(int k, int c) {
  return size_t(k / 2) * (2 * P) + c * 2 + (k & 1);
}

struct Int8 : IntFormat<Bytes<64, false>> {
  static void pack(const float* const* rows, int k, void* panel) {
    memset(panel, 0, panel_bytes(k));
    auto* q = (int8_t*)panel;
    auto* scales = (uint16_t*)((char*)panel + scales_at(k));
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int base = 0; base < k; base += 64) {
        int end = base + 64 < k ? base + 64 : k;
        float most = 0;
        for (int i = base; i < end; ++i) most = fabsf(rows[c][i]) > most ? fabsf(rows[c][i]) : most;
        // The scale is rounded to bf16 first (upwards, so that nothing exceeds 127) and used as rounded.
        uint16_t scale = float_to_bf16(most / 127);
        if (bf16_to_float(scale) * 127 < most) ++scale;
        scales[size_t(base / 64) * P + c] = scale;
        float inverse = most > 0 ? 1 / bf16_to_float(scale) : 0;
        for (int i = base; i < end; ++i) {
          int value = int(lrintf(rows[c][i] * inverse));
          q[byte_index<64>(i, c)] = int8_t(value > 127 ? 127 : value < -127 ? -127 : value);
        }
      }
    }
  }
  static void unpack(const void* panel, int c, int k, float* out) {
    auto* q = (const int8_t*)panel;
    auto* scales = (const uint16_t*)((const char*)panel + scales_at(k));
    for (int i = 0; i < k; ++i) out[i] = q[byte_index<64>(i, c)] * bf16_to_float(scales[size_t(i / 64) * P + c]);
  }
};

struct Q8_0 : IntFormat<Bytes<32, true>> {
  // GGUF block: f16 d, int8 q[32]
  static void pack_blocks(const uint8_t* const* rows, int k, void* panel) {
    memset(panel, 0, panel_bytes(k));
    auto* q = (int8_t*)panel;
    auto* scales = (uint16_t*)((char*)panel + scales_at(k));
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int b = 0; b < k / 32; ++b) {
        const uint8_t* block = rows[c] + size_t(b) * 34;
        scales[size_t(b) * P + c] = load16(block);
        for (int i = 0; i < 32; ++i) q[byte_index<32>(b * 32 + i, c)] = int8_t(block[2 + i]);
      }
    }
  }
  static void unpack(const void* panel, int c, int k, float* out) {
    auto* q = (const int8_t*)panel;
    auto* scales = (const uint16_t*)((const char*)panel + scales_at(k));
    for (int i = 0; i < k; ++i) out[i] = q[byte_index<32>(i, c)] * f16_to_float(scales[size_t(i / 32) * P + c]);
  }
};

struct Q4 : IntFormat<Nibbles> {
  static size_t place(int k, int c) {  // byte of (k, c); odd fours of k are its high half
    return size_t(k / 8) * (4 * P) + c * 4 + (k & 3);
  }
  static void put(uint8_t* bytes, int k, int c, unsigned q) {
    bytes[place(k, c)] = uint8_t(bytes[place(k, c)] | q << (k & 4));
  }
  // GGUF blocks: Q4_0 is f16 d, 16 bytes; Q4_1 is f16 d, f16 m, 16 bytes. Low nibbles are k 0..15, high ones 16..31.
  template <bool kHasMin>
  static void pack_blocks(const uint8_t* const* rows, int k, void* panel) {
    memset(panel, 0, panel_bytes(k));
    auto* bytes = (uint8_t*)panel;
    auto* scales = (uint16_t*)((char*)panel + scales_at(k));
    constexpr int header = kHasMin ? 4 : 2;
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int b = 0; b < k / 32; ++b) {
        const uint8_t* block = rows[c] + size_t(b) * (header + 16);
        uint16_t d = load16(block);
        scales[size_t(b) * 2 * P + c] = d;
        scales[size_t(b) * 2 * P + P + c] = kHasMin ? load16(block + 2) : minus_eight_times(d);
        for (int i = 0; i < 16; ++i) {
          put(bytes, b * 32 + i, c, block[header + i] & 15u);
          put(bytes, b * 32 + 16 + i, c, block[header + i] >> 4);
        }
      }
    }
  }
  // Q4_0 means d * (q - 8): the same as Q4_1 with m = -8 d, which f16 holds exactly unless d is huge.
  static uint16_t minus_eight_times(uint16_t d) {
    uint16_t sign = uint16_t(~d & 0x8000), rest = d & 0x7fff;
    if (rest == 0) return 0;
    if (rest >= 0x0400) return uint16_t(sign | (rest + 0x0c00 < 0x7c00 ? rest + 0x0c00 : 0x7bff));
    float value = f16_to_float(rest) * 8;  // a subnormal d: renormalise
    uint32_t bits = to_bits(value), exponent = bits >> 23;
    if (exponent < 113) return uint16_t(sign | rest << 3);  // still subnormal
    return uint16_t(sign | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
  }
  static void unpack(const void* panel, int c, int k, float* out) {
    auto* bytes = (const uint8_t*)panel;
    auto* scales = (const uint16_t*)((const char*)panel + scales_at(k));
    for (int i = 0; i < k; ++i) {
      int q = bytes[place(i, c)] >> (i & 4) & 15;
      const uint16_t* s = scales + size_t(i / 32) * 2 * P + c;
      out[i] = f16_to_float(s[0]) * float(q) + f16_to_float(s[P]);
    }
  }
};

template <class T>
constexpr Format float_format(Type type) {
  return {type, true, T::panel_bytes, T::row_bytes, T::prepare, T::multiply, T::pack, nullptr, T::unpack};
}
template <class T>
constexpr Format int_format(Type type, void (*pack)(const float* const*, int, void*),
                            void (*pack_blocks)(const uint8_t* const*, int, void*)) {
  return {type, false, T::panel_bytes, int_row_bytes, prepare_int_row, T::multiply, pack, pack_blocks, T::unpack};
}

// ---- row-wise arithmetic -------------------------------------------------------------------------------------------

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  F sum = f_zero();
  int whole = n / L * L;
  for (int i = 0; i < whole; i += L) {
    F v = f_load(x + i);
    sum = f_fma(v, v, sum);
  }
  float total = lane_sum(sum);
  for (int i = whole; i < n; ++i) total += x[i] * x[i];
  float scale = 1.0f / sqrtf(total / float(n) + eps);
  for (int i = 0; i < whole; i += L) f_store(out + i, f_mul(f_load(weight + i), f_mul(f_load(x + i), f_set(scale))));
  for (int i = whole; i < n; ++i) out[i] = weight[i] * (x[i] * scale);
}

inline F silu_times(F g, F u) {
  F e = f_exp(f_sub(f_zero(), g));
  return f_mul(f_div(g, f_add(f_set(1.0f), e)), u);
}
void swiglu(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + L <= n; i += L) f_store(out + i, silu_times(f_load(gate + i), f_load(up + i)));
  if (i < n) {
    float g[L] = {}, u[L] = {}, o[L];
    for (int j = i; j < n; ++j) g[j - i] = gate[j], u[j - i] = up[j];
    f_store(o, silu_times(f_load(g), f_load(u)));
    for (int j = i; j < n; ++j) out[j] = o[j - i];
  }
}

float log_sum_exp(const float* x, int n) {
  int whole = n / L * L;
  float most = x[0];
  if (whole) {
    F top = f_load(x);
    for (int i = L; i < whole; i += L) top = f_max(top, f_load(x + i));
    most = lane_max(top);
  }
  for (int i = whole; i < n; ++i) most = x[i] > most ? x[i] : most;
  F sum = f_zero();
  for (int i = 0; i < whole; i += L) sum = f_add(sum, f_exp(f_sub(f_load(x + i), f_set(most))));
  float total = lane_sum(sum);
  for (int i = whole; i < n; ++i) total += expf(x[i] - most);
  return most + logf(total);
}

// ---- attention -----------------------------------------------------------------------------------------------------

constexpr int kKeyVectors = kKeyBlock / L;
constexpr int kQueryTile = 12 / kKeyVectors < 8 ? 12 / kKeyVectors : 8;

// Scores of R queries against one block of keys; each sum runs over the head dimension in order.
template <int R>
inline void score_tile(const float* const* q, const float* keys, int head_dim, float* const* scores) {
  F acc[R][kKeyVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) acc[r][c] = f_zero();
  for (int d = 0; d < head_dim; ++d) {
    F b[kKeyVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) b[c] = f_load(keys + c * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F a = f_bcast(q[r] + d);
#pragma GCC unroll 8
      for (int c = 0; c < kKeyVectors; ++c) acc[r][c] = f_fma(a, b[c], acc[r][c]);
    }
    keys += kKeyBlock;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kKeyVectors; ++c) f_store(scores[r] + c * L, acc[r][c]);
}

struct ScoreTile {
  const float* const* q;
  const float* keys;
  int head_dim;
  float* const* scores;
  template <int R>
  void run() const {
    score_tile<R>(q, keys, head_dim, scores);
  }
};

inline const float* value_row(const Attention& a, int slot) {
  return a.pages[slot / kPageTokens] + a.v_offset + size_t(slot % kPageTokens) * a.v_stride;
}

// R queries of one row, D vectors of the head dimension: sums over the row's keys in logical order.
template <int R, int D>
inline void value_tile(const Attention& a, int row, const float* const* p, int d0, float (*out)[D * L],
                       const float* inverse) {
  F acc[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) acc[r][d] = f_zero();
  auto step = [&](const float* v, int j) __attribute__((always_inline)) {
    F w[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) w[r] = f_bcast(p[r] + j);
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) {
      F b = f_load(v + d * L);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r][d] = f_fma(w[r], b, acc[r][d]);
    }
  };
  int j = 0;
  for (int prefix = a.prefix[row]; j < prefix;) {
    const float* v = value_row(a, j) + d0;
    int end = (j / kPageTokens + 1) * kPageTokens;
    end = end < prefix ? end : prefix;
    for (; j < end; ++j, v += a.v_stride) step(v, j);
  }
  for (int e = a.extra_begin[row]; e < a.extra_begin[row + 1]; ++e, ++j) step(value_row(a, a.extra[e]) + d0, j);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) f_store(out[r] + d * L, f_mul(acc[r][d], f_set(inverse[r])));
}

template <int R, int D>
inline void value_part(const Attention& a, int row, const float* const* p, int d0, float* out, const float* inverse) {
  float block[R][D * L];
  value_tile<R, D>(a, row, p, d0, block, inverse);
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < D * L && d0 + d < a.head_dim; ++d) out[size_t(r) * a.head_dim + d0 + d] = block[r][d];
}

template <int R>
inline void value_rows(const Attention& a, int row, const float* const* p, float* out, const float* inverse) {
  int d = 0;
  for (; d + 3 * L < a.head_dim; d += 4 * L) value_part<R, 4>(a, row, p, d, out, inverse);
  for (; d < a.head_dim; d += L) value_part<R, 1>(a, row, p, d, out, inverse);
}

void attend(const Attention& a) {
  const int blocks = (a.slots + kKeyBlock - 1) / kKeyBlock;
  const int stride = blocks * kKeyBlock;
  const int queries = a.rows * a.group;
  for (int first = 0; first < queries; first += kQueryTile) {
    int count = queries - first < kQueryTile ? queries - first : kQueryTile;
    const float* q[kQueryTile];
    float* scores[kQueryTile];
    for (int i = 0; i < count; ++i) {
      q[i] = a.queries[(first + i) / a.group] + size_t((first + i) % a.group) * a.head_dim;
      scores[i] = a.scratch + size_t(first + i) * stride;
    }
    for (int b = 0; b < blocks; ++b) {
      int slot = b * kKeyBlock;
      const float* keys = a.pages[slot / kPageTokens] + a.k_offset + size_t(slot % kPageTokens) * a.head_dim;
      if (first == 0) {  // while these keys are scored, their values and the next keys come in
        const float* values = value_row(a, slot);
        for (int i = 0; i < kKeyBlock * a.v_stride; i += 16) fetch(values + i);
        for (int i = 0; i < kKeyBlock * a.head_dim; i += 16) fetch(keys + kKeyBlock * a.head_dim + i);
      }
      run_tile<kQueryTile>(count, ScoreTile{q, keys, a.head_dim, scores});
      for (int i = 0; i < count; ++i) scores[i] += kKeyBlock;
    }
  }
  for (int row = 0; row < a.rows; ++row) {
    const int prefix = a.prefix[row];
    const int* extra = a.extra + a.extra_begin[row];
    const int extras = a.extra_begin[row + 1] - a.extra_begin[row];
    const int n = prefix + extras;
    for (int g = 0; g < a.group;) {
      const float* p[3];
      float inverse[3];
      int count = a.group - g < 3 ? a.group - g : 3;
      for (int i = 0; i < count; ++i) {
        float* s = a.scratch + size_t(row * a.group + g + i) * stride;
        for (int e = 0; e < extras; ++e) s[prefix + e] = s[extra[e]];  // extra[e] >= prefix + e
        float most = s[0];
        int whole = n / L * L;
        if (whole) {
          F top = f_load(s);
          for (int j = L; j < whole; j += L) top = f_max(top, f_load(s + j));
          most = lane_max(top);
        }
        for (int j = whole; j < n; ++j) most = s[j] > most ? s[j] : most;
        // Sum by lane j % L; lanes beyond n add zero, which changes no bit.
        F sum = f_zero();
        for (int j = 0; j < whole; j += L) {
          F e = f_exp(f_sub(f_load(s + j), f_set(most)));
          f_store(s + j, e);
          sum = f_add(sum, e);
        }
        if (whole < n) {
          float tail[L];
          for (int j = 0; j < L; ++j) tail[j] = whole + j < n ? s[whole + j] : most;
          f_store(tail, f_exp(f_sub(f_load(tail), f_set(most))));
          for (int j = 0; j < L; ++j) {
            if (whole + j < n)
              s[whole + j] = tail[j];
            else
              tail[j] = 0;
          }
          sum = f_add(sum, f_load(tail));
        }
        p[i] = s;
        inverse[i] = 1.0f / lane_sum(sum);
      }
      float* out = a.outputs[row] + size_t(g) * a.head_dim;
      if (count == 3)
        value_rows<3>(a, row, p, out, inverse);
      else if (count == 2)
        value_rows<2>(a, row, p, out, inverse);
      else
        value_rows<1>(a, row, p, out, inverse);
      g += count;
    }
  }
}

// ---- measuring -----------------------------------------------------------------------------------------------------

float sum_floats(const float* x, size_t n) {
  F acc[8];
  for (F& a : acc) a = f_zero();
  for (size_t i = 0; i + 8 * L <= n; i += 8 * L) {
    fetch(x + i + 1024);
    if (L > 2) fetch(x + i + 1024 + 16);
    if (L > 4) fetch(x + i + 1024 + 32), fetch(x + i + 1024 + 48);
    if (L > 8) fetch(x + i + 1024 + 64), fetch(x + i + 1024 + 80), fetch(x + i + 1024 + 96), fetch(x + i + 1024 + 112);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) acc[j] = f_add(acc[j], f_load(x + i + j * L));
  }
  F total = acc[0];
  for (int j = 1; j < 8; ++j) total = f_add(total, acc[j]);
  return lane_sum(total);
}

[[maybe_unused]] double burn_flops(int64_t steps) {
  constexpr int n = 10;  // more than latency times units
  F acc[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) acc[i] = f_set(float(i));
  F a = f_set(0.999f), b = f_set(1e-3f);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      acc[i] = f_fma(acc[i], a, b);
      keep(acc[i]);
    }
  }
  F total = acc[0];
#pragma GCC unroll 16
  for (int i = 1; i < n; ++i) total = f_add(total, acc[i]);
  return double(steps) * n * L * 2 + (lane_sum(total) > 1e30f);  // the sum must be seen to be needed
}

// ---- the set -------------------------------------------------------------------------------------------------------

template <int n>
const Format* find(const Format (&formats)[n], Type type) {
  for (const Format& format : formats)
    if (format.type == type) return &format;
  return nullptr;
}

#ifndef EYAS_OWN_FORMATS
constexpr Format kFormats[] = {
    float_format<FloatFormat<F32>>(Type::f32),
    float_format<FloatFormat<BF16>>(Type::bf16),
    int_format<Int8>(Type::int8, Int8::pack, nullptr),
    int_format<Q8_0>(Type::q8_0, nullptr, Q8_0::pack_blocks),
    int_format<Q4>(Type::q4_0, nullptr, Q4::pack_blocks<false>),
    int_format<Q4>(Type::q4_1, nullptr, Q4::pack_blocks<true>),
};
const Format* format_of(Type type) { return find(kFormats, type); }
#endif

}  // namespace
