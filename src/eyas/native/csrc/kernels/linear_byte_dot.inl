// Weights of 8 bits by the dot products of AVX-512 VNNI: activations are rounded to 8 bits, in blocks of 32 with a scale
// each.
//
// Weights are stored as unsigned bytes, 128 too large, as the instruction wants them; each block's sum starts at minus
// 128 times the sum of its activations, which is exact.
namespace {

// As prepare_int_row, whose 16-bit half nothing here reads.
void prepare_byte_row(const float* x, int k, void* row) {
  const int blocks = round_up(k, kRowUnit) / 32;
  auto* bytes = (int8_t*)row + bytes_offset(k);
  auto* scales = (float*)((char*)row + blocks_offset(k));
  for (int b = 0; b < blocks; ++b, x += 32, bytes += 32) {
    float tail[32] = {};
    const int left = k - b * 32;
    if (left < 32)
      for (int i = 0; i < left; ++i) tail[i] = x[i];
    const F low = f_load(left < 32 ? tail : x), high = f_load((left < 32 ? tail : x) + L);
    const float top = _mm512_reduce_max_ps(f_max(f_abs(low), f_abs(high)));
    const bool live = top > 1e-30f;
    const F inverse = f_set(live ? 127.0f / top : 0.0f);
    const I q_low = i_round(f_mul(low, inverse)), q_high = i_round(f_mul(high, inverse));
    _mm_storeu_si128((__m128i*)bytes, _mm512_cvtepi32_epi8(q_low));
    _mm_storeu_si128((__m128i*)(bytes + L), _mm512_cvtepi32_epi8(q_high));
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q_low, q_high)), start = -128 * sum;
    scales[b] = live ? top / 127.0f : 0.0f;
    scales[blocks + b] = scales[b] * float(sum);
    memcpy(scales + 2 * blocks + b, &start, 4);
  }
}

struct ByteLayout {
  static size_t place(int k, int c) { return size_t(k / 4) * (4 * P) + c * 4 + (k & 3); }  // [K/4][C][L][4]
};

template <int G, bool kHalfScale, int R>
inline void byte_dot_tile(const uint8_t* w, const uint16_t* scales, const char* acts, size_t stride, int k, float* out,
                          const char* next, size_t step) {
  const int8_t* x = (const int8_t*)(acts + bytes_offset(k));
  const int blocks = round_up(k, kRowUnit) / 32;
  const float* d_row = (const float*)(acts + blocks_offset(k));
  const int32_t* starts = (const int32_t*)(d_row + 2 * blocks);
  const size_t row = stride / 4;
  F total[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = f_zero();
  for (int g = 0; g < blocks; ++g) {
    I acc[R][C];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = i_bcast(starts + r * row + g);
#pragma GCC unroll 1
    for (int t = 0; t < 8; ++t) {
      fetch_weights<4 * P>(next);
      next += step;
      I b[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) b[c] = i_load(w + c * 4 * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        I a = i_bcast(x + r * stride);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = dot_add(acc[r][c], b[c], a);
      }
      w += 4 * P;
      x += 4;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) keep(acc[r][c]);
    }
    const uint16_t* s = scales + size_t(g * 32 / G) * P;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      F d = kHalfScale ? f_f16(s + c * L) : f_bf16(s + c * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        total[r][c] = f_fma(i_float(acc[r][c]), f_mul(d, f_bcast(d_row + r * row + g)), total[r][c]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) keep(total[r][c]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) f_store(out + r * P + c * L, total[r][c]);
}

template <int G, bool kHalfScale>
struct BytesDot : IntFormat<Bytes<G, kHalfScale>> {  // same sizes and scales, other order of bytes
  using Base = IntFormat<Bytes<G, kHalfScale>>;
  using Base::scales;
  static int fetches(int k) { return round_up(k, kRowUnit) / 4; }
  template <int R>
  static void tile(const void* panel, const char* acts, size_t stride, int k, float* out, const char* next,
                   size_t step) {
    byte_dot_tile<G, kHalfScale, R>((const uint8_t*)panel, scales(panel, k), acts, stride, k, out, next, step);
  }
  // From and to the order that the base packs: bytes move, 128 is added.
  static void reorder(int k, void* panel) {
    auto* bytes = (uint8_t*)panel;
    uint8_t four[4 * P];
    for (int base = 0; base < round_up(k, kRowUnit); base += 4) {
      uint8_t* at = bytes + size_t(base) * P;
      for (int i = 0; i < 4; ++i)
        for (int c = 0; c < P; ++c)
          four[ByteLayout::place(i, c)] = uint8_t(at[byte_index<G>(i, c)] ^ 128);
      memcpy(at, four, sizeof four);
    }
  }
  static void unpack(const void* panel, int c, int k, float* out) {
    auto* bytes = (const uint8_t*)panel;
    for (int i = 0; i < k; ++i) {
      const uint16_t scale = scales(panel, k)[size_t(i / G) * P + c];
      const int q = int(bytes[ByteLayout::place(i, c)]) - 128;
      out[i] = float(q) * (kHalfScale ? f16_to_float(scale) : bf16_to_float(scale));
    }
  }
};

struct Int8Dot : BytesDot<64, false> {
  static void pack(const float* const* rows, int k, void* panel) {
    Int8::pack(rows, k, panel);
    reorder(k, panel);
  }
};
struct Q8Dot : BytesDot<32, true> {
  static void pack_blocks(const uint8_t* const* rows, int k, void* panel) {
    Q8_0::pack_blocks(rows, k, panel);
    reorder(k, panel);
  }
};

constexpr Format kByteDotFormats[] = {
    int_format<Int8Dot, prepare_byte_row>(Type::int8, Int8Dot::pack, nullptr),
    int_format<Q8Dot, prepare_byte_row>(Type::q8_0, nullptr, Q8Dot::pack_blocks),
    int_format<Q4, prepare_byte_row>(Type::q4_0, nullptr, Q4::pack_blocks<false>),
    int_format<Q4, prepare_byte_row>(Type::q4_1, nullptr, Q4::pack_blocks<true>),
};

}  // namespace
