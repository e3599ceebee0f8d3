// A small pool of threads that run one function together, meeting at barriers.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace eyas {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls job(thread) on every thread of the pool, the caller being thread 0; returns when all are done. One job at a
  // time: callers from several threads wait for each other. `job` must not throw.
  template <class Job>
  void run(Job& job) {
    run_raw([](void* context, int thread) { (*static_cast<Job*>(context))(thread); }, &job);
  }

  // Inside a job: waits until all threads are here.
  void barrier();

 private:
  using Function = void (*)(void*, int);
  void run_raw(Function function, void* context);
  void work(int thread);

  const int threads_;
  std::mutex mutex_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace eyas
