// What the files of the model share about a step.
#pragma once

#include <algorithm>

#include "model.h"

namespace twostroke {

constexpr int kSplit = 64;  // cached positions of a decode task

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What one step is made of, worked out before the team starts.
struct Model::Step {
  const Rows& rows;
  const Pool& pool;
  const std::vector<Slot>& decode;
  const std::vector<Chunk>& prefill;
  std::vector<int32_t> row, position;  // of every token
  int tokens = 0, splits = 1;
  bool small = false;   // every member norms all tokens for itself
  bool whole = true;    // a decode slot's parts are one task
  bool stored = false;  // keys and values are in the cache, queries are rotated

  const int32_t* table(int t) const { return rows.tables + row[t] * rows.tables_stride; }
};

// Tokens [from, to), some at a time: those of one tile lie side by side, and members that write to
// the same lines of a cache wait for each other.
template <typename F>
void Model::share_tokens(int from, int to, F&& work) {
  const int members = to - from < kTile ? threads_ : threads_prefill_;
  const int each = to - from >= 4 * kTile * members ? kTile : std::max(1, ceil_div(to - from, members));
  team_.share(ceil_div(to - from, each), [&](int n) {
    const int end = std::min(to, from + (n + 1) * each);
    for (int t = from + n * each; t < end; t++) work(t);
  });
}

}  // namespace twostroke
