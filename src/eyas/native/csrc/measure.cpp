#include "measure.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace eyas {

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double read_bandwidth(Pool& pool, int megabytes, int repeats) {
  const Kernels& kernels = *select_kernels("");
  const size_t n = size_t(megabytes) << 18;
  Buffer<float> buffer(n);
  double best = 0;
  std::vector<float> sums(size_t(pool.threads()));
  auto job = [&](int thread) {
    const size_t begin = n / pool.threads() * thread / 64 * 64, end = n / pool.threads() * (thread + 1) / 64 * 64;
    sums[thread] += kernels.sum(buffer.get() + begin, end - begin);
  };
  for (int r = 0; r < repeats; ++r) {
    auto start = std::chrono::steady_clock::now();
    pool.run(job);
    best = std::max(best, double(n) * 4 / seconds_since(start));
  }
  return best;
}

double peak_flops(Pool& pool, int64_t steps, int repeats) {
  const Kernels& kernels = *select_kernels("");
  double best = 0;
  std::vector<double> done(size_t(pool.threads()));
  auto job = [&](int thread) { done[thread] = kernels.burn(steps); };
  for (int r = 0; r < repeats; ++r) {
    auto start = std::chrono::steady_clock::now();
    pool.run(job);
    double total = 0;
    for (double d : done) total += d;
    best = std::max(best, total / seconds_since(start));
  }
  return best;
}

}  // namespace eyas
