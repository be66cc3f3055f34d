// What the files of the model share about a step.
#pragma once

#include <algorithm>

#include "model.h"

namespace twostroke {

// Cached tokens of a decode task: of heads' own keys, and of latents.
constexpr int kSplit = 64, kLatentSplit = 256;

inline int split_size(const Layer& layer) { return layer.latent == nullptr ? kSplit : kLatentSplit; }

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What one step is made of, worked out before the team starts.
struct Model::Step {
  const Rows& rows;
  const std::vector<Pool>& pools;
  const std::vector<Slot>& decode;
  const std::vector<Chunk>& prefill;
  std::vector<int32_t> row, position, index;  // of every token
  int tokens = 0, longest = 1;  // longest: of the decode slots' contexts
  bool small = false;   // every member norms all tokens for itself
  bool whole = true;    // a decode slot's parts are one task
  bool stored = false;  // keys and values are in the cache, queries are rotated
  bool one_each = true;  // no row has two slots: a slot reads no key that another one stores

  void add(int32_t its_row, int32_t its_position, int32_t its_index) {
    row.push_back(its_row);
    position.push_back(its_position);
    index.push_back(its_index);
  }
  const int32_t* table(const Layer& layer, int t) const {
    const Table& table = rows.tables[layer.group];
    return table.blocks + row[t] * table.stride;
  }
};

// Tokens [from, to), some at a time: those of one tile lie side by side, and members that write to
// the same lines of a cache wait for each other.
template <typename F>
void Model::for_each_token(int from, int to, F&& work) {
  const int members = to - from < kTile ? threads_ : threads_prefill_;
  const int each = to - from >= 4 * kTile * members ? kTile : std::max(1, ceil_div(to - from, members));
  team_.parallel_for(ceil_div(to - from, each), [&](int n) {
    const int end = std::min(to, from + (n + 1) * each);
    for (int t = from + n * each; t < end; t++) work(t);
  });
}

}  // namespace twostroke
