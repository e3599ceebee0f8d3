#include "head.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace eyas {

size_t Head::weight_bytes() const {
  size_t bytes = fc.bytes() + own_lm_head.bytes();
  for (const Layer& layer : decoder.layers)
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  return bytes;
}

void Head::score_rows(const float* x, size_t stride, int rows, const Scores& scores, int thread) {
  Pool& pool = decoder.pool;
  const int threads = pool.threads(), cols = decoder.kernels.panel_cols, vocab = draft_vocab();
  const Linear& w = lm_head();
  Acts acts = decoder.prepare(w, rows, thread, [&](int r, float* room) {
    if (!norm.size()) return x + r * stride;
    decoder.kernels.rms_norm(x + r * stride, norm.get(), decoder.config.eps, decoder.config.hidden, room);
    return static_cast<const float*>(room);
  });
  const size_t ld = logit_stride();
  multiply<1>(w, acts, rows, thread, threads, decoder.work.out[thread].get(), nullptr,
              [&](int panel, int first, int count, const float* block) {
                for (int r = 0; r < count; ++r)
                  std::copy_n(block + r * cols, cols, logits_.get() + (first + r) * ld + size_t(panel) * cols);
              });
  pool.barrier();
  for (int r = thread; r < rows; r += threads) {
    const float* row = logits_.get() + r * ld;
    if (scores.uniforms)
      draw_from(row, scores, r);
    else if (scores.k)
      best_of(row, scores, r);
    else
      std::copy_n(row, vocab, scores.all + size_t(r) * vocab);
  }
}

void Head::best_of(const float* logits, const Scores& scores, int row) const {
  const int k = scores.k, vocab = draft_vocab();
  const float total = decoder.kernels.log_sum_exp(logits, vocab);
  int64_t* ids = scores.tokens + size_t(row) * k;
  float* values = scores.log_probs + size_t(row) * k;
  int found = 0;
  for (int i = 0; i < vocab; ++i) {
    if (found == k && !(logits[i] > values[k - 1])) continue;
    int at = found < k ? found++ : k - 1;
    for (; at > 0 && logits[i] > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = logits[i];
    ids[at] = i;
  }
  for (int i = 0; i < k; ++i) {
    // A vocabulary smaller than k is filled up with confidence zero.
    values[i] = i < found ? values[i] - total : -std::numeric_limits<float>::infinity();
    ids[i] = i >= found ? 0 : token_ids.empty() ? ids[i] : token_ids[size_t(ids[i])];
  }
}

// A place is found by the sums of blocks first, so that a draw costs little beside the weights themselves.
void Head::draw_from(const float* logits, const Scores& scores, int row) const {
  constexpr int kBlock = 64;
  const int vocab = draft_vocab(), blocks = (vocab + kBlock - 1) / kBlock;
  float* weights = scores.all + size_t(row) * vocab;
  decoder.kernels.exponentials(logits, 1 / scores.temperature, vocab, weights);
  scores.log_probs[row] = std::exp(*std::max_element(logits, logits + vocab) - decoder.kernels.log_sum_exp(logits, vocab));
  std::vector<float> left(weights, weights + vocab);
  std::vector<double> sums(static_cast<size_t>(blocks));
  auto add_up = [&](int block) {
    sums[size_t(block)] = std::accumulate(left.begin() + block * kBlock, left.begin() + std::min((block + 1) * kBlock, vocab), 0.0);
  };
  for (int block = 0; block < blocks; ++block) add_up(block);
  for (int i = 0; i < scores.k; ++i) {
    double at = scores.uniforms[size_t(row) * scores.k + i] * std::accumulate(sums.begin(), sums.end(), 0.0);
    int place = -1;  // the last with any weight, should rounding lead past the end
    for (int block = 0; block < blocks; ++block) {
      if (block + 1 < blocks && at >= sums[size_t(block)]) {
        at -= sums[size_t(block)];
        continue;
      }
      const int end = std::min((block + 1) * kBlock, vocab);
      for (int j = block * kBlock; j < end && place < 0; ++j) {
        if (left[size_t(j)] > 0 && at < left[size_t(j)]) place = j;
        at -= left[size_t(j)];
      }
      break;
    }
    for (int j = vocab - 1; place < 0 && j >= 0; --j)
      if (left[size_t(j)] > 0) place = j;
    scores.tokens[size_t(row) * scores.k + i] = place;
    if (place < 0) continue;
    left[size_t(place)] = 0;
    add_up(place / kBlock);
  }
}

void Head::forward(const Rows& rows, const int64_t* tokens, const float* const* features, bool own, float* outputs,
                   int scored, const Scores& scores) {
  std::lock_guard<std::mutex> lock(mutex_);
  Pool& pool = decoder.pool;
  const int m = rows.count(), threads = pool.threads(), h = decoder.config.hidden, cols = decoder.kernels.panel_cols;
  const bool eagle3 = is_eagle3(), through_fc = !(eagle3 && own);
  const size_t ld = decoder.x_stride(), joined_ld = size_t(Decoder::stride(fc.k()));
  decoder.begin(rows, {&fc, &lm_head()});
  joined_.grow(size_t(m) * joined_ld);
  embeds_.grow(eagle3 ? size_t(m) * ld : 0);
  logits_.grow(size_t(scored) * logit_stride());
  float* x = decoder.work.x.get();
  float* joined = joined_.get();
  float* embeds = embeds_.get();
  auto enter = [&](int r) {
    float* row = joined + r * joined_ld;
    if (!eagle3) {
      target->embed(tokens[r], row);
      std::copy_n(features[r], h, row + h);
      return;
    }
    target->embed(tokens[r], embeds + r * ld);
    if (own) {
      std::copy_n(features[r], h, x + r * ld);
    } else {
      std::copy_n(features[r], fc.k(), row);
      std::fill_n(row + fc.k(), joined_ld - fc.k(), 0.0f);
    }
  };
  auto job = [&](int thread) {
    const auto [begin, end] = share(m, thread, threads);
    for (int r = begin; r < end; ++r) enter(r);
    if (through_fc) {
      pool.barrier();
      Acts acts = decoder.prepare(fc, m, thread, [&](int r, float*) { return joined + r * joined_ld; });
      multiply<1>(fc, acts, m, thread, threads, decoder.work.out[thread].get(),
                  first_panel(decoder.layers.front().qkv, 1, thread, threads),
                  [&](int panel, int first, int count, float* block) {
                    const int c0 = panel * cols, width = std::min(cols, h - c0);
                    for (int r = 0; r < count; ++r) {
                      if (fc_bias.size()) decoder.kernels.add(fc_bias.get() + c0, width, block + r * cols);
                      std::copy_n(block + r * cols, width, x + (first + r) * ld + c0);
                    }
                  });
    }
    pool.barrier();
    for (int l = 0; l < decoder.config.layers; ++l) decoder.run_layer(l, rows, thread, lm_head(), embeds);
    for (int r = begin; r < end; ++r) std::copy_n(x + r * ld, h, outputs + size_t(r) * h);
    if (scored) score_rows(x + (m - scored) * ld, ld, scored, scores, thread);
  };
  pool.run(job);
}

void Head::score(const float* outputs, int rows, const Scores& scores) {
  std::lock_guard<std::mutex> lock(mutex_);
  const int h = decoder.config.hidden;
  decoder.make_room(rows, {&lm_head()});
  logits_.grow(size_t(rows) * logit_stride());
  const size_t ld = decoder.x_stride();
  joined_.grow(size_t(rows) * ld);
  for (int r = 0; r < rows; ++r) std::copy_n(outputs + size_t(r) * h, h, joined_.get() + r * ld);
  for (int r = 0; r < rows; ++r) std::fill_n(joined_.get() + r * ld + h, ld - h, 0.0f);
  auto job = [&](int thread) { score_rows(joined_.get(), ld, rows, scores, thread); };
  decoder.pool.run(job);
}

void HeadSession::forget_tree() {
  outputs_.clear();
  keys_.clear();
  cache_.truncate(cache_.length());
}

void HeadSession::commit(const int64_t* tokens, const float* features, int n, const Scores& scores) {
  constexpr int kChunk = 256;
  const int h = head_->decoder.config.hidden, feature_size = head_->feature_size();
  forget_tree();
  std::vector<float> outputs(size_t(std::min(n, kChunk)) * h);
  std::vector<const float*> pointers;
  for (int start = 0; start < n; start += kChunk) {
    const int count = std::min(kChunk, n - start);
    const bool last = start + count == n;
    Rows rows;
    rows.add_tree(cache_, nullptr, count);
    cache_.reserve(count);
    pointers.clear();
    for (int i = 0; i < count; ++i) pointers.push_back(features + size_t(start + i) * feature_size);
    head_->forward(rows, tokens + start, pointers.data(), false, outputs.data(), last && scores.wanted() ? 1 : 0, scores);
    std::vector<int> path(count);
    for (int i = 0; i < count; ++i) path[i] = i;
    cache_.commit(path);
    tip_.assign(outputs.begin() + size_t(count - 1) * h, outputs.begin() + size_t(count) * h);
  }
}

void HeadSession::score_tip(const Scores& scores) {
  if (tip_.empty()) throw std::invalid_argument("no pair was committed since the session began or was truncated");
  forget_tree();
  head_->score(tip_.data(), 1, scores);
}

void HeadSession::expand(const int64_t* tokens, const int64_t* parents, int n, int depth, const Scores& scores) {
  const int old = tree_rows(), length = cache_.length(), h = head_->decoder.config.hidden;
  Rows rows;
  rows.requests.push_back({&cache_, 0, n});
  std::vector<const float*> features;
  if (tip_.empty()) throw std::invalid_argument("no pair was committed since the session began or was truncated");
  for (int i = 0; i < n; ++i)
    if (parents[i] < 0 || parents[i] > old)
      throw std::invalid_argument("parent " + std::to_string(parents[i]) + " is not among the " + std::to_string(old) +
                                  " rows of the tree");
  for (int i = 0; i < n; ++i) {
    std::vector<int> keys = parents[i] ? keys_[size_t(parents[i] - 1)] : std::vector<int>{};
    keys.push_back(length + old + i);
    rows.slot.push_back(keys.back());
    rows.position.push_back(length - 1 + depth);
    rows.prefix.push_back(length);
    rows.extra.insert(rows.extra.end(), keys.begin(), keys.end());
    rows.extra_begin.push_back(int(rows.extra.size()));
    features.push_back(parents[i] ? outputs_[size_t(parents[i] - 1)].data() : tip_.data());
    keys_.push_back(std::move(keys));
  }
  cache_.reserve(old + n);
  std::vector<float> outputs(size_t(n) * h);
  head_->forward(rows, tokens, features.data(), true, outputs.data(), n, scores);
  for (int i = 0; i < n; ++i) outputs_.emplace_back(outputs.begin() + size_t(i) * h, outputs.begin() + size_t(i + 1) * h);
}

// From what was drawn for a node to its children as a policy sees them, as `confidences` in eyas/draws.py does.
void Head::show_draws(const int64_t* places, float likeliest, const double* confidence, int k, int64_t* ids,
                      float* log_probs) const {
  const double first = confidence[0] + confidence[1] * double(likeliest);
  double left = 1;
  for (int i = 0; i < k; ++i) {
    if (places[i] < 0) {
      ids[i] = 0;
      log_probs[i] = -std::numeric_limits<float>::infinity();
      continue;
    }
    const double value = left * (i == 0 ? first : first * confidence[2]);
    left -= value;
    ids[i] = token_ids.empty() ? places[i] : token_ids[size_t(places[i])];
    log_probs[i] = float(std::log(value));
  }
}

void HeadSession::grow(const int64_t* tokens, const float* features, int n, const Rule& rule, int max_depth,
                       Candidates& candidates, std::vector<double>& values, Drawing* drawing) {
  const int k = rule.topk;
  std::vector<int64_t> number(1, 0), names, parents, best;  // number: of the candidates that were expanded, as parents
  std::vector<float> log_probs;
  while (candidates.depth() < max_depth) {
    const std::vector<int> expanded = rule.expand(candidates, values);
    if (expanded.empty()) break;
    const int count = int(expanded.size()), depth = candidates.depth();
    best.resize(size_t(count) * k);
    log_probs.resize(size_t(count) * k);
    Scores scores{.k = k, .tokens = best.data(), .log_probs = log_probs.data()};
    if (drawing) {
      scores.all = drawing->weights + drawing->nodes.size() * size_t(head_->draft_vocab());
      scores.uniforms = drawing->uniforms + size_t(depth) * k * k;
      scores.temperature = drawing->temperature;
      drawing->nodes.insert(drawing->nodes.end(), expanded.begin(), expanded.end());
    }
    if (depth > 0) {
      names.clear();
      parents.clear();
      for (int node : expanded) {
        names.push_back(candidates.tokens[size_t(node)]);
        parents.push_back(number[size_t(candidates.parents[size_t(node)])]);
      }
      number.resize(size_t(candidates.size()));
      for (int i = 0; i < count; ++i) number[size_t(expanded[size_t(i)])] = tree_rows() + i + 1;
      expand(names.data(), parents.data(), count, depth, scores);
    } else if (n > 0) {
      commit(tokens, features, n, scores);
    } else {
      score_tip(scores);
    }
    if (drawing) {
      drawing->places.insert(drawing->places.end(), best.begin(), best.end());
      const std::vector<float> likeliest(log_probs.begin(), log_probs.begin() + count);
      for (int i = 0; i < count; ++i)
        head_->show_draws(&drawing->places[drawing->places.size() - size_t(count - i) * k], likeliest[size_t(i)],
                          drawing->confidence, k,
                          &best[size_t(i) * k], &log_probs[size_t(i) * k]);
    }
    candidates.add_level(expanded, k, best.data(), log_probs.data());
  }
  if (!rule.calibration.empty()) rule.calibration.extend(candidates, values);
}

void HeadSession::truncate(int length) {
  if (length < cache_.length()) {
    cache_.truncate(length);
    tip_.clear();
  }
  forget_tree();
}

}  // namespace eyas
