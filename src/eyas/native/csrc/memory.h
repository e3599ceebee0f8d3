// Aligned memory that the kernel may back with huge pages.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace eyas {

struct FreeBytes {
  void operator()(void* p) const { std::free(p); }
};

// Zeroed memory, aligned to a cache line, or to 2 MiB where it is large.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) { resize(count); }

  // Forgets the contents.
  void resize(size_t count) {
    size_t bytes = count * sizeof(T);
    const size_t alignment = bytes >= (size_t(2) << 20) ? size_t(2) << 20 : 64;
    bytes = bytes ? (bytes + 63) / 64 * 64 : 64;
    data_.reset();
    void* p = nullptr;  // what is left behind the last huge page stays in small ones
    if (posix_memalign(&p, alignment, bytes)) throw std::bad_alloc();
    data_.reset(static_cast<T*>(p));
#ifdef __linux__
    if (alignment > 64) madvise(p, bytes, MADV_HUGEPAGE);
#endif
    std::memset(p, 0, bytes);
    size_ = count;
  }
  void grow(size_t count) {
    if (count > size_) resize(count);
  }

  T* get() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  std::unique_ptr<T, FreeBytes> data_;
  size_t size_ = 0;
};

// Memory for packed weights, given out in order: matrices that are read one after the other lie one after the other,
// in huge pages, so that streaming them misses no page translation. Contents are undefined until written.
class Arena {
 public:
  char* take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > left_) {
      constexpr size_t kUnit = size_t(2) << 20, kBlock = size_t(32) << 20;
      size_t size = bytes > kBlock ? (bytes + kUnit - 1) / kUnit * kUnit : kBlock;
      void* p = std::aligned_alloc(kUnit, size);
      if (!p) throw std::bad_alloc();
      blocks_.emplace_back(static_cast<char*>(p));
#ifdef __linux__
      madvise(p, size, MADV_HUGEPAGE);
#endif
      at_ = blocks_.back().get();
      left_ = size;
    }
    char* taken = at_;
    at_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  std::vector<std::unique_ptr<char, FreeBytes>> blocks_;
  char* at_ = nullptr;
  size_t left_ = 0;
};

}  // namespace eyas
