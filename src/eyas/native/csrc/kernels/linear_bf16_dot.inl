// Weights in bfloat16 by the dot products of AVX-512 BF16: activations are rounded to bfloat16, too.
namespace {

inline __m512bh as_bf16(I bits) {
  __m512bh pairs;
  __builtin_memcpy(&pairs, &bits, sizeof pairs);
  return pairs;
}

template <int R>
inline void bf16_dot_tile(const uint16_t* w, const char* x, size_t stride, int pairs, float* out, const char* next,
                          size_t step) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) acc[r][c] = f_zero();
  for (int k = 0; k < pairs; ++k) {
    fetch(next);
    fetch(next + 64);
    next += step;
    __m512bh b[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) b[c] = as_bf16(i_load(w + c * 2 * L));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      __m512bh a = as_bf16(i_bcast(x + r * stride));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], b[c], a);
    }
    w += 2 * P;
    x += 4;
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

struct BF16Dot : FloatFormat<BF16> {  // packed the same way
  static size_t row_bytes(int k) { return round_up(size_t(padded(k)) * 2, size_t(64)); }
  static void prepare(const float* x, int k, void* row) {
    auto* out = (uint16_t*)row;
    const int whole = k / L * L;
    for (int i = 0; i < whole; i += L) {
      // Nearest, ties to even; activations are finite.
      const I bits = i_bits(f_load(x + i));
      const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), i_set(1));
      const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, i_set(0x7fff)));
      _mm256_storeu_si256((__m256i*)(out + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
    for (int i = whole; i < k; ++i) out[i] = float_to_bf16(x[i]);
    memset(out + k, 0, row_bytes(k) - size_t(k) * 2);
  }
  template <int R>
  static void tile(const void* panel, const char* acts, size_t stride, int k, float* out, const char* next,
                   size_t step) {
    bf16_dot_tile<R>((const uint16_t*)panel, acts, stride, padded(k) / 2, out, next, step);
  }
};

}  // namespace
