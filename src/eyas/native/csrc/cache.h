// The K/V of one request, in pages that a fork shares until one side writes.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace eyas {

struct CacheShape {
  int layers, kv_heads, head_dim;
  int v_stride() const { return (head_dim + 15) / 16 * 16; }
  size_t head_floats() const { return size_t(kPageTokens) * (head_dim + v_stride()); }
  size_t page_floats() const { return head_floats() * kv_heads * layers; }
  size_t k_offset(int layer, int head) const { return (size_t(layer) * kv_heads + head) * head_floats(); }
  size_t v_offset(int layer, int head) const { return k_offset(layer, head) + size_t(kPageTokens) * head_dim; }
  bool operator==(const CacheShape& o) const {
    return layers == o.layers && kv_heads == o.kv_heads && head_dim == o.head_dim;
  }
};

class Cache {
 public:
  explicit Cache(CacheShape shape) : shape_(shape) {}

  const CacheShape& shape() const { return shape_; }
  int length() const { return length_; }            // committed tokens
  int provisional() const { return provisional_; }  // rows written after them by the last pass
  size_t bytes() const { return pages_.size() * shape_.page_floats() * sizeof(float); }

  // Pages for `rows` new rows after the committed ones, owned by this cache alone. They become provisional.
  void reserve(int rows);
  // Keeps the provisional rows `path` (increasing), in this order, as committed.
  void commit(const std::vector<int>& path);
  void truncate(int length);
  Cache fork() const { return *this; }  // shares the pages; reserve and commit copy what they write

  const std::vector<float*>& page_pointers() const { return pointers_; }
  void write(int layer, int head, int slot, const float* k, const float* v) const;

 private:
  using Page = Buffer<float>;
  void own(int slot);  // makes the page of a slot this cache's own
  CacheShape shape_;
  int length_ = 0, provisional_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;
  std::vector<float*> pointers_;
};

}  // namespace eyas
