// numpy arrays at the border: what comes in is read in place, what goes out is handed over without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
// All casters in one place: a unit that lacks one compiles, and fails to cast when it runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace eyas {

namespace nb = nanobind;

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Anything = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
struct Owned {  // uninitialised memory that becomes a numpy array
  T* data;
  explicit Owned(size_t n) : data(static_cast<T*>(std::malloc(std::max<size_t>(1, n * sizeof(T))))) {
    if (!data) throw std::bad_alloc();
  }
  ~Owned() { std::free(data); }
  template <class... Size>
  nb::ndarray<nb::numpy, T> array(Size... sizes) {
    T* p = data;
    data = nullptr;
    nb::capsule owner(p, [](void* q) noexcept { std::free(q); });
    return nb::ndarray<nb::numpy, T>(p, {size_t(sizes)...}, owner);
  }
};

}  // namespace eyas
