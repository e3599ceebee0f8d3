// A decoder-only language model: embedding, layers, final norm, output head.
#pragma once

#include <mutex>

#include "decoder.h"
#include "sampling.h"

namespace eyas {

class Model {
 public:
  Model(const Kernels& kernels, std::shared_ptr<Pool> pool, Config config)
      : pool(std::move(pool)), decoder(kernels, *this->pool, std::move(config)) {}

  std::shared_ptr<Pool> pool;
  Arena arena;
  Decoder decoder;
  Linear embedding;  // empty: tied to lm_head
  Linear lm_head;
  Buffer<float> norm;
  std::vector<int> feature_layers;  // ascending; features are the inputs of these layers, `layers` being lm_head's

  const Config& config() const { return decoder.config; }
  int feature_size() const { return config().hidden * int(feature_layers.size()); }
  size_t weight_bytes() const { return embedding.bytes() + streamed_bytes(); }
  size_t streamed_bytes() const;   // weights that one pass reads
  double multiplications() const;  // by weights, per row with logits
  void embed(int64_t token, float* out) const { (embedding.empty() ? lm_head : embedding).unpack(int(token), out); }

  // One pass. Logits are computed for the rows `wanted` only ([wanted, vocab], may be null) together with each row's
  // first maximum; features [rows, feature_size]. Safe from several threads: they take turns.
  void forward(const Rows& rows, const int64_t* tokens, const std::vector<int>& wanted, float* logits, int64_t* argmax,
               float* features);
  // See sampling.h. Safe from several threads, too.
  Acceptance verify_sampled(const float* logits, const int64_t* tokens, const int64_t* parents, int nodes,
                            const std::map<int, Proposal>& proposals, float temperature, const Bits& random) {
    std::lock_guard<std::mutex> lock(mutex_);
    return eyas::verify_sampled(decoder.kernels, logits, config().vocab, tokens, parents, nodes, proposals, temperature,
                                random, sampling_room_);
  }

 private:
  SamplingRoom sampling_room_;
  std::mutex mutex_;
  struct Best {
    float value;
    int64_t index;
  };
  std::vector<std::vector<Best>> best_;  // [thread][wanted row]
};

}  // namespace eyas
