// A team of threads that stays. The caller is member 0; the others wait for work, first awake (the
// next step usually follows at once), then asleep.
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

// How long a member stays awake after the first microseconds. On x86 longer than the time between two
// steps: in a virtual machine a core that sleeps goes back to the host, which may take milliseconds to
// return it.
#if defined(__x86_64__)
constexpr std::chrono::microseconds kAwake{2000};
#else
constexpr std::chrono::microseconds kAwake{0};
#endif

class Team {
 public:
  explicit Team(int size, std::chrono::microseconds awake = kAwake);
  ~Team();

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Run `work(member)` on the first `members`, and return when all have finished.
  void run(int members, const std::function<void(int)>& work);

  // Inside `run`: nobody goes on before all of its members have come here.
  void barrier();

  // Inside `run`: numbers 0 … count − 1, each to one member, whoever is free. Ends with a barrier.
  template <typename F>
  void parallel_for(int count, F&& work) {
    std::atomic<int>& next = counters_[slot_of_step()];
    for (int n; (n = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(n);
    barrier();
  }

 private:
  void serve(int member);
  uint64_t stay_awake(uint64_t seen) const;
  int slot_of_step() const { return static_cast<int>(phase_.load(std::memory_order_relaxed) & 1); }

  const std::chrono::microseconds awake_;
  std::vector<std::thread> threads_;
  std::atomic<int> members_{1};
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint64_t> round_{0};  // its number, then how many take part
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
