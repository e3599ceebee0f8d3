// A packed weight matrix and its product with a block of rows.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace eyas {

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Weights as they come: [rows, cols] row-major floats or bf16, or rows of GGUF blocks.
struct Source {
  enum Kind { f32, bf16, blocks } kind;
  Type type;  // of the blocks
  const void* data;
  int rows, cols;
  size_t row_bytes() const;
  void read_row(int row, float* out) const;
};

struct Panel {
  const Format* format;
  const char* data;
};

// Several sources with the same K one after the other, each padded to whole panels. Interleaved (two sources of equal
// height): a panel of the first, the same panel of the second, and so on. GGUF blocks are packed as they are with
// `keep_blocks`, else they become `type` like everything.
class Linear {
 public:
  // Of one matrix on its own.
  static size_t packed_bytes(const Kernels& kernels, Type type, int rows, int cols) {
    return panel_bytes(*kernels.format(type), cols) * size_t(round_up(rows, kernels.panel_cols) / kernels.panel_cols);
  }

  Linear() = default;
  Linear(const Kernels& kernels, Pool& pool, Arena& arena, const std::vector<Source>& sources, Type type,
         bool keep_blocks, bool interleave = false);

  int k() const { return k_; }
  int panel_cols() const { return cols_; }
  const std::vector<Panel>& panels() const { return panels_; }
  int outputs() const { return int(panels_.size()) * cols_; }  // padding included
  bool empty() const { return panels_.empty(); }
  size_t bytes() const { return bytes_; }
  const Format& format() const { return *panels_.front().format; }
  size_t row_bytes() const { return format().row_bytes(k_); }
  // One output's weights as floats: a row of the source.
  void unpack(int output, float* out) const { panels_[output / cols_].format->unpack(panels_[output / cols_].data, output % cols_, k_, out); }

 private:
  static size_t panel_bytes(const Format& format, int k) { return (format.panel_bytes(k) + 63) / 64 * 64; }

  int k_ = 0, cols_ = 0;
  std::vector<Panel> panels_;
  size_t bytes_ = 0;
};

// Rows ready to be multiplied.
struct Acts {
  const char* data;
  size_t stride;  // bytes
};

// A thread's part of n things that are shared out in order.
struct Share {
  int begin, end;
};
inline Share share(int n, int thread, int threads) {
  return {int(int64_t(n) * thread / threads), int(int64_t(n) * (thread + 1) / threads)};
}
inline Share share(Share whole, int part, int parts) {
  const Share within = share(whole.end - whole.begin, part, parts);
  return {whole.begin + within.begin, whole.begin + within.end};
}

// Where a thread's share of a matrix begins; null if it has none.
inline const char* first_panel(const Linear& w, int unit, int thread, int threads) {
  const auto [begin, end] = share(int(w.panels().size()) / unit, thread, threads);
  return begin < end ? w.panels()[size_t(begin) * unit].data : nullptr;
}

// This thread's share of a product: calls done(panel, first_row, rows, out) for each of its panels, `out` being
// [rows, panel_cols]. With `unit` 2, panels come in pairs: out is [2][rows, panel_cols] and panel is even. `after` (may
// be null) is what this thread reads next: the last panel's product fetches it.
template <int unit, class Done>
void multiply(const Linear& w, Acts acts, int rows, int thread, int threads, float* out, const char* after, Done&& done) {
  const auto& panels = w.panels();
  auto [begin, end] = share(int(panels.size()) / unit, thread, threads);
  begin *= unit;
  end *= unit;
  if (begin == end) return;
  // Rows in blocks that stay in the second-level cache next to a panel.
  const int fit = std::max<int>(12, int((size_t(192) << 10) / acts.stride) / 12 * 12);
  const int blocks = (rows + fit - 1) / fit;
  for (int b = 0; b < blocks; ++b) {
    const int first = int(int64_t(rows) * b / blocks), count = int(int64_t(rows) * (b + 1) / blocks) - first;
    for (int p = begin; p < end; p += unit) {
      for (int u = 0; u < unit; ++u) {
        const Panel& panel = panels[p + u];
        const char* next = p + u + 1 < end ? panels[p + u + 1].data : b + 1 < blocks ? panels[begin].data : after;
        panel.format->multiply(panel.data, acts.data + first * acts.stride, acts.stride, count, w.k(),
                               out + size_t(u) * count * w.panel_cols(), next);
      }
      done(p, first, count, out);
    }
  }
}
inline size_t multiply_scratch(int rows, int cols) { return size_t(2) * rows * cols; }

}  // namespace eyas
