#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace twostroke {

namespace {
constexpr int kSmall = 4;         // tokens of a step that every member norms for itself
constexpr int kUnit = 2 * kBlock;  // rows of gate and up that make one block of the inner layer
constexpr int kPanel = 512;       // tokens whose gate and up are kept at one time

// Tasks of a product at the least. (Weights that pass by once are read best in long runs, one for
// each member; with many tokens more tasks even out what the members lose to others.)
constexpr int kTasks = 16;
}  // namespace

void check_model(const Shape& s, const std::vector<Layer>& layers, const Matrix& embed,
                 const Matrix& head, size_t final_norm, const Kernels& kernels) {
  const int q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const size_t hidden = s.hidden, dim = s.dim;
  auto fits = [&](const Matrix& m, int rows, int cols) {
    return m.packed().rows == rows && m.packed().cols == cols && m.packed().lanes == kernels.lanes_of(m.packed().format);
  };
  bool fine = fits(embed, s.vocab, s.hidden) && fits(head, s.vocab, s.hidden);
  fine = fine && final_norm == hidden;
  for (const Layer& layer : layers) {
    fine = fine && fits(*layer.qkv, q + 2 * kv, s.hidden) && fits(*layer.o, s.hidden, q) &&
           fits(*layer.gate_up, 2 * s.inner, s.hidden) && fits(*layer.down, s.hidden, s.inner);
    fine = fine && layer.attn_norm.size() == hidden && layer.mlp_norm.size() == hidden;
    fine = fine && layer.q_norm.size() == layer.k_norm.size();
    fine = fine && (layer.q_norm.empty() || layer.q_norm.size() == dim) && layer.window >= 0;
  }
  if (!fine) throw std::invalid_argument("the model's parts do not fit each other");
}

Model::Model(const Kernels& kernels, const Shape& shape, std::vector<Layer> layers,
             std::shared_ptr<Matrix> embed, std::shared_ptr<Matrix> head,
             std::vector<float> final_norm, std::vector<float> cos, std::vector<float> sin,
             int threads, int threads_prefill, bool exact)
    : k_(kernels),
      shape_(shape),
      layers_(std::move(layers)),
      embed_(std::move(embed)),
      head_(std::move(head)),
      final_norm_(std::move(final_norm)),
      cos_(std::move(cos)),
      sin_(std::move(sin)),
      exact_(exact),
      threads_(threads),
      threads_prefill_(threads_prefill),
      team_(std::max(threads, threads_prefill)) {
  auto is_f16 = [](const std::shared_ptr<Matrix>& m) { return m->packed().format == Format::kF16; };
  any_halves_ = is_f16(head_);
  for (const Layer& layer : layers_)
    for (const auto& m : {layer.qkv, layer.o, layer.gate_up, layer.down})
      any_halves_ = any_halves_ || is_f16(m);
  own_.resize(team_.size());
  both_.resize(team_.size());
  for (Quantised& own : own_) resize(own, kTile, shape_.hidden);
  const int group = shape_.heads / shape_.kv_heads;
  size_t floats = prefill_attention().scratch_floats(group, shape_.dim);
  if (k_.wide.from > 0)
    floats = std::max(floats, k_.wide.prefill.scratch_floats(group, shape_.dim));
  scratch_.assign(team_.size(), std::vector<float>(floats));
}

size_t Model::num_bytes() const {
  size_t total = embed_->num_bytes() + (head_ == embed_ ? 0 : head_->num_bytes());
  for (const Layer& layer : layers_)
    total += layer.qkv->num_bytes() + layer.o->num_bytes() + layer.gate_up->num_bytes() +
             layer.down->num_bytes();
  return total;
}

// ── activations ─────────────────────────────────────────────────────────────────────────────────

void Model::resize(Quantised& a, int tokens, int width) const {
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  const size_t blocks = ceil_div(width, kBlock);
  a.is_wide = is_wide(tokens);
  if (a.is_wide) {
    const size_t rows = ceil_div(tokens, kWideRows) * static_cast<size_t>(kWideRows);
    const size_t needed = rows * blocks * kBlock;
    if (a.wide.size() < needed) a.wide.resize(needed);
  }
  if (a.values.size() >= padded * width) return;
  const size_t places = padded * (blocks + 1);
  a.values.resize(padded * width);
  a.codes.resize(places * kBlock);
  a.scale.resize(places);
  a.sum.resize(places);
  a.halves.resize(places * 2);
  a.again.resize(padded);
  if (any_halves_) {
    a.half.resize(padded * blocks * kBlock);
    a.half_scale.resize(padded * blocks);
  }
}

// Whether a step of so many tokens goes through the machine's matrix units.
bool Model::is_wide(int tokens) const {
  return !exact_ && k_.wide.from > 0 && tokens >= k_.wide.from;
}

Activations Model::view(const Quantised& a, int width, bool again) const {
  return {a.values.data(), width,        exact_ ? nullptr : a.codes.data(),
          a.scale.data(),  a.sum.data(), ceil_div(width, kBlock),
          a.halves.data(), a.is_wide ? a.wide.data() : nullptr,
          again ? a.again.data() : nullptr,
          exact_ || a.half.empty() ? nullptr : a.half.data(), a.half_scale.data()};
}

// Channels [from, from + n) of token t, from a block's beginning on, as the product with `next`
// wants them. `again`: all of them, and the coarsest block once more.
void Model::quantise(Quantised& a, int t, int from, int n, const Matrix& next, bool again) const {
  if (exact_) return;
  const Packed& w = next.packed();
  const int blocks = w.blocks, places = again ? blocks + 1 : blocks;
  const float* x = a.values.data() + static_cast<size_t>(t) * w.cols + from;
  if (w.format == Format::kF16)
    return k_.halves.to_halves(x, n, t, from / kBlock, blocks, a.half.data(), a.half_scale.data());
  if (a.is_wide) return k_.wide.to_bf16(x, n, &a.wide[wide_at(t, from / kBlock, blocks)]);
  k_.quantise(x, n, t, from / kBlock, places, a.codes.data(), a.scale.data(), a.sum.data(),
              a.halves.data());
  if (again)
    a.again[t] = k_.quantise_rest(x, n, t, places, a.codes.data(), a.scale.data(), a.sum.data(),
                                  a.halves.data());
}

void Model::norm(const float* x, const std::vector<float>& weight, Quantised& a, int t,
                 const Matrix& next, bool again) const {
  const int n = shape_.hidden;
  k_.rms_norm(x, weight.data(), shape_.eps, n, a.values.data() + static_cast<size_t>(t) * n);
  quantise(a, t, 0, n, next, again);
}

void Model::reserve(int tokens) {
  const Shape& s = shape_;
  const size_t q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  if (x_.size() < padded * s.hidden) {
    x_.resize(padded * s.hidden);
    qkv_.resize(padded * (q + 2 * kv));
  }
  resize(normed_, tokens, s.hidden);
  resize(attended_, tokens, static_cast<int>(q));
  resize(inner_, tokens, s.inner);
}

// ── a step ──────────────────────────────────────────────────────────────────────────────────────

void Model::forward(const Rows& rows, const Pool& pool, const std::vector<Slot>& decode,
                    const std::vector<Chunk>& prefill, const int32_t* which, int count, float* out,
                    bool keep_all) {
  const int members = prefill.empty() ? threads_ : threads_prefill_;
  Step step{rows, pool, decode, prefill, {}, {}};
  for (const Slot& slot : decode) {
    step.row.push_back(slot.row);
    step.position.push_back(slot.position);
  }
  for (const Chunk& chunk : prefill) {
    for (int n = 0; n < chunk.size; n++) {
      step.row.push_back(chunk.row);
      step.position.push_back(chunk.start + n);
    }
  }
  // Few tokens of a chunk are wanted: once all keys and values are stored, the last layer goes on
  // with those alone, as with decode slots.
  std::vector<Slot> slots;
  std::vector<int32_t> order;
  const std::vector<Chunk> no_chunks;
  Step wanted{rows, pool, slots, no_chunks, {}, {}};
  wanted.stored = true;
  const bool all = keep_all || prefill.empty();
  for (int n = 0; n < count && !all; n++) {
    slots.push_back({step.row[which[n]], step.position[which[n]]});
    wanted.row.push_back(slots.back().row);
    wanted.position.push_back(slots.back().position);
    order.push_back(n);
  }
  plan(step, members);
  if (!all) plan(wanted, members);
  kept_ = all ? step.tokens : 0;
  reserve(step.tokens);
  resize(last_, std::max(count, 1), shape_.hidden);
  since_ = std::chrono::steady_clock::now();
  team_.run(members, [&](int member) {
    share_tokens(0, step.tokens, [&](int t) {
      const int32_t token = rows.tokens[step.row[t] * rows.tokens_stride + step.position[t]];
      k_.unpack_row(embed_->packed(), token, &x_[static_cast<size_t>(t) * shape_.hidden]);
    });
    lap(kEmbed, member);
    for (size_t n = 0; n < layers_.size(); n++) {
      const Layer& layer = layers_[n];
      const Cache cache = cache_of(step, n);
      project(step, layer, member);
      if (all || n + 1 < layers_.size()) {
        attend(step, layer, cache, member);
        finish(step, layer, member);
        continue;
      }
      store(step, layer, cache, 0);
      lap(kStore, member);
      if (count == 0) break;
      team_.share(1, [&](int) { pick(wanted, which); });
      attend(wanted, layer, cache, member);
      finish(wanted, layer, member);
    }
    if (count > 0) head(all ? which : order.data(), count, out);
    lap(kHead, member);
  });
}

// What follows from a step's tokens.
void Model::plan(Step& step, int members) {
  const int decoding = static_cast<int>(step.decode.size());
  int longest = 0;
  for (const Slot& slot : step.decode) longest = std::max(longest, slot.position + 1);
  step.tokens = static_cast<int>(step.row.size());
  step.small = step.tokens <= kSmall;
  // Always the same parts, whoever else is in the step: so a stream's sums never depend on others.
  step.splits = std::max(1, ceil_div(longest, kSplit));
  step.whole = decoding >= 4 * members;
  const size_t parts = static_cast<size_t>(decoding) * shape_.kv_heads * step.splits;
  const size_t group = shape_.heads / shape_.kv_heads;
  partial_.resize(std::max(partial_.size(), parts * group * (shape_.dim + 2)));
}

// The wanted tokens to the front: what is left of the step is theirs.
void Model::pick(const Step& wanted, const int32_t* which) {
  const size_t hidden = shape_.hidden, line = (shape_.heads + 2 * shape_.kv_heads) * shape_.dim;
  for (int n = 0; n < wanted.tokens; n++) {
    std::memmove(&x_[n * hidden], &x_[which[n] * hidden], hidden * sizeof(float));
    std::memmove(&qkv_[n * line], &qkv_[which[n] * line], line * sizeof(float));
  }
  reserve(wanted.tokens);
}

// The time since the last lap was this stage's.
void Model::lap(Stage stage, int member) {
  if (member != 0) return;
  const auto now = std::chrono::steady_clock::now();
  spent_[stage] += std::chrono::duration<double>(now - since_).count();
  since_ = now;
}

Cache Model::cache_of(const Step& step, size_t index) const {
  const Pool& pool = step.pool;
  const size_t plane =
      static_cast<size_t>(pool.blocks) * pool.block_size * shape_.kv_heads * shape_.dim;
  return {pool.data + 2 * index * plane, pool.data + (2 * index + 1) * plane, pool.block_size,
          shape_.kv_heads, shape_.dim};
}

void Model::norm_all(const Step& step, const std::vector<float>& weight, const Matrix& next,
                     bool again, int member) {
  Quantised& normed = step.small ? own_[member] : normed_;
  auto one = [&](int t) {
    norm(&x_[static_cast<size_t>(t) * shape_.hidden], weight, normed, t, next, again);
  };
  if (step.small) {
    for (int t = 0; t < step.tokens; t++) one(t);
  } else {
    share_tokens(0, step.tokens, one);
  }
  lap(kNorm, member);
}

// Queries, keys and values of every token.
void Model::project(const Step& step, const Layer& layer, int member) {
  const int wide = (shape_.heads + 2 * shape_.kv_heads) * shape_.dim;
  norm_all(step, layer.attn_norm, *layer.qkv, true, member);
  const Quantised& normed = step.small ? own_[member] : normed_;
  multiply(*layer.qkv, view(normed, shape_.hidden, true), step.tokens, qkv_.data(), wide, false);
  lap(kQkv, member);
}

// What comes after attention.
void Model::finish(const Step& step, const Layer& layer, int member) {
  const int tokens = step.tokens, hidden = shape_.hidden, inner = shape_.inner;
  multiply(*layer.o, view(attended_, shape_.heads * shape_.dim), tokens, x_.data(), hidden, true);
  lap(kOutput, member);
  norm_all(step, layer.mlp_norm, *layer.gate_up, false, member);
  const Quantised& normed = step.small ? own_[member] : normed_;
  gate_and_up(layer, view(normed, hidden), tokens, member);
  lap(kGateUp, member);
  multiply(*layer.down, view(inner_, inner), tokens, x_.data(), hidden, true);
  lap(kDown, member);
}

// Gate and up of some channels, and at once what the next product wants of them: a panel of tokens
// at a time, which stays in the caches in between.
void Model::gate_and_up(const Layer& layer, const Activations& a, int tokens, int member) {
  const int inner = shape_.inner, units = ceil_div(2 * inner, kUnit);
  const int per_task = std::max(1, ceil_div(units, num_tasks(tokens)));
  const Packed& w = layer.gate_up->packed();
  std::vector<float>& both = both_[member];
  team_.share(ceil_div(units, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(units, from + per_task);
    const int g0 = from * kUnit / w.lanes, g1 = std::min(w.groups(), to * kUnit / w.lanes);
    const int stride = (to - from) * kUnit;
    const size_t needed = static_cast<size_t>(std::min(tokens, kPanel)) * stride;
    if (both.size() < needed) both.resize(needed);
    for (int t0 = 0; t0 < tokens; t0 += kPanel) {
      const int t1 = std::min(tokens, t0 + kPanel);
      k_.matmul(w, a, t0, t1, g0, g1, both.data(), stride, false);
      for (int unit = from; unit < to; unit++) {
        const int first = unit * kBlock, n = std::min(kBlock, inner - first);
        const float* pair = &both[(unit - from) * kUnit];
        for (int t = t0; t < t1; t++, pair += stride) {
          k_.silu_mul(pair, pair + n, n, &inner_.values[static_cast<size_t>(t) * inner + first]);
          quantise(inner_, t, first, n, *layer.down);
        }
      }
    }
  });
}

int Model::num_tasks(int tokens) const {
  const int members = tokens < kTile ? threads_ : threads_prefill_;
  return tokens < kTile ? members : std::max(kTasks, 4 * members);
}

void Model::multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                     bool add) {
  const int groups = w.packed().groups(), per_task = std::max(1, ceil_div(groups, num_tasks(tokens)));
  team_.share(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task;
    k_.matmul(w.packed(), a, 0, tokens, from, std::min(groups, from + per_task),
              out + from * w.packed().lanes, stride, add);
  });
}

// ── the head ────────────────────────────────────────────────────────────────────────────────────

void Model::logits(const int32_t* which, int count, float* out) {
  resize(last_, count, shape_.hidden);
  team_.run(threads_, [&](int) { head(which, count, out); });
}

void Model::head(const int32_t* which, int count, float* out) {
  const int hidden = shape_.hidden;
  share_tokens(0, count, [&](int n) {
    norm(&x_[static_cast<size_t>(which[n]) * hidden], final_norm_, last_, n, *head_, true);
  });
  const Packed& w = head_->packed();
  const int groups = w.groups(), per_task = std::max(1, ceil_div(groups, 64));
  team_.share(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task;
    k_.matmul(w, view(last_, hidden, true), 0, count, from, std::min(groups, from + per_task),
              out + from * w.lanes, shape_.vocab, false);
  });
}

}  // namespace twostroke
