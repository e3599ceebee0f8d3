// Weights of 4 bits, Q4_0 and Q4_1, multiplied by rows of 8-bit integers in blocks with a scale each.
namespace {

// Groups of 32 weights along k: value = d * q + m, q in 0 .. 15. Four steps of [C][L] 32-bit lanes per group:
// the low halves of a lane's bytes are the q of four successive k of one column, the high halves of the next four.
struct Nibbles {
  static constexpr int G = 32;
  static constexpr int group_bytes = 16 * P;
  static constexpr int scale_count = 2 * P;  // d, then m
  static constexpr int kRows = kNibbleRows;
  static constexpr int fetches = 4;  // per group
  template <int R>
  static void tile(const uint8_t* w, const uint16_t* scales, const char* acts, size_t stride, int k, float* out,
                   const char* next, size_t step) {
    const int8_t* x = (const int8_t*)(acts + bytes_offset(k));
    const int groups = round_up(k, kRowUnit) / 32;
    const float* d_row = (const float*)(acts + blocks_offset(k));
    const float* s_row = d_row + groups;
    const size_t row = stride / 4;
    F total[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) total[r][c] = f_zero();
    for (int g = 0; g < groups; ++g) {
      I acc[R][C];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = i_zero();
#pragma GCC unroll 1
      for (int t = 0; t < 4; ++t) {
        fetch(next);
        fetch(next + 64);
        fetch(next + 128);
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
          F sum = f_fma(i_float(dot_total(acc[r][c])), f_mul(d, f_bcast(d_row + r * row + g)), total[r][c]);
          total[r][c] = f_fma(f_bcast(s_row + r * row + g), m, sum);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) keep(total[r][c]);
      scales += 2 * P;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) f_store(out + r * P + c * L, total[r][c]);
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
    uint16_t* s = scales(panel, k);
    constexpr int header = kHasMin ? 4 : 2;
    for (int c = 0; c < P; ++c) {
      if (!rows[c]) continue;
      for (int b = 0; b < k / 32; ++b) {
        const uint8_t* block = rows[c] + size_t(b) * (header + 16);
        uint16_t d = load16(block);
        s[size_t(b) * 2 * P + c] = d;
        s[size_t(b) * 2 * P + P + c] = kHasMin ? load16(block + 2) : minus_eight_times(d);
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
    for (int i = 0; i < k; ++i) {
      int q = bytes[place(i, c)] >> (i & 4) & 15;
      const uint16_t* s = scales(panel, k) + size_t(i / 32) * 2 * P + c;
      out[i] = f16_to_float(s[0]) * float(q) + f16_to_float(s[P]);
    }
  }
};

}  // namespace
