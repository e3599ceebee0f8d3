#include "cache.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace eyas {

void Cache::own(int slot) {
  auto& page = pages_[slot / kPageTokens];
  if (page.use_count() == 1) return;
  auto copy = std::make_shared<Page>(shape_.page_floats());
  std::copy_n(page->get(), shape_.page_floats(), copy->get());
  page = copy;
  pointers_[slot / kPageTokens] = page->get();
}

void Cache::reserve(int rows) {
  int end = length_ + rows;
  int needed = (end + kPageTokens - 1) / kPageTokens;
  while (int(pages_.size()) < needed) {
    pages_.push_back(std::make_shared<Page>(shape_.page_floats()));
    pointers_.push_back(pages_.back()->get());
  }
  for (int page = length_ / kPageTokens; page < needed; ++page) own(page * kPageTokens);
  provisional_ = rows;
}

void Cache::write(int layer, int head, int slot, const float* k, const float* v) const {
  float* page = pointers_[slot / kPageTokens];
  int in_page = slot % kPageTokens, block = in_page / kKeyBlock, lane = in_page % kKeyBlock, d = shape_.head_dim;
  float* keys = page + shape_.k_offset(layer, head) + size_t(block) * d * kKeyBlock + lane;
  for (int i = 0; i < d; ++i) keys[size_t(i) * kKeyBlock] = k[i];
  std::copy_n(v, d, page + shape_.v_offset(layer, head) + size_t(in_page) * shape_.v_stride());
}

void Cache::commit(const std::vector<int>& path) {
  int last = -1;
  for (int node : path) {
    if (node <= last || node >= provisional_)
      throw std::invalid_argument("commit takes increasing indices of the " + std::to_string(provisional_) +
                                  " rows of the last pass, got " + std::to_string(node) + " after " +
                                  std::to_string(last));
    last = node;
  }
  int d = shape_.head_dim;
  std::vector<float> k(d);
  for (int i = 0; i < int(path.size()); ++i) {
    int from = length_ + path[i], to = length_ + i;
    if (from == to) continue;
    own(to);
    const float* source = pointers_[from / kPageTokens];
    int in_page = from % kPageTokens, block = in_page / kKeyBlock, lane = in_page % kKeyBlock;
    for (int layer = 0; layer < shape_.layers; ++layer)
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const float* keys = source + shape_.k_offset(layer, head) + size_t(block) * d * kKeyBlock + lane;
        for (int j = 0; j < d; ++j) k[j] = keys[size_t(j) * kKeyBlock];
        write(layer, head, to, k.data(), source + shape_.v_offset(layer, head) + size_t(in_page) * shape_.v_stride());
      }
  }
  length_ += int(path.size());
  provisional_ = 0;
}

void Cache::truncate(int length) {
  if (length < 0 || length > length_)
    throw std::invalid_argument("cannot truncate a cache of " + std::to_string(length_) + " tokens to " +
                                std::to_string(length));
  length_ = length;
  provisional_ = 0;
  size_t needed = size_t(length + kPageTokens - 1) / kPageTokens;
  // One spare page stays: a request that shrinks by a token will soon grow again.
  if (pages_.size() > needed + 1) {
    pages_.resize(needed + 1);
    pointers_.resize(needed + 1);
  }
}

}  // namespace eyas
