#include "team.h"

namespace twostroke {

namespace {
constexpr int kSpins = 4000;        // about 20 µs (x86: 60 to 200)
constexpr int kSpinsPerYield = 32;
constexpr int kMemberBits = 16;      // of `round_`: how many take part
constexpr int kBarrierSpins = 2000;  // then let whoever holds the core go on
}  // namespace

Team::Team(int size, std::chrono::microseconds awake) : awake_(awake) {
  counters_[0].store(0);
  counters_[1].store(0);
  for (int member = 1; member < size; member++) threads_.emplace_back([=] { serve(member); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    round_.fetch_add(1ull << kMemberBits);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(int members, const std::function<void(int)>& work) {
  members = members < 1 ? 1 : members > size() ? size() : members;
  members_.store(members, std::memory_order_relaxed);
  work_ = &work;
  running_.store(members - 1, std::memory_order_relaxed);
  // Who takes part is told in the same word: whoever is left out may read it late, when the next
  // round is being prepared.
  const uint64_t next = (round_.load(std::memory_order_relaxed) >> kMemberBits) + 1;
  round_.store(next << kMemberBits | static_cast<uint64_t>(members), std::memory_order_seq_cst);
  if (members > 1 && asleep_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  work(0);
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0;) {
    if (++spins < kBarrierSpins) relax();
    else std::this_thread::yield();
  }
}

void Team::serve(int member) {
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
    if (member >= static_cast<int>(now & ((1u << kMemberBits) - 1))) continue;
    (*work_)(member);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

// The number of the next round, or `seen` where none came in time. Whoever else wants the core gets it.
uint64_t Team::stay_awake(uint64_t seen) const {
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

void Team::barrier() {
  const int members = members_.load(std::memory_order_relaxed);
  const uint64_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    // The counter of the phase after next; nobody looks at it before that.
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
