// A pool of persistent threads. The caller is worker 0. The other workers wait for work, first awake,
// because the next step usually follows at once, and then asleep.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace twostroke {

inline void relax() {
#if defined(__aarch64__)
  asm volatile("yield");
#elif defined(__x86_64__)
  asm volatile("pause");
#endif
}

// The time that a worker stays awake after the first microseconds. On x86 it exceeds the pause between two
// steps: in a virtual machine a sleeping core goes back to the host, which may need milliseconds to return
// the core.
#if defined(__x86_64__)
constexpr std::chrono::microseconds kAwake{2000};
#else
constexpr std::chrono::microseconds kAwake{0};
#endif

class ThreadPool {
 public:
  explicit ThreadPool(int size, std::chrono::microseconds awake = kAwake);
  ~ThreadPool();

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Run work(worker) on workers 0 … workers − 1, and return when all have finished.
  void run(int workers, const std::function<void(int)>& work);

  // Inside `run`: wait until all workers of the run have arrived.
  void barrier();

  // Inside `run`: call work(n) for n = 0 … count − 1, each on the next free worker. Ends with a barrier.
  template <typename F>
  void parallel_for(int count, F&& work) {
    std::atomic<int>& next = counters_[slot_of_step()];
    for (int n; (n = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(n);
    barrier();
  }

 private:
  void serve(int worker);
  uint64_t stay_awake(uint64_t seen) const;
  int slot_of_step() const { return static_cast<int>(phase_.load(std::memory_order_relaxed) & 1); }

  const std::chrono::microseconds awake_;
  std::vector<std::thread> threads_;
  std::atomic<int> workers_{1};
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint64_t> round_{0};  // the number of the round, then the number of its workers
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint64_t> phase_{0};
  struct alignas(64) Counter : std::atomic<int> {};
  Counter counters_[2];
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
  bool ending_ = false;
};

}  // namespace twostroke
