// Weights of 8 bits, int8 and Q8_0, multiplied by rows of 16-bit integers.
namespace {

// Groups of G weights along k, one 16-bit scale per group and column.
template <int G_, bool kHalfScale>
struct Bytes {
  static constexpr int G = G_;
  static constexpr int group_bytes = G * P;  // [G/2][C][L][2]
  static constexpr int scale_count = P;
  static constexpr int kRows = kByteRows;
  static constexpr int fetches = G / 4;  // per group
  static F scale(const uint16_t* s, int c) {
    if constexpr (kHalfScale) return f_f16(s + c * L);
    return f_bf16(s + c * L);
  }
  template <int R>
  static void group(const uint8_t* w, const int16_t* x, size_t ldx, I (&acc)[R][C], const char* next, size_t step) {
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
  template <int R>
  static void tile(const uint8_t* w, const uint16_t* scales, const char* acts, size_t stride, int k, float* out,
                   const char* next, size_t step) {
    const int16_t* x = row_words(acts);
    const int groups = round_up(k, kRowUnit) / G;
    for (int i = 0; i < R * P; i += L) f_store(out + i, f_zero());
    for (int g = 0; g < groups; ++g) {
      I acc[R][C];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = i_zero();
      group<R>(w, x, stride / 2, acc, next, step);
      next += step * fetches;
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        F d = scale(scales, c);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          float* o = out + r * P + c * L;
          f_store(o, f_fma(i_float(acc[r][c]), d, f_load(o)));
        }
      }
      w += group_bytes;
      x += G;
      scales += scale_count;
    }
    for (int r = 0; r < R; ++r) {
      F s = f_bcast(&((const Row*)(acts + r * stride))->scale);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) f_store(out + r * P + c * L, f_mul(f_load(out + r * P + c * L), s));
    }
  }
};

// Where the int8 of (k, c) lies.
template <int G>
inline size_t byte_index(int k, int c) {
  return size_t(k / 2) * (2 * P) + c * 2 + (k & 1);
}

struct Int8 : IntFormat<Bytes<64, false>> {
  static void pack(const float* const* rows, int k, void* panel) {
    memset(panel, 0, panel_bytes(k));
    auto* q = (int8_t*)panel;
    uint16_t* s = scales(panel, k);
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int base = 0; base < k; base += 64) {
        int end = base + 64 < k ? base + 64 : k;
        float most = 0;
        for (int i = base; i < end; ++i) most = fabsf(rows[c][i]) > most ? fabsf(rows[c][i]) : most;
        // The scale is rounded to bf16 first (upwards, so that nothing exceeds 127) and used as rounded.
        uint16_t scale = float_to_bf16(most / 127);
        if (bf16_to_float(scale) * 127 < most) ++scale;
        s[size_t(base / 64) * P + c] = scale;
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
    const uint16_t* s = scales(panel, k);
    for (int i = 0; i < k; ++i) out[i] = q[byte_index<64>(i, c)] * bf16_to_float(s[size_t(i / 64) * P + c]);
  }
};

struct Q8_0 : IntFormat<Bytes<32, true>> {
  // GGUF block: f16 d, int8 q[32]
  static void pack_blocks(const uint8_t* const* rows, int k, void* panel) {
    memset(panel, 0, panel_bytes(k));
    auto* q = (int8_t*)panel;
    uint16_t* s = scales(panel, k);
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int b = 0; b < k / 32; ++b) {
        const uint8_t* block = rows[c] + size_t(b) * 34;
        s[size_t(b) * P + c] = load16(block);
        for (int i = 0; i < 32; ++i) q[byte_index<32>(b * 32 + i, c)] = int8_t(block[2 + i]);
      }
    }
  }
  static void unpack(const void* panel, int c, int k, float* out) {
    auto* q = (const int8_t*)panel;
    const uint16_t* s = scales(panel, k);
    for (int i = 0; i < k; ++i) out[i] = q[byte_index<32>(i, c)] * f16_to_float(s[size_t(i / 32) * P + c]);
  }
};

}  // namespace
