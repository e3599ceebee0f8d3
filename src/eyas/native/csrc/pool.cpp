#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace eyas {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `word` is no longer `old`: a while awake (the wait is usually shorter than going to sleep), then asleep,
// so that a core somebody else needs is given up.
inline void wait_change(std::atomic<uint32_t>& word, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

constexpr int kSpins = 3000;  // some 30-60 microseconds

// notify_all() calls the kernel only if it sees a sleeper counted, and libstdc++ reads that count by a plain load, which may
// overtake a mere release store. A thread that falls asleep in between saw the old value, is not seen, and sleeps for ever.
constexpr auto kBeforeNotify = std::memory_order_seq_cst;

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
  for (int t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  job_.fetch_add(1, kBeforeNotify);
  job_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_raw(Function function, void* context) {
  std::lock_guard<std::mutex> lock(mutex_);
  function_ = function;
  context_ = context;
  if (threads_ > 1) {
    job_.fetch_add(1, kBeforeNotify);
    job_.notify_all();
  }
  function(context, 0);
  barrier();
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_change(job_, seen, kSpins);
    if (stop_.load(std::memory_order_relaxed)) return;
    ++seen;  // a new job starts only after every worker has finished the last, so none is skipped
    function_(context_, thread);
    barrier();
  }
}

void Pool::barrier() {
  if (threads_ == 1) return;
  uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, kBeforeNotify);
    phase_.notify_all();
  } else {
    wait_change(phase_, phase, kSpins);
  }
}

}  // namespace eyas
