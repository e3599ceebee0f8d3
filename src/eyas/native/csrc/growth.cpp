#include "growth.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace eyas {
namespace {

// The first `count` of n indices, best first, ties to the smaller index.
template <class Better>
std::vector<int> best_of(int n, int count, Better better) {
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + std::min(n, count);
  std::partial_sort(order.begin(), end, order.end(), [&](int a, int b) {
    if (better(a, b)) return true;
    return !better(b, a) && a < b;
  });
  order.erase(end, order.end());
  return order;
}

std::vector<int> placed(std::vector<int> nodes, int first) {  // in increasing order, counted from `first`
  std::sort(nodes.begin(), nodes.end());
  for (int& node : nodes) node += first;
  return nodes;
}

}  // namespace

void Candidates::add_level(const std::vector<int>& expanded, int k, const int64_t* ids, const float* children_log_probs) {
  for (int node : expanded)
    for (int rank = 0; rank < k; ++rank) {
      tokens.push_back(*ids++);
      parents.push_back(node);
      ranks.push_back(rank);
      log_probs.push_back(*children_log_probs);
      log_values.push_back(log_values[size_t(node)] + *children_log_probs++);
    }
  levels.push_back(size());
}

// Operation by operation what LevelMap does: np.interp, then float32 arithmetic below the first knot.
double Calibration::Map::operator()(float log_value) const {
  const size_t last = promised.size() - 1;
  const double x = log_value;
  double mapped;
  if (x < promised[0]) {
    mapped = observed[0];
  } else if (!(x < promised[last])) {
    mapped = observed[last];
  } else {
    const size_t i = size_t(std::upper_bound(promised.begin(), promised.end(), x) - promised.begin()) - 1;
    const double slope = (observed[i + 1] - observed[i]) / (promised[i + 1] - promised[i]);
    mapped = x == promised[i] ? observed[i] : slope * (x - promised[i]) + observed[i];
  }
  return mapped + std::min(log_value - float(promised[0]), 0.0f);
}

void Calibration::extend(const Candidates& candidates, std::vector<double>& values) const {
  values.reserve(size_t(candidates.size()));
  for (int node = int(values.size()); node < candidates.size(); ++node) {
    const float log_value = candidates.log_values[size_t(node)];
    if (empty() || node == 0) {
      values.push_back(std::exp(double(log_value)));
      continue;
    }
    const auto above = std::upper_bound(candidates.levels.begin(), candidates.levels.end(), node);
    const size_t depth = size_t(above - candidates.levels.begin()) - 1;
    const double value = std::exp(levels_[std::min(depth, levels_.size()) - 1](log_value));
    values.push_back(std::min(value, values[size_t(candidates.parents[size_t(node)])]));
  }
}

std::vector<int> DynamicRule::expand(const Candidates& candidates, std::vector<double>& values) const {
  const int first = candidates.newest();
  const float* scores = (by_value_ ? candidates.log_values : candidates.log_probs).data() + first;
  const bool calibrated = by_value_ && !calibration.empty();
  if (calibrated) calibration.extend(candidates, values);
  const double* worth = calibrated ? values.data() + first : nullptr;
  return placed(best_of(candidates.size() - first, topk, [&](int a, int b) {
    if (calibrated && worth[a] != worth[b]) return worth[a] > worth[b];
    return scores[a] > scores[b];
  }), first);
}

std::vector<int> BudgetedRule::expand(const Candidates& candidates, std::vector<double>& values) const {
  if (candidates.depth() == 0) return is_.drafts ? std::vector<int>{0} : std::vector<int>{};
  calibration.extend(candidates, values);
  const int first = candidates.newest(), most = int(is_.closing.size()) - 1;
  std::vector<double> known(values.begin() + 1, values.end()), leaves;
  const auto end = known.begin() + std::min(int(known.size()), most);
  std::partial_sort(known.begin(), end, known.end(), std::greater<>());
  known.erase(end, known.end());
  std::vector<int> best = best_of(candidates.size() - first, topk, [&](int a, int b) {
    return values[size_t(first + a)] > values[size_t(first + b)];
  });
  for (int node : best) leaves.push_back(values[size_t(first + node)]);
  best.resize(size_t(width(std::move(known), leaves, candidates.depth(), spent(candidates))));
  return placed(std::move(best), first);
}

// Milliseconds of the levels drafted so far; only a cycle judged by its own rate needs them.
double BudgetedRule::spent(const Candidates& candidates) const {
  if (is_.rate) return 0.0;
  double below = 0.0;
  for (size_t level = 2; level + 1 < candidates.levels.size(); ++level)
    below += is_.level_ms[size_t(candidates.levels[level + 1] - candidates.levels[level]) / size_t(topk)];
  return is_.first_ms + below;
}

// Worth of the best number of nodes to verify, the first of some values.
double BudgetedRule::kept(const std::vector<double>& falling, double spent) const {
  auto worth = [&](double tokens, double ms) { return is_.rate ? tokens - *is_.rate * ms : tokens / ms; };
  const size_t most = std::min(falling.size(), is_.closing.size() - 1);
  double tokens = 1.0, best = worth(tokens, spent + is_.closing[0]);
  for (size_t i = 0; i < most; ++i) {
    tokens += falling[i];
    best = std::max(best, worth(tokens, spent + is_.closing[i + 1]));
  }
  return best;
}

// How many of the newest level's best nodes to expand: 0 where no number beats stopping here.
int BudgetedRule::width(std::vector<double> known, const std::vector<double>& leaves, int depth, double spent) const {
  const auto& shares = is_.acceptance[std::min(size_t(depth), is_.acceptance.size() - 1)];
  const size_t ranks = std::min(shares.size(), size_t(topk));
  known.erase(std::remove_if(known.begin(), known.end(), [&](double value) { return !(value > is_.floor); }), known.end());
  double best = kept(known, spent);
  int chosen = 0;
  for (int width = 1; width <= int(leaves.size()); ++width) {
    bool promising = false;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const double value = leaves[size_t(width - 1)] * shares[rank];
      if (!(value > is_.floor)) continue;
      promising = true;
      known.insert(std::upper_bound(known.begin(), known.end(), value, std::greater<>()), value);
    }
    if (!promising) break;  // nor are the leaves that are worth less
    const double worth = kept(known, spent + is_.level_ms[size_t(width)]);
    if (worth > best) {
      best = worth;
      chosen = width;
    }
  }
  return chosen;
}

}  // namespace eyas
