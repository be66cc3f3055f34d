// Declarations that the source files of `Model` share.
#pragma once

#include <algorithm>

#include "model.h"

namespace twostroke {

// Cached tokens of a decode task, with keys of heads and with latents.
constexpr int kSplit = 64, kLatentSplit = 256;

inline int split_size(const Layer& layer) { return layer.latent == nullptr ? kSplit : kLatentSplit; }

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The layout of one step, computed before the thread pool starts.
struct Model::Step : StepInput {
  std::vector<int32_t> row, position, index;  // of every token
  int tokens = 0, longest = 1;  // longest: context of a decode slot
  bool small = false;   // every worker computes the norms of all tokens
  bool whole = true;    // all parts of a decode slot are one task
  bool stored = false;  // keys and values are in the cache, queries are rotated
  bool one_each = true;  // no row has two slots, so no slot reads a key that another slot stores

  void add(int32_t token_row, int32_t token_position, int32_t token_index) {
    row.push_back(token_row);
    position.push_back(token_position);
    index.push_back(token_index);
  }
  const int32_t* table(const Layer& layer, int t) const {
    const Table& table = rows.tables[layer.spec.kv_group];
    return table.blocks + row[t] * table.stride;
  }
};

// Call work(t) for tokens [from, to). Each task has a whole tile if there are enough tokens: workers that
// write to the same cache lines would wait for each other.
template <typename F>
void Model::for_each_token(int from, int to, F&& work) {
  const int workers = to - from < kTile ? threads_ : threads_prefill_;
  const int each = to - from >= 4 * kTile * workers ? kTile : std::max(1, ceil_div(to - from, workers));
  thread_pool_.parallel_for(ceil_div(to - from, each), [&](int n) {
    const int end = std::min(to, from + (n + 1) * each);
    for (int t = from + n * each; t < end; t++) work(t);
  });
}

}  // namespace twostroke
