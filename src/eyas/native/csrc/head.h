// Draft heads. EAGLE-1/2: fc over (embedding, feature), decoder layers of which the first has no input norm, no final
// norm, scores through the target's lm_head or some of its rows. EAGLE-3: fc over three feature levels, layers of which the
// first attends over embedding and hidden state, a final norm, and mostly an lm_head of its own.
#pragma once

#include <mutex>

#include "growth.h"
#include "model.h"

namespace eyas {

// What to tell of the next tokens after some rows. The k best with their log-probabilities, best first, ties to the
// smaller row of lm_head; or, with uniforms, the rows of lm_head of k tokens drawn one after the other, none twice, and
// the weights they were drawn by; or, with k = 0 and room for them, the raw scores of all.
struct Scores {
  int k = 0;
  int64_t* tokens = nullptr;   // [rows, k] target ids; drawn: rows of lm_head, -1 where nothing was left
  float* log_probs = nullptr;  // [rows, k]; drawn: [rows] the likeliest token's probability at temperature 1
  float* all = nullptr;        // [rows, draft vocab] raw scores or weights
  const double* uniforms = nullptr;  // [rows, k] in [0, 1)
  float temperature = 1;       // of the weights
  bool wanted() const { return k > 0 || all; }
};

// What a tree of drawn tokens is drawn by, and was drawn from.
struct Drawing {
  const double* uniforms;  // [max_depth, topk, topk] in [0, 1): by level, node expanded there, child
  float temperature;
  const double* confidence;  // [3], see eyas/draws.py
  float* weights;  // [nodes, draft vocab]; there is room for 1 + (max_depth - 1) * topk
  std::vector<int64_t> nodes = {}, places = {};  // the candidates expanded; of each [topk] rows of lm_head, -1 for none
};

class Head {
 public:
  Head(std::shared_ptr<Model> target, Config config)
      : target(std::move(target)), decoder(this->target->decoder.kernels, *this->target->pool, std::move(config)) {}

  std::shared_ptr<Model> target;
  Arena arena;
  Decoder decoder;
  Linear fc;
  Buffer<float> fc_bias;            // [fc outputs], empty: none
  Buffer<float> norm;               // before lm_head (EAGLE-3), empty: none
  Linear own_lm_head;               // rows of the draft vocabulary; empty: the target's lm_head
  std::vector<int64_t> token_ids;   // target id of each draft row; empty: the same

  const Linear& lm_head() const { return own_lm_head.empty() ? target->lm_head : own_lm_head; }
  int draft_vocab() const { return token_ids.empty() ? target->config().vocab : int(token_ids.size()); }
  bool is_eagle3() const { return decoder.layers.front().embedding_norm.size() > 0; }
  int feature_size() const { return is_eagle3() ? fc.k() : decoder.config.hidden; }  // of the target's features
  size_t weight_bytes() const;

  // Runs the head over pairs (token, feature): outputs [rows, hidden]. `own`: the features are outputs of earlier rows,
  // not the target's. The last `scored` rows are also scored.
  void forward(const Rows& rows, const int64_t* tokens, const float* const* features, bool own, float* outputs, int scored,
               const Scores& scores);
  // The same scores for outputs [rows, hidden].
  void score(const float* outputs, int rows, const Scores& scores);
  // Ids [k] and log confidences [k] of the children of a node, drawn at `places` [k].
  void show_draws(const int64_t* places, float likeliest, const double* confidence, int k, int64_t* ids,
                  float* log_probs) const;

 private:
  std::mutex mutex_;
  Buffer<float> joined_, embeds_, logits_;
  void best_of(const float* logits, const Scores& scores, int row) const;
  void draw_from(const float* logits, const Scores& scores, int row) const;
  void score_rows(const float* x, size_t stride, int rows, const Scores& scores, int thread);
  size_t logit_stride() const { return size_t(round_up(lm_head().outputs(), 16)); }
};

// One request's drafting state: K/V of the committed pairs, then the rows of the tree that is growing.
class HeadSession {
 public:
  explicit HeadSession(std::shared_ptr<Head> head) : head_(std::move(head)), cache_(head_->decoder.cache_shape()) {}

  const Head& head() const { return *head_; }
  int length() const { return cache_.length(); }
  bool has_tip() const { return !tip_.empty(); }
  // Takes in n pairs: forgets the tree, and scores the children of the last pair.
  void commit(const int64_t* tokens, const float* features, int n, const Scores& scores);
  // The children of the last committed pair once more.
  void score_tip(const Scores& scores);
  // Runs the head over n nodes of one level. parents[i]: 0 for the root, r + 1 for the tree row r of an earlier call.
  void expand(const int64_t* tokens, const int64_t* parents, int n, int depth, const Scores& scores);
  // A whole tree, level by level as the rule says: `max_depth` levels at most. The root's children come with taking in
  // n pairs, or from the tip where n is 0; a rule that does not expand the root leaves the pairs untouched. `values`: see
  // Rule::expand. Without `drawing` children are the likeliest.
  void grow(const int64_t* tokens, const float* features, int n, const Rule& rule, int max_depth, Candidates& candidates,
            std::vector<double>& values, Drawing* drawing);
  void truncate(int length);
  int tree_rows() const { return int(outputs_.size()); }

 private:
  std::shared_ptr<Head> head_;
  Cache cache_;
  std::vector<float> tip_;                   // the head's output on the last pair
  std::vector<std::vector<float>> outputs_;  // per tree row
  std::vector<std::vector<int>> keys_;       // per tree row: the slots of its ancestors and its own
  void forget_tree();
};

}  // namespace eyas
