// Aligned memory that the kernel may back with huge pages.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

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
    size_t alignment = bytes >= (size_t(4) << 20) ? size_t(2) << 20 : 64;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    if (bytes == 0) bytes = alignment;
    data_.reset();
    void* p = std::aligned_alloc(alignment, bytes);
    if (!p) throw std::bad_alloc();
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

}  // namespace eyas
