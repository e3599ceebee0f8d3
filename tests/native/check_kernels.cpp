// Compares every kernel set of a build with the portable one, without Python: products of all weight types for 1 to 13
// rows, norms, activations, attention. Also that a row's bits do not depend on the rows beside it, nor those of attention
// on whether it reads floats or the same numbers as bf16. .ci/aarch64 runs it.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

using namespace eyas;

namespace {

std::mt19937 random_bits(1);
int failures = 0;

std::vector<float> normal(size_t n) {
  std::normal_distribution<float> draw;
  std::vector<float> values(n);
  for (float& value : values) value = draw(random_bits);
  return values;
}

double error(const std::vector<float>& got, const std::vector<float>& wanted) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    apart += std::pow(double(got[i]) - wanted[i], 2);
    size += std::pow(double(wanted[i]), 2);
  }
  return std::sqrt(apart / size);
}

void expect(bool good, const std::string& what, double value = 0) {
  if (good) return;
  ++failures;
  std::printf("FAILED %s (%g)\n", what.c_str(), value);
}

// Weights [n, k], as floats or GGUF blocks.
struct Matrix {
  int n, k;
  std::vector<float> values;
  std::vector<uint8_t> blocks;
  size_t row_bytes = 0;
};

Matrix make_matrix(Type type, int n, int k) {
  Matrix m{n, k, normal(size_t(n) * k), {}};
  const size_t block = type == Type::q8_0 ? 34 : type == Type::q4_1 ? 20 : type == Type::q4_0 ? 18 : 0;
  if (!block) return m;
  m.row_bytes = size_t(k) / 32 * block;
  m.blocks.resize(n * m.row_bytes);
  for (uint8_t& byte : m.blocks) byte = uint8_t(random_bits());
  for (size_t at = 0; at < m.blocks.size(); at += block) {  // half-precision scales of about 0.01
    m.blocks[at + 1] = uint8_t(0x20 | (random_bits() & 0x83));
    if (type == Type::q4_1) m.blocks[at + 3] = uint8_t(0x2c | (random_bits() & 0x83));
  }
  return m;
}

// rows [m, k] by the matrix, transposed: [m, n].
std::vector<float> product(const Kernels& kernels, Type type, const Matrix& w, const std::vector<float>& x, int m) {
  const Format& format = *kernels.format(type);
  const int cols = kernels.panel_cols;
  const size_t stride = format.row_bytes(w.k);
  Buffer<char> acts(stride * m + 64), panel(format.panel_bytes(w.k));
  for (int r = 0; r < m; ++r) format.prepare(&x[size_t(r) * w.k], w.k, acts.get() + r * stride);
  std::vector<float> out(size_t(m) * w.n), block(size_t(m) * cols);
  for (int first = 0; first < w.n; first += cols) {
    std::vector<const float*> rows(cols);
    std::vector<const uint8_t*> blocks(cols);
    for (int c = 0; c < cols && first + c < w.n; ++c) {
      rows[c] = &w.values[size_t(first + c) * w.k];
      if (w.row_bytes) blocks[c] = &w.blocks[(first + c) * w.row_bytes];
    }
    if (w.row_bytes)
      format.pack_blocks(blocks.data(), w.k, panel.get());
    else
      format.pack(rows.data(), w.k, panel.get());
    format.multiply(panel.get(), acts.get(), stride, m, w.k, block.data(), nullptr);
    for (int r = 0; r < m; ++r)
      for (int c = 0; c < cols && first + c < w.n; ++c) out[size_t(r) * w.n + first + c] = block[r * cols + c];
  }
  return out;
}

void check_products(const Kernels& kernels, const Kernels& portable) {
  const struct { Type type; const char* name; bool blocks; } types[] = {
      {Type::f32, "float32", false}, {Type::bf16, "bfloat16", false}, {Type::int8, "int8", false},
      {Type::q8_0, "Q8_0", true},    {Type::q4_0, "Q4_0", true},      {Type::q4_1, "Q4_1", true}};
  for (const auto& type : types)
    for (int k : type.blocks ? std::vector<int>{32, 96, 192} : std::vector<int>{1, 45, 96, 200}) {
      const int most = 13, n = 70;
      const Matrix w = make_matrix(type.type, n, k);
      const std::vector<float> x = normal(size_t(most) * k);
      const std::vector<float> wanted = product(portable, type.type, w, x, most);
      for (int m = 1; m <= most; ++m) {
        const std::string what = std::string(kernels.name) + " " + type.name + " K " + std::to_string(k) + " M " + std::to_string(m);
        const std::vector<float> got = product(kernels, type.type, w, x, m);
        const double off = error(got, {wanted.begin(), wanted.begin() + size_t(m) * n});
        // Sets with dot products round activations.
        const std::string name = kernels.name;
        const bool dots = name == "avx512_dot" || name == "amx", bytes = name == "avx512_vnni" && type.type != Type::bf16;
        const bool rounds = (dots || bytes) && type.type != Type::f32;
        expect(off < (rounds ? 2e-2 : 2e-6), what, off);
        const std::vector<float> all = product(kernels, type.type, w, x, most);
        expect(!std::memcmp(got.data(), all.data(), got.size() * 4), what + ": bits depend on the rows beside it");
      }
    }
}

void check_rows(const Kernels& kernels, const Kernels& portable) {
  for (int n : {1, 15, 64, 77}) {
    const std::vector<float> x = normal(n), w = normal(n);
    std::vector<float> got(n), wanted(n);
    const std::string what = std::string(kernels.name) + " n " + std::to_string(n);
    kernels.rms_norm(x.data(), w.data(), 1e-5f, n, got.data());
    portable.rms_norm(x.data(), w.data(), 1e-5f, n, wanted.data());
    expect(error(got, wanted) < 1e-6, what + " rms_norm", error(got, wanted));
    kernels.swiglu(x.data(), w.data(), n, got.data());
    portable.swiglu(x.data(), w.data(), n, wanted.data());
    expect(error(got, wanted) < 1e-6, what + " swiglu", error(got, wanted));
    got = wanted = w;
    kernels.add(x.data(), n, got.data());
    portable.add(x.data(), n, wanted.data());
    expect(error(got, wanted) == 0, what + " add", error(got, wanted));
    const int half = n / 2;
    kernels.rotate(got.data(), x.data(), x.data() + half, half);
    portable.rotate(wanted.data(), x.data(), x.data() + half, half);
    expect(error(got, wanted) < 1e-6, what + " rotate", error(got, wanted));
    kernels.exponentials(x.data(), 0.7f, n, got.data());
    portable.exponentials(x.data(), 0.7f, n, wanted.data());
    expect(error(got, wanted) < 1e-6, what + " exponentials", error(got, wanted));
    const float a = kernels.log_sum_exp(x.data(), n), b = portable.log_sum_exp(x.data(), n);
    expect(std::fabs(a - b) < 1e-5f, what + " log_sum_exp", a - b);
  }
}

// Rows that see 70 committed keys and branches of a tree. E: float or uint16_t, which is bf16.
template <class E>
std::vector<float> attend(const Kernels& kernels, const std::vector<E>& page_values, const std::vector<float>& queries,
                          int head_dim, int group) {
  const int v_stride = (head_dim + 15) / 16 * 16, rows = 3, slots = 75;
  const size_t page = size_t(kPageTokens) * (head_dim + v_stride);
  const void* pages[] = {page_values.data(), page_values.data() + page};
  const int prefix[] = {71, 70, 70}, begin[] = {0, 0, 1, 3}, extra[] = {72, 70, 74};
  const float* q[rows];
  float* o[rows];
  std::vector<float> out(size_t(rows) * group * head_dim);
  Buffer<float> scratch(size_t(rows) * group * attend_stride(slots, v_stride));
  for (int r = 0; r < rows; ++r) {
    q[r] = &queries[size_t(r) * group * head_dim];
    o[r] = &out[size_t(r) * group * head_dim];
  }
  kernels.attend({pages, sizeof(E) == 2 ? Type::bf16 : Type::f32, 0, size_t(kPageTokens) * head_dim, head_dim, v_stride,
                  rows, group, q, o, prefix, begin, extra, slots, scratch.get()});
  return out;
}

void check_attention(const Kernels& kernels, const Kernels& portable) {
  for (int head_dim : {8, 20, 64})
    for (int group : {1, 3, 4}) {
      std::vector<float> pages = normal(size_t(2) * kPageTokens * (head_dim + (head_dim + 15) / 16 * 16) + 4096);
      std::vector<uint16_t> halves(pages.size());
      for (size_t i = 0; i < pages.size(); ++i) {  // numbers that bf16 holds
        uint32_t bits;
        std::memcpy(&bits, &pages[i], 4);
        halves[i] = uint16_t(bits >> 16);
        bits &= 0xffff0000u;
        std::memcpy(&pages[i], &bits, 4);
      }
      const std::vector<float> queries = normal(size_t(3) * group * head_dim);
      const std::vector<float> got = attend(kernels, pages, queries, head_dim, group);
      const double off = error(got, attend(portable, pages, queries, head_dim, group));
      const std::string what = std::string(kernels.name) + " attention, head size " + std::to_string(head_dim);
      expect(off < 1e-5, what, off);
      expect(got == attend(kernels, halves, queries, head_dim, group), what + ": bits depend on how keys and values are stored");
    }
}

}  // namespace

int main() {
  const Kernels& portable = *select_kernels("portable");
  const char* names[8];
  const int n = list_kernels(names, 8);
  for (int i = 0; i < n; ++i) {
    const Kernels& kernels = *select_kernels(names[i]);
    check_products(kernels, portable);
    check_rows(kernels, portable);
    check_attention(kernels, portable);
    std::printf("%s: checked against portable\n", names[i]);
  }
  return failures ? 1 : 0;
}
