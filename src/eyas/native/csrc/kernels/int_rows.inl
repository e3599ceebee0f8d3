// Rows as integer weights meet them, and what integer formats share.
//
// A row is prepared twice. For 8-bit weights it is scaled to +-32767 and rounded, so that activations with a few huge
// dimensions keep their small ones: sums of 64 products of 16 by 8 bits stay below 2^28, exact in 32 bits. For 4-bit
// weights each 32 values have a scale of their own and are rounded to +-127: sums of 32 products stay below 2^16 / 2
// per pair of lanes, exact even in 16 bits. Nothing saturates anywhere. Each group of weights along k has one scale per
// column; group sums are added in float in the order of the groups.
namespace {

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

[[maybe_unused]] void prepare_int_row(const float* x, int k, void* row) {
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

// A panel of integers: all groups of W::G weights along k, then their scales, 16 bits each.
template <class W>
struct IntFormat {
  static int groups(int k) { return round_up(k, kRowUnit) / W::G; }
  static size_t scales_at(int k) { return size_t(groups(k)) * W::group_bytes; }
  static uint16_t* scales(void* panel, int k) { return (uint16_t*)((char*)panel + scales_at(k)); }
  static const uint16_t* scales(const void* panel, int k) { return scales((void*)panel, k); }
  static size_t panel_bytes(int k) {
    return round_up(scales_at(k) + size_t(groups(k)) * W::scale_count * 2, size_t(64));
  }
  static constexpr int kRows = W::kRows;
  static int fetches(int k) { return groups(k) * W::fetches; }
  template <int R>
  static void tile(const void* panel, const char* acts, size_t stride, int k, float* out, const char* next,
                   size_t step) {
    W::template tile<R>((const uint8_t*)panel, scales(panel, k), acts, stride, k, out, next, step);
  }
};

template <class T, void (*prepare)(const float*, int, void*) = prepare_int_row>
constexpr Format int_format(Type type, void (*pack)(const float* const*, int, void*),
                            void (*pack_blocks)(const uint8_t* const*, int, void*)) {
  return {
      .type = type,
      .panel_bytes = T::panel_bytes,
      .row_bytes = int_row_bytes,
      .prepare = prepare,
      .multiply = multiply<T>,
      .pack = pack,
      .pack_blocks = pack_blocks,
      .unpack = T::unpack,
  };
}

}  // namespace
