// Sampled verification: what eyas/verify.py does, where nothing but a temperature stands between logits and distribution.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kernels.h"

namespace eyas {

// A stream of random numbers in [0, 1).
struct Bits {
  double (*next)(void* state);
  void* state;
  double operator()() const { return next(state); }
};

// What the children of one node were drawn from, one after the other, none twice.
struct Proposal {
  const float* weights;      // [count]
  const int64_t* token_ids;  // [count], null: all ids, in order
  int count;
  std::vector<int64_t> tokens, places;  // drawn, whether in the tree or not; their indices into weights
};

struct Acceptance {
  std::vector<int> path;
  int64_t next_token;
  bool recovered;
};

// Memory that is used again, for a vocabulary's weights are larger than what malloc keeps at hand.
struct SamplingRoom {
  std::vector<float> weights;
  std::vector<double> q, p, left;
};

// logits [nodes, vocab]; tokens and parents [nodes], parents before children; nodes without a proposal have children
// that were chosen.
Acceptance verify_sampled(const Kernels& kernels, const float* logits, int vocab, const int64_t* tokens,
                          const int64_t* parents, int nodes, const std::map<int, Proposal>& proposals, float temperature,
                          const Bits& random, SamplingRoom& room);

}  // namespace eyas
