#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace eyas {
namespace {

constexpr int kBlock = 256;  // weights that are summed before one of them is looked for

// In eight sums side by side, which is one fixed order, and quicker than one after the other.
template <class T>
double sum(const T* values, size_t n) {
  double lanes[8] = {};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t j = 0; j < 8; ++j) lanes[j] += double(values[i + j]);
  for (; i < n; ++i) lanes[0] += double(values[i]);
  return std::accumulate(lanes, lanes + 8, 0.0);
}

// As the class of that name in eyas/verify.py.
template <class T>
class Mass {
 public:
  explicit Mass(std::vector<T>& weights) : weights_(weights), sums_((weights.size() + kBlock - 1) / kBlock) {
    for (size_t block = 0; block < sums_.size(); ++block) add_up(block);
  }
  double total() const { return std::accumulate(sums_.begin(), sums_.end(), 0.0); }
  void take_out(size_t token) {
    weights_[token] = 0;
    add_up(token / kBlock);
  }
  int64_t sample(double draw) const {
    const double mark = draw * total();
    double before = 0;
    size_t block = 0;
    while (block < sums_.size() && before + sums_[block] <= mark) before += sums_[block++];
    size_t end = weights_.size();
    if (block < sums_.size()) {
      end = std::min(end, (block + 1) * kBlock);
      for (size_t i = block * kBlock; i < end; ++i) {
        before += double(weights_[i]);
        if (before > mark) return int64_t(i);
      }
    }
    // A draw so near the end that rounding leads past it belongs to the last one that has any mass.
    while (end > 1 && !(weights_[end - 1] > 0)) --end;
    return int64_t(end - 1);
  }

 private:
  std::vector<T>& weights_;
  std::vector<double> sums_;
  void add_up(size_t block) {
    const size_t start = block * kBlock;
    sums_[block] = sum(&weights_[start], std::min<size_t>(kBlock, weights_.size() - start));
  }
};

using Children = std::vector<std::pair<int64_t, int>>;  // (token, the first such child), in node order

// The child accepted, or -1: those that were chosen, each a point-mass proposal.
int try_chosen(const Children& children, const std::vector<float>& weights, Mass<float>& mass, const Bits& random) {
  for (const auto& [token, child] : children) {
    if (random() * mass.total() < double(weights[size_t(token)])) return child;
    mass.take_out(size_t(token));
  }
  return -1;
}

// The same of those that were drawn. Where all are rejected, `room.left` becomes the weights of the next token;
// `room.weights` is used up.
int try_drawn(const Children& children, const Proposal& proposal, const Bits& random, SamplingRoom& room) {
  const size_t count = size_t(proposal.count);
  auto token_of = [&](size_t place) { return size_t(proposal.token_ids ? proposal.token_ids[place] : int64_t(place)); };
  const size_t vocab = room.weights.size();
  room.q.assign(proposal.weights, proposal.weights + count);
  room.p.resize(count);
  room.left.resize(vocab);
  // Plain pointers: of vectors behind references the compiler believes that they may move.
  float* const weights = room.weights.data();
  double* const q = room.q.data();
  double* const p = room.p.data();
  double* const left = room.left.data();
  for (size_t i = 0; i < count; ++i) {
    const size_t token = token_of(i);
    p[i] = double(weights[token]);
    weights[token] = 0;
  }
  double outside = sum(weights, vocab), scale = 1;
  double p_sum = sum(p, count), q_sum = sum(q, count);
  for (size_t d = 0; d < proposal.tokens.size(); ++d) {
    const size_t place = size_t(proposal.places[d]);
    const auto child = std::find_if(children.begin(), children.end(), [&](const auto& c) { return c.first == proposal.tokens[d]; });
    if (child == children.end()) {
      q[place] = 0;
      q_sum = sum(q, count);
      continue;
    }
    int exponent;
    std::frexp(q_sum, &exponent);
    const double shrink = std::ldexp(1.0, -exponent), mass = p_sum + outside;  // by powers of two nothing is rounded
    if (random() * (mass * (q[place] * shrink)) < p[place] * (q_sum * shrink)) return child->second;
    // What p has more than q; of the token itself nothing, or it would have been taken.
    p[place] = q[place] = 0;
    const double by = q_sum * shrink, less = mass * shrink;
    for (size_t i = 0; i < count; ++i) {
      const double rest = p[i] * by - less * q[i];
      p[i] = rest > 0 ? rest : 0;
    }
    p_sum = sum(p, count);
    q_sum = sum(q, count);
    outside *= by;
    scale *= by;
    if (!(p_sum + outside > 0)) return child->second;  // p is q but for rounding
  }
  for (size_t i = 0; i < vocab; ++i) left[i] = double(weights[i]) * scale;
  for (size_t i = 0; i < count; ++i) left[token_of(i)] = p[i];
  return -1;
}

}  // namespace

Acceptance verify_sampled(const Kernels& kernels, const float* logits, int vocab, const int64_t* tokens,
                          const int64_t* parents, int nodes, const std::map<int, Proposal>& proposals, float temperature,
                          const Bits& random, SamplingRoom& room) {
  std::vector<int> path{0};
  room.weights.resize(size_t(vocab));
  for (;;) {
    const int node = path.back();
    kernels.exponentials(logits + size_t(node) * size_t(vocab), 1 / temperature, vocab, room.weights.data());
    float* const weights = room.weights.data();
    for (int i = 0; i < vocab; ++i) weights[i] = weights[i] > 2e-38f ? weights[i] : 0.0f;  // the kernel's word for nothing
    Children children;
    for (int child = node + 1; child < nodes; ++child)
      if (parents[child] == node &&
          std::none_of(children.begin(), children.end(), [&](const auto& c) { return c.first == tokens[child]; }))
        children.emplace_back(tokens[child], child);
    int accepted;
    int64_t token = -1;
    if (const auto proposal = proposals.find(node); proposal != proposals.end()) {
      accepted = try_drawn(children, proposal->second, random, room);
      if (accepted < 0) token = Mass<double>(room.left).sample(random());
    } else {
      Mass<float> mass(room.weights);
      accepted = try_chosen(children, room.weights, mass, random);
      if (accepted < 0) token = mass.sample(random());
    }
    if (accepted < 0) return {path, token, !children.empty()};
    path.push_back(accepted);
  }
}

}  // namespace eyas
