// Weights in float32 and bfloat16, multiplied by rows of floats.
namespace {

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
    fetch_weights<W::pair_elements * sizeof(typename W::Element)>(next);
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

template <class W>
struct FloatFormat {
  static int padded(int k) { return round_up(k, 2); }
  static size_t panel_bytes(int k) { return size_t(padded(k)) * P * sizeof(typename W::Element); }
  static size_t row_bytes(int k) { return round_up(size_t(padded(k)) * 4, size_t(64)); }
  static void prepare(const float* x, int k, void* row) {
    memcpy(row, x, size_t(k) * 4);
    memset((char*)row + size_t(k) * 4, 0, row_bytes(k) - size_t(k) * 4);
  }
  static constexpr int kRows = W::kRows;
  static int fetches(int k) { return padded(k) / 2; }
  template <int R>
  static void tile(const void* panel, const char* acts, size_t stride, int k, float* out, const char* next,
                   size_t step) {
    float_tile<W, R>((const typename W::Element*)panel, (const float*)acts, stride / 4, padded(k) / 2, out, next, step);
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

template <class T, auto product = multiply<T>>
constexpr Format float_format(Type type) {
  return {
      .type = type,
      .panel_bytes = T::panel_bytes,
      .row_bytes = T::row_bytes,
      .prepare = T::prepare,
      .multiply = product,
      .pack = T::pack,
      .pack_blocks = nullptr,
      .unpack = T::unpack,
  };
}

}  // namespace
