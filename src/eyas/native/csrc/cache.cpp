#include "cache.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/scalars.inl"

namespace eyas {

namespace {

inline void store(float x, float* to) { *to = x; }
inline void store(float x, uint16_t* to) { *to = float_to_bf16(x); }

template <class E>
void write_row(E* page, const CacheShape& shape, int layer, int head, int token, const float* k, const float* v) {
  E* key = page + shape.key_at(layer, head, token);
  E* value = page + shape.value_at(layer, head, token);
  for (int i = 0; i < shape.head_dim; ++i) store(k[i], key + size_t(i) * kKeyBlock);
  for (int i = 0; i < shape.head_dim; ++i) store(v[i], value + i);
}

}  // namespace

void Cache::own(int slot) {
  auto& page = pages_[slot / kPageTokens];
  if (page.use_count() == 1) return;
  auto copy = std::make_shared<Page>(shape_.page_bytes());
  std::copy_n(page->get(), shape_.page_bytes(), copy->get());
  page = copy;
  pointers_[slot / kPageTokens] = page->get();
}

void Cache::reserve(int rows) {
  int end = length_ + rows;
  int needed = (end + kPageTokens - 1) / kPageTokens;
  while (int(pages_.size()) < needed) {
    pages_.push_back(std::make_shared<Page>(shape_.page_bytes()));
    pointers_.push_back(pages_.back()->get());
  }
  for (int page = length_ / kPageTokens; page < needed; ++page) own(page * kPageTokens);
  provisional_ = rows;
}

void Cache::write(int layer, int head, int slot, const float* k, const float* v) const {
  void* page = pointers_[slot / kPageTokens];
  if (shape_.type == Type::bf16)
    write_row(static_cast<uint16_t*>(page), shape_, layer, head, slot % kPageTokens, k, v);
  else
    write_row(static_cast<float*>(page), shape_, layer, head, slot % kPageTokens, k, v);
}

template <class E>
void Cache::move(int from, int to) const {
  const E* source = static_cast<const E*>(pointers_[from / kPageTokens]);
  E* target = static_cast<E*>(pointers_[to / kPageTokens]);
  from %= kPageTokens;
  to %= kPageTokens;
  for (int layer = 0; layer < shape_.layers; ++layer)
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const E* key = source + shape_.key_at(layer, head, from);
      E* moved = target + shape_.key_at(layer, head, to);
      for (int i = 0; i < shape_.head_dim; ++i) moved[size_t(i) * kKeyBlock] = key[size_t(i) * kKeyBlock];
      std::copy_n(source + shape_.value_at(layer, head, from), shape_.head_dim,
                  target + shape_.value_at(layer, head, to));
    }
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
  for (int i = 0; i < int(path.size()); ++i) {
    const int from = length_ + path[i], to = length_ + i;
    if (from == to) continue;
    own(to);
    shape_.type == Type::bf16 ? move<uint16_t>(from, to) : move<float>(from, to);
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
