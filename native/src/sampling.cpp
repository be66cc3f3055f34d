#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace twostroke {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float score;
  int token;
  bool operator<(const Candidate& other) const {  // best first; equal scores by token id
    return score != other.score ? score > other.score : token < other.token;
  }
};

void penalise(float* logits, const SamplingParams& w, const History& history, int vocab) {
  if (w.repetition == 1 && w.frequency == 0 && w.presence == 0) return;
  static thread_local std::vector<int> written;  // number of occurrences; −1: in the prompt only
  written.resize(std::max<size_t>(written.size(), vocab));
  std::vector<int> seen;
  for (int n = 0; n < history.length; n++) {
    int& count = written[history.tokens[n]];
    if (count == 0) seen.push_back(history.tokens[n]), count = -1;
    if (n >= history.num_prompt) count = std::max(count, 0) + 1;
  }
  for (int token : seen) {
    float& x = logits[token];
    x = x > 0 ? x / w.repetition : x * w.repetition;
    const int count = std::max(written[token], 0);
    x -= static_cast<float>(count) * w.frequency;
    if (count > 0) x -= w.presence;
    written[token] = 0;
  }
}

// Return whether the logits are invalid: the maximum is NaN or +∞. If the maximum is −∞, either all tokens
// are banned, or there are NaN, so the logits are searched for NaN.
bool is_broken(const float* x, int vocab, float maximum) {
  if (maximum > -kInfinity && maximum < kInfinity) return false;
  return maximum != -kInfinity || std::any_of(x, x + vocab, [](float v) { return v != v; });
}

// The `count` best candidates, in order.
std::vector<Candidate> best_of(const float* x, int vocab, int count) {
  std::vector<Candidate> heap;  // worst first
  heap.reserve(count);
  int n = 0;
  for (; n < count && n < vocab; n++) heap.push_back({x[n], n});
  std::make_heap(heap.begin(), heap.end());
  for (float worst = heap.front().score; n < vocab; n++) {
    if (!(x[n] > worst)) continue;
    std::pop_heap(heap.begin(), heap.end());
    heap.back() = {x[n], n};
    std::push_heap(heap.begin(), heap.end());
    worst = heap.front().score;
  }
  std::sort_heap(heap.begin(), heap.end());
  return heap;
}

// Apply top-k, then keep the fewest candidates with a total probability of `top_p`.
std::vector<Candidate> bounded(const Kernels& kernels, const float* x, int vocab, float maximum,
                               int top_k, float top_p) {
  constexpr int kMany = 1024;  // usually enough candidates for top-p without top-k
  const bool all = top_k >= vocab;
  double total = all ? std::exp(static_cast<double>(kernels.log_sum_exp(x, vocab)) - maximum) : 0;
  for (int count = std::min(top_k, kMany);; count = std::min(top_k, vocab)) {
    std::vector<Candidate> found = best_of(x, vocab, all ? count : top_k);
    if (!all) {
      total = 0;
      for (const Candidate& c : found) total += std::exp(c.score - maximum);
    }
    double before = 0;
    size_t kept = 0;
    for (; kept < found.size() && (kept == 0 || before < top_p * total); kept++)
      before += std::exp(found[kept].score - maximum);
    const bool enough = !all || before >= top_p * total || count >= vocab;
    if (!enough) continue;
    found.resize(kept);
    return found;
  }
}

}  // namespace

int choose(const Kernels& kernels, float* logits, int vocab, const SamplingParams& w,
           const History& history, RandomKey key) {
  penalise(logits, w, history, vocab);
  if (w.temperature == 0) {
    const int best = kernels.argmax(logits, vocab);
    return is_broken(logits, vocab, logits[best]) ? -1 : best;
  }
  float maximum = -kInfinity;
  for (int n = 0; n < vocab; n++) {
    logits[n] /= w.temperature;
    maximum = std::max(maximum, logits[n]);
  }
  if (is_broken(logits, vocab, maximum)) return -1;
  if (w.min_p > 0) {
    const float minimum = maximum + std::log(w.min_p);
    for (int n = 0; n < vocab; n++)
      if (logits[n] < minimum) logits[n] = -kInfinity;
  }
  const bool has_k = w.top_k >= 1 && w.top_k < static_cast<float>(vocab);
  if (!has_k && w.top_p >= 1) return kernels.draw(logits, vocab, key.key0, key.key1);
  const int top_k = has_k ? static_cast<int>(w.top_k) : vocab;
  int best = -1;
  float score = 0;
  for (const Candidate& c : bounded(kernels, logits, vocab, maximum, top_k, w.top_p)) {
    const float now = c.score + gumbel(c.token, key.key0, key.key1);
    if (best < 0 || now > score) best = c.token, score = now;
  }
  return best;
}

void top_logprobs(const Kernels& kernels, const float* logits, int vocab, int token, int count,
                  int32_t* ids, float* values, int32_t* rank) {
  const float total = kernels.log_sum_exp(logits, vocab), own = logits[token];
  *rank = 1;
  for (int n = 0; n < vocab; n++) *rank += logits[n] > own;
  ids[0] = token, values[0] = own - total;
  if (count == 0) return;
  for (const Candidate& c : best_of(logits, vocab, count)) *++ids = c.token, *++values = c.score - total;
}

}  // namespace twostroke
