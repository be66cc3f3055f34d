#include "thread_pool.h"

namespace twostroke {

namespace {
constexpr int kSpins = 4000;        // about 20 µs (x86: 60 to 200)
constexpr int kSpinsPerYield = 32;
constexpr int kWorkerBits = 16;      // low bits of `round_`: the number of workers in the round
constexpr int kBarrierSpins = 2000;  // then yield the core
}  // namespace

ThreadPool::ThreadPool(int size, std::chrono::microseconds awake) : awake_(awake) {
  counters_[0].store(0);
  counters_[1].store(0);
  for (int worker = 1; worker < size; worker++) threads_.emplace_back([=] { serve(worker); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    round_.fetch_add(1ull << kWorkerBits);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int workers, const std::function<void(int)>& work) {
  workers = workers < 1 ? 1 : workers > size() ? size() : workers;
  workers_.store(workers, std::memory_order_relaxed);
  work_ = &work;
  running_.store(workers - 1, std::memory_order_relaxed);
  // The number of workers is in the same word as the round: a worker that does not take part may read the
  // word late, while the next round is prepared.
  const uint64_t next = (round_.load(std::memory_order_relaxed) >> kWorkerBits) + 1;
  round_.store(next << kWorkerBits | static_cast<uint64_t>(workers), std::memory_order_seq_cst);
  if (workers > 1 && asleep_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  work(0);
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0;) {
    if (++spins < kBarrierSpins) relax();
    else std::this_thread::yield();
  }
}

void ThreadPool::serve(int worker) {
  uint64_t seen = 0;
  while (true) {
    uint64_t now = seen;
    for (int spins = 0; spins < kSpins && now == seen; spins++) {
      relax();
      now = round_.load(std::memory_order_acquire);
    }
    if (now == seen && awake_.count() > 0) now = stay_awake(seen);
    if (now == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != seen; });
      asleep_.fetch_sub(1, std::memory_order_relaxed);
      now = round_.load(std::memory_order_acquire);
    }
    seen = now;
    if (ending_) return;
    if (worker >= static_cast<int>(now & ((1u << kWorkerBits) - 1))) continue;
    (*work_)(worker);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

// Return the next round, or `seen` if no round started in time. Yields the core to other threads.
uint64_t ThreadPool::stay_awake(uint64_t seen) const {
  const auto end = std::chrono::steady_clock::now() + awake_;
  uint64_t now = seen;
  while (now == seen && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
    for (int spins = 0; spins < kSpinsPerYield && now == seen; spins++) {
      relax();
      now = round_.load(std::memory_order_acquire);
    }
  }
  return now;
}

void ThreadPool::barrier() {
  const int workers = workers_.load(std::memory_order_relaxed);
  const uint64_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == workers - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    // Reset the counter for the phase after next. No worker reads it earlier.
    counters_[phase & 1].store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase;) {
    if (++spins < kBarrierSpins) relax();
    else std::this_thread::yield();
  }
}

}  // namespace twostroke
