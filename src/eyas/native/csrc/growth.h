// How a draft tree grows, without asking Python level by level: the rules of eyas/policies/dynamic.py and budgeted.py.
// The policies there are the reference: a rule picks the very nodes that `expand` of its policy picks.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace eyas {

// Every node generated so far, level by level, the root first; see Candidates in eyas/policies/base.py.
struct Candidates {
  std::vector<int64_t> tokens, parents{-1}, ranks{0};
  std::vector<float> log_probs{0}, log_values{0};
  std::vector<int64_t> levels{0, 1};

  explicit Candidates(int64_t root) : tokens{root} {}
  int size() const { return int(tokens.size()); }
  int depth() const { return int(levels.size()) - 2; }
  int newest() const { return int(levels[levels.size() - 2]); }  // the first node of the deepest level
  // A level deeper: k children of each of the nodes `expanded`, in that order.
  void add_level(const std::vector<int>& expanded, int k, const int64_t* ids, const float* children_log_probs);
};

// From log path values to probabilities of acceptance; see eyas/calibration.py.
class Calibration {
 public:
  struct Map {
    std::vector<double> promised, observed;
    double operator()(float log_value) const;
  };
  explicit Calibration(std::vector<Map> levels) : levels_(std::move(levels)) {}

  bool empty() const { return levels_.empty(); }
  // Appends the values of the candidates that have none yet: whole levels.
  void extend(const Candidates& candidates, std::vector<double>& values) const;

 private:
  std::vector<Map> levels_;
};

class Rule {
 public:
  Rule(int topk, Calibration calibration) : topk(topk), calibration(std::move(calibration)) {}
  virtual ~Rule() = default;
  // The nodes of the newest level to expand, increasing; none ends the growth. `values`: the calibrated ones of a prefix
  // of the candidates; a rule that needs the others appends them.
  virtual std::vector<int> expand(const Candidates& candidates, std::vector<double>& values) const = 0;

  const int topk;
  const Calibration calibration;
};

class DynamicRule : public Rule {
 public:
  DynamicRule(int topk, bool by_value, Calibration calibration) : Rule(topk, std::move(calibration)), by_value_(by_value) {}
  std::vector<int> expand(const Candidates& candidates, std::vector<double>& values) const override;

 private:
  bool by_value_;
};

// What a BudgetedPolicy knows of prices and prospects, as its attributes of the same names say.
struct Prospects {
  std::vector<std::vector<double>> acceptance;  // by depth and rank
  std::vector<double> closing;                  // [num_draft_tokens + 1]
  std::vector<double> level_ms;                 // [topk + 1], by nodes expanded
  double first_ms, floor;
  std::optional<double> rate;
  bool drafts;
};

class BudgetedRule : public Rule {
 public:
  BudgetedRule(int topk, Prospects prospects, Calibration calibration)
      : Rule(topk, std::move(calibration)), is_(std::move(prospects)) {}
  std::vector<int> expand(const Candidates& candidates, std::vector<double>& values) const override;

 private:
  Prospects is_;
  double spent(const Candidates& candidates) const;
  double kept(const std::vector<double>& falling, double spent) const;
  int width(std::vector<double> known, const std::vector<double>& leaves, int depth, double spent) const;
};

}  // namespace eyas
