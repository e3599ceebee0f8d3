#include "model.h"

#include <limits>

namespace eyas {

size_t Model::streamed_bytes() const {
  size_t bytes = lm_head.bytes();
  for (const Layer& layer : decoder.layers)
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

double Model::multiplications() const {
  auto of = [](const Linear& w) { return double(w.outputs()) * w.k(); };
  double sum = of(lm_head);
  for (const Layer& layer : decoder.layers) sum += of(layer.qkv) + of(layer.o) + of(layer.gate_up) + of(layer.down);
  return sum;
}

void Model::forward(const Rows& rows, const int64_t* tokens, const std::vector<int>& wanted, float* logits,
                    int64_t* argmax, float* features) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int m = rows.count(), threads = pool->threads(), h = config().hidden, asked = int(wanted.size());
  const int vocab = config().vocab, cols = decoder.kernels.panel_cols;
  const size_t ld = decoder.x_stride(), feature_ld = size_t(feature_size());
  decoder.begin(rows, {&lm_head});
  best_.assign(threads, std::vector<Best>(asked, {-std::numeric_limits<float>::infinity(), 0}));
  float* x = decoder.work.x.get();

  auto job = [&](int thread) {
    const auto [begin, end] = share(m, thread, threads);
    auto norm_row = [&](int r, float* out) {
      decoder.kernels.rms_norm(x + r * ld, norm.get(), config().eps, h, out);
      return out;
    };
    for (int r = begin; r < end; ++r) embed(tokens[r], x + r * ld);
    pool->barrier();
    for (int l = 0; l < config().layers; ++l) {
      for (int level = 0; features && level < int(feature_layers.size()); ++level)
        if (feature_layers[level] == l)
          for (int r = begin; r < end; ++r) std::copy_n(x + r * ld, h, features + r * feature_ld + size_t(level) * h);
      decoder.run_layer(l, rows, thread, lm_head);
    }
    // The input of lm_head, if it is a feature, stands last.
    if (features && feature_layers.back() == config().layers)
      for (int r = begin; r < end; ++r) norm_row(r, features + (r + 1) * feature_ld - h);
    if (asked == 0) return;
    Acts acts = decoder.prepare(lm_head, asked, thread, [&](int i, float* room) { return norm_row(wanted[i], room); });
    auto& best = best_[thread];
    multiply<1>(lm_head, acts, asked, thread, threads, decoder.work.out[thread].get(), nullptr,
                [&](int panel, int first, int count, const float* block) {
                  const int c0 = panel * cols, width = std::min(cols, vocab - c0);
                  for (int r = 0; r < count; ++r) {
                    const float* row = block + r * cols;
                    if (logits) std::copy_n(row, width, logits + size_t(first + r) * vocab + c0);
                    Best& top = best[first + r];
                    float most = row[0];
                    for (int c = 1; c < width; ++c) most = row[c] > most ? row[c] : most;
                    if (!(most > top.value)) continue;
                    int c = 0;
                    while (row[c] != most) ++c;
                    top = {most, c0 + c};
                  }
                });
  };
  pool->run(job);
  for (int i = 0; i < asked; ++i) {
    Best top = best_[0][i];
    for (int t = 1; t < threads; ++t)
      if (best_[t][i].value > top.value) top = best_[t][i];
    argmax[i] = top.index;
  }
}

}  // namespace eyas
