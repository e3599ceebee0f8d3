// The K/V of one request, in pages that a fork shares until one side writes.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace eyas {

// Offsets count elements.
struct CacheShape {
  Type type;  // of an element: f32 or bf16
  int layers, kv_heads, head_dim;
  int v_stride() const { return (head_dim + 15) / 16 * 16; }
  size_t k_offset(int layer, int head) const { return (size_t(layer) * kv_heads + head) * head_elements(); }
  size_t v_offset(int layer, int head) const { return k_offset(layer, head) + size_t(kPageTokens) * head_dim; }
  // The first element of a page's token's key, the others being kKeyBlock apart; the first of its value.
  size_t key_at(int layer, int head, int token) const {
    return k_offset(layer, head) + size_t(token / kKeyBlock) * head_dim * kKeyBlock + token % kKeyBlock;
  }
  size_t value_at(int layer, int head, int token) const { return v_offset(layer, head) + size_t(token) * v_stride(); }
  size_t element_bytes() const { return type == Type::bf16 ? 2 : 4; }
  size_t token_bytes() const { return page_bytes() / kPageTokens; }
  size_t page_bytes() const { return head_elements() * kv_heads * layers * element_bytes(); }
  bool operator==(const CacheShape&) const = default;

 private:
  size_t head_elements() const { return size_t(kPageTokens) * (head_dim + v_stride()); }
};

class Cache {
 public:
  explicit Cache(CacheShape shape) : shape_(shape) {}

  const CacheShape& shape() const { return shape_; }
  int length() const { return length_; }            // committed tokens
  int provisional() const { return provisional_; }  // rows written after them by the last pass
  size_t bytes() const { return pages_.size() * shape_.page_bytes(); }

  // Pages for `rows` new rows after the committed ones, owned by this cache alone. They become provisional.
  void reserve(int rows);
  // Keeps the provisional rows `path` (increasing), in this order, as committed.
  void commit(const std::vector<int>& path);
  void truncate(int length);
  Cache fork() const { return *this; }  // shares the pages; reserve and commit copy what they write

  const std::vector<void*>& page_pointers() const { return pointers_; }
  // Rounds to the cache's type: a token's own pass reads its key and value as later passes do.
  void write(int layer, int head, int slot, const float* k, const float* v) const;

 private:
  using Page = Buffer<char>;
  void own(int slot);  // makes the page of a slot this cache's own
  template <class E>
  void move(int from, int to) const;  // from slot to slot
  CacheShape shape_;
  int length_ = 0, provisional_ = 0;
  std::vector<std::shared_ptr<Page>> pages_;
  std::vector<void*> pointers_;
};

}  // namespace eyas
