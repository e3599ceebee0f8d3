// AMX: sixteen rows of bfloat16 for the price of one. Integer weights stay with avx512_dot's instructions, which keep up
// with memory just as well; sums over blocks of 32, each with a scale, would leave tiles half empty.
#define EYAS_VNNI
#define EYAS_BF16_DOT
#include "vec_avx512.h"
// The vocabulary comes first.
#include "kernels.inl"
#include "kernels/linear_bf16_dot.inl"
#include "kernels/linear_byte_dot.inl"

namespace {

constexpr int kTileRows = 16, kTileBytes = 64;  // of a full tile: rows, bytes per row
constexpr size_t kStep = size_t(kTileRows) * 4 * P;  // of a panel: the bytes of two full tiles side by side

// How the processor is to see its eight tiles.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int first, int last, int count, int bytes) {
    for (int t = first; t <= last; ++t) {
      rows[t] = uint8_t(count);
      row_bytes[t] = uint16_t(count ? bytes : 0);
    }
  }
};

// The compiler does not know that tiles read and write memory.
inline void settle() { asm volatile("" ::: "memory"); }

// What is fetched while tiles are multiplied, step by step. A panel is larger than the first-level cache: the next one
// comes into the second level, its own lines, a little before they are read, into the first.
class Ahead {
 public:
  // `next` may be null. Steps: those of all blocks of rows, and those of the first.
  Ahead(const void* panel, const void* next, size_t bytes, int steps, int first_steps)
      : own_((const char*)panel + kNear), next_((const char*)next), own_step_(lines(bytes, first_steps)),
        next_step_(next ? lines(bytes, steps) : 0) {}
  void advance() {
    for (size_t i = 0; i < own_step_; i += 64) fetch(own_ + i);
    for (size_t i = 0; i < next_step_; i += 64) fetch_far(next_ + i);
    own_ += own_step_;
    next_ += next_step_;
  }
  // Behind the first block of rows the panel is near.
  void panel_is_near() { own_step_ = 0; }

 private:
  static constexpr size_t kNear = 2048;
  static size_t lines(size_t bytes, int steps) { return round_up((bytes + steps - 1) / steps, size_t(64)); }
  const char *own_, *next_;
  size_t own_step_, next_step_;
};

// Up to 32 rows. Tiles: 0 and 1 sums, 2 the rows; of rows from 16 on, 3 and 4 sums, 5 the rows; 6 and 7 weights.
void bf16_rows(const char* w, const char* x, size_t stride, int rows, int k, float* out, Ahead& ahead) {
  const int low = rows < kTileRows ? rows : kTileRows, high = rows - low;
  Shapes shapes;
  shapes.set(0, 2, low, kTileBytes);
  shapes.set(3, 5, high, kTileBytes);
  shapes.set(6, 7, kTileRows, kTileBytes);
  settle();
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  if (high) {
    _tile_zero(3);
    _tile_zero(4);
  }
  auto step = [&](const char* weights) __attribute__((always_inline)) {
    ahead.advance();
    _tile_loadd(6, weights, 4 * P);
    _tile_loadd(7, weights + kTileBytes, 4 * P);
    _tile_loadd(2, x, stride);
    _tile_dpbf16ps(0, 2, 6);
    _tile_dpbf16ps(1, 2, 7);
    if (high) {
      _tile_loadd(5, x + kTileRows * stride, stride);
      _tile_dpbf16ps(3, 5, 6);
      _tile_dpbf16ps(4, 5, 7);
    }
    x += kTileBytes;
  };
  const int pairs = (k + 1) / 2, whole = pairs / kTileRows;
  for (int t = 0; t < whole; ++t, w += kStep) step(w);
  if (const int left = pairs % kTileRows) {  // rows are zero beyond k, and so are these weights
    alignas(64) char padded[kStep] = {};
    memcpy(padded, w, size_t(left) * 4 * P);
    settle();
    step(padded);
  }
  _tile_stored(0, out, 4 * P);
  _tile_stored(1, out + L, 4 * P);
  if (high) {
    _tile_stored(3, out + kTileRows * P, 4 * P);
    _tile_stored(4, out + kTileRows * P + L, 4 * P);
  }
  settle();
}

void multiply_bf16(const void* panel, const void* acts, size_t stride, int rows, int k, float* out, const void* next) {
  constexpr int most = 2 * kTileRows;
  const int blocks = (rows + most - 1) / most, steps = (k + 31) / 32;
  Ahead ahead(panel, next, BF16Dot::panel_bytes(k), blocks * steps, steps);
  for (int first = 0; first < rows; first += most) {
    bf16_rows((const char*)panel, (const char*)acts + first * stride, stride, rows - first < most ? rows - first : most, k,
              out + size_t(first) * P, ahead);
    ahead.panel_is_near();
  }
  _tile_release();
}

constexpr Format kFloatFormats[] = {
    float_format<FloatFormat<F32>>(Type::f32),
    float_format<BF16Dot, multiply_bf16>(Type::bf16),
};
const Format* format_of(Type type) { return find(kFloatFormats, kByteDotFormats, type); }

double burn_tiles(int64_t steps) {
  Shapes shapes;
  shapes.set(0, 7, kTileRows, kTileBytes);
  settle();
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
  return double(steps) * 4 * kTileRows * L * 2 * kTileRows * 2;
}

}  // namespace

const Kernels eyas::kAmxKernels = kernel_set("amx", format_of, burn_tiles);
