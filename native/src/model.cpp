#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace twostroke {

namespace {
constexpr int kSmall = 4;         // tokens of a step that every member norms for itself
constexpr int kSplit = 64;        // cached positions of a decode task
constexpr int kUnit = 2 * kBlock;  // rows of gate and up that make one block of the inner layer

// Tasks of a product at the least. (Weights that pass by once are read best in long runs, one for
// each member; with many tokens more tasks even out what the members lose to others.)
constexpr int kTasks = 16;

int ceil_div(int a, int b) { return (a + b - 1) / b; }
}  // namespace

void check_model(const Shape& s, const std::vector<Layer>& layers, const Matrix& embed,
                 const Matrix& head, size_t final_norm, int lanes) {
  const int q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const size_t hidden = s.hidden, dim = s.dim;
  auto fits = [&](const Matrix& m, int rows, int cols) {
    return m.packed().rows == rows && m.packed().cols == cols && m.packed().lanes == lanes;
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

// What one step is made of, worked out before the team starts.
struct Model::Step {
  const Rows& rows;
  const Pool& pool;
  const std::vector<Slot>& decode;
  const std::vector<Chunk>& prefill;
  std::vector<int32_t> row, position;  // of every token
  int tokens, small, splits;

  const int32_t* table(int t) const { return rows.tables + row[t] * rows.tables_stride; }
};

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
  own_.resize(team_.size());
  for (Quantised& own : own_) resize(own, kTile, shape_.hidden);
  const int group = shape_.heads / shape_.kv_heads;
  scratch_.assign(team_.size(), std::vector<float>(prefill_scratch_floats(group, shape_.dim)));
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
  if (a.values.size() >= padded * width) return;
  a.values.resize(padded * width);
  a.codes.resize(padded * blocks * kBlock);
  a.scale.resize(padded * blocks);
  a.sum.resize(padded * blocks);
  a.halves.resize(padded * blocks * 2);
}

Activations Model::view(const Quantised& a, int width) const {
  return {a.values.data(), width,          exact_ ? nullptr : a.codes.data(),
          a.scale.data(),  a.sum.data(), ceil_div(width, kBlock), a.halves.data()};
}

// Channels [from, from + n) of token t, from a block's beginning on.
void Model::quantise(Quantised& a, int t, int from, int n, int width) const {
  if (exact_) return;
  const float* x = a.values.data() + static_cast<size_t>(t) * width + from;
  k_.quantise(x, n, t, from / kBlock, ceil_div(width, kBlock), a.codes.data(), a.scale.data(),
              a.sum.data(), a.halves.data());
}

void Model::norm(const float* x, const std::vector<float>& weight, Quantised& a, int t) const {
  const int n = shape_.hidden;
  k_.rms_norm(x, weight.data(), shape_.eps, n, a.values.data() + static_cast<size_t>(t) * n);
  quantise(a, t, 0, n, n);
}

void Model::reserve(int tokens) {
  const Shape& s = shape_;
  const size_t q = s.heads * s.dim, kv = s.kv_heads * s.dim;
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  if (x_.size() < padded * s.hidden) {
    x_.resize(padded * s.hidden);
    qkv_.resize(padded * (q + 2 * kv));
    gate_up_.resize(padded * 2 * s.inner);
  }
  resize(normed_, tokens, s.hidden);
  resize(attended_, tokens, static_cast<int>(q));
  resize(inner_, tokens, s.inner);
}

// ── a step ──────────────────────────────────────────────────────────────────────────────────────

void Model::forward(const Rows& rows, const Pool& pool, const std::vector<Slot>& decode,
                    const std::vector<Chunk>& prefill, const int32_t* which, int count,
                    float* out) {
  Step step{rows, pool, decode, prefill, {}, {}, 0, 0, 1};
  int longest = 0;
  for (const Slot& slot : decode) {
    step.row.push_back(slot.row);
    step.position.push_back(slot.position);
    longest = std::max(longest, slot.position + 1);
  }
  for (const Chunk& chunk : prefill) {
    for (int n = 0; n < chunk.size; n++) {
      step.row.push_back(chunk.row);
      step.position.push_back(chunk.start + n);
    }
  }
  step.tokens = tokens_ = static_cast<int>(step.row.size());
  step.small = step.tokens <= kSmall;
  const int members = prefill.empty() ? threads_ : threads_prefill_;
  const int tasks = static_cast<int>(decode.size()) * shape_.kv_heads;
  // Always the same parts, whoever else is in the step: so a stream's sums never depend on others.
  step.splits = std::max(1, ceil_div(longest, kSplit));
  reserve(step.tokens);
  resize(last_, std::max(count, 1), shape_.hidden);
  const size_t group = shape_.heads / shape_.kv_heads;
  partial_.resize(std::max(partial_.size(), tasks * step.splits * group * (shape_.dim + 2)));
  team_.run(members, [&](int member) {
    team_.share(step.tokens, [&](int t) {
      const int32_t token = rows.tokens[step.row[t] * rows.tokens_stride + step.position[t]];
      k_.unpack_row(embed_->packed(), token, &x_[static_cast<size_t>(t) * shape_.hidden]);
    });
    for (size_t n = 0; n < layers_.size(); n++) run_layer(step, static_cast<int>(n), member);
    if (count > 0) head(which, count, out);
  });
}

void Model::run_layer(const Step& step, int index, int member) {
  const Shape& s = shape_;
  const Layer& layer = layers_[index];
  const int tokens = step.tokens, hidden = s.hidden, q = s.heads * s.dim;
  const int wide = q + 2 * s.kv_heads * s.dim;
  const size_t plane = static_cast<size_t>(step.pool.blocks) * step.pool.block_size * s.kv_heads *
                       s.dim;
  const Cache cache{step.pool.data + 2 * index * plane, step.pool.data + (2 * index + 1) * plane,
                    step.pool.block_size, s.kv_heads, s.dim};
  Quantised& normed = step.small ? own_[member] : normed_;
  auto norm_all = [&](const std::vector<float>& weight) {
    if (step.small) {
      for (int t = 0; t < tokens; t++) norm(&x_[static_cast<size_t>(t) * hidden], weight, normed, t);
    } else {
      team_.share(tokens, [&](int t) {
        norm(&x_[static_cast<size_t>(t) * hidden], weight, normed, t);
      });
    }
  };
  norm_all(layer.attn_norm);
  multiply(*layer.qkv, view(normed, hidden), tokens, qkv_.data(), wide, false);
  attend(step, layer, cache, member);
  multiply(*layer.o, view(attended_, q), tokens, x_.data(), hidden, true);
  norm_all(layer.mlp_norm);
  // Gate and up of 32 channels, and at once what the next product wants of them.
  const Packed& w = layer.gate_up->packed();
  const int units = ceil_div(2 * s.inner, kUnit), per_task = std::max(1, ceil_div(units, num_tasks(tokens)));
  const Activations a = view(normed, hidden);
  team_.share(ceil_div(units, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(units, from + per_task);
    const int g1 = std::min(w.groups(), to * kUnit / w.lanes);
    k_.matmul(w, a, 0, tokens, from * kUnit / w.lanes, g1, gate_up_.data(), 2 * s.inner, false);
    for (int unit = from; unit < to; unit++) {
      const int first = unit * kBlock, n = std::min(kBlock, s.inner - first);
      for (int t = 0; t < tokens; t++) {
        const float* pair = &gate_up_[static_cast<size_t>(t) * 2 * s.inner + unit * kUnit];
        k_.silu_mul(pair, pair + n, n, &inner_.values[static_cast<size_t>(t) * s.inner + first]);
        quantise(inner_, t, first, n, s.inner);
      }
    }
  });
  multiply(*layer.down, view(inner_, s.inner), tokens, x_.data(), hidden, true);
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
    k_.matmul(w.packed(), a, 0, tokens, from, std::min(groups, from + per_task), out, stride, add);
  });
}

// ── attention ───────────────────────────────────────────────────────────────────────────────────

// The queries of one KV head and its key: normed, rotated; key and value into the cache.
void Model::rotate_and_store(const Step& step, const Layer& layer, const Cache& cache, int t,
                             int kv) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim, position = step.position[t];
  float* line = &qkv_[static_cast<size_t>(t) * (s.heads + 2 * s.kv_heads) * dim];
  float *q = line + kv * group * dim, *key = line + (s.heads + kv) * dim;
  const float* value = line + (s.heads + s.kv_heads + kv) * dim;
  if (!layer.q_norm.empty()) {
    for (int g = 0; g < group; g++)
      k_.rms_norm(q + g * dim, layer.q_norm.data(), s.eps, dim, q + g * dim);
    k_.rms_norm(key, layer.k_norm.data(), s.eps, dim, key);
  }
  const float* cos = &cos_[static_cast<size_t>(position) * s.rope_half];
  const float* sin = &sin_[static_cast<size_t>(position) * s.rope_half];
  k_.rope(q, group, dim, cos, sin, s.rope_half);
  k_.rope(key, 1, dim, cos, sin, s.rope_half);
  const size_t at = cache.offset(step.table(t), position, kv);
  k_.to_half(key, dim, cache.keys + at);
  k_.to_half(value, dim, cache.values + at);
}

void Model::attend(const Step& step, const Layer& layer, const Cache& cache, int member) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim, q = s.heads * dim;
  const int decoding = static_cast<int>(step.decode.size());
  const int chunk_tokens = step.tokens - decoding;
  // A chunk's queries see keys that other tasks make; a decode slot needs only its own.
  if (chunk_tokens > 0) {
    team_.share(chunk_tokens, [&](int n) {
      for (int kv = 0; kv < s.kv_heads; kv++)
        rotate_and_store(step, layer, cache, decoding + n, kv);
    });
  }
  if (step.splits > 1) {
    team_.share(decoding * s.kv_heads, [&](int n) {
      rotate_and_store(step, layer, cache, n / s.kv_heads, n % s.kv_heads);
    });
  }
  std::vector<int> tiles;  // of each chunk
  int tasks = 0;
  for (const Chunk& chunk : step.prefill) {
    tiles.push_back(ceil_div(chunk.size, kQueries));
    tasks += tiles.back() * s.kv_heads;
  }
  const int decode_tasks = decoding * s.kv_heads * step.splits;
  const bool whole_blocks = (group * dim) % kBlock == 0;
  team_.share(tasks + decode_tasks, [&](int n) {
    if (n >= tasks) return attend_one(step, layer, cache, n - tasks, member);
    int first = decoding, at = tasks - 1 - n;  // the last tiles have the most keys: those first
    size_t c = 0;
    for (; at >= tiles[c] * s.kv_heads; c++) {
      at -= tiles[c] * s.kv_heads;
      first += step.prefill[c].size;
    }
    const Chunk& chunk = step.prefill[c];
    const int kv = at % s.kv_heads, from = at / s.kv_heads * kQueries;
    const int count = std::min(kQueries, chunk.size - from);
    const int stride = (s.heads + 2 * s.kv_heads) * dim;
    const float* queries = &qkv_[static_cast<size_t>(first + from) * stride];
    float* out = &attended_.values[static_cast<size_t>(first + from) * q];
    k_.attend_prefill(cache, step.table(first), queries, stride, chunk.start + from, count, kv,
                      group, 1.0f / std::sqrt(static_cast<float>(dim)), layer.window,
                      scratch_[member].data(), out, q);
    if (whole_blocks)
      for (int t = first + from; t < first + from + count; t++)
        quantise(attended_, t, kv * group * dim, group * dim, q);
  });
  if (step.splits > 1) {
    team_.share(decoding * s.kv_heads,
                [&](int n) { merge(step, n / s.kv_heads, n % s.kv_heads); });
  }
  if (!whole_blocks)
    team_.share(step.tokens, [&](int t) { quantise(attended_, t, 0, q, q); });
}

// One part of a decode slot's context, for the heads of one KV head.
void Model::attend_one(const Step& step, const Layer& layer, const Cache& cache, int task,
                       int member) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim;
  const int part = task % step.splits, kv = task / step.splits % s.kv_heads;
  const int t = task / step.splits / s.kv_heads, end = step.position[t] + 1;
  if (step.splits == 1) rotate_and_store(step, layer, cache, t, kv);
  const int begin = layer.window > 0 ? std::max(0, end - layer.window) : 0;
  const int from = std::max(begin, part * kSplit);
  const int to = std::min(end, (part + 1) * kSplit);
  float* acc = &partial_[static_cast<size_t>(task) * group * (dim + 2)];
  float *largest = acc + group * dim, *sum = largest + group;
  const float* queries = &qkv_[static_cast<size_t>(t) * (s.heads + 2 * s.kv_heads) * dim];
  k_.attend_decode(cache, step.table(t), queries, from, to, kv, group,
                   1.0f / std::sqrt(static_cast<float>(dim)), acc, largest, sum);
  (void)member;
  if (step.splits > 1) return;
  merge(step, t, kv);
}

void Model::merge(const Step& step, int t, int kv) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim, q = s.heads * dim;
  const size_t size = static_cast<size_t>(group) * (dim + 2);
  const float* parts = &partial_[static_cast<size_t>(t * s.kv_heads + kv) * step.splits * size];
  for (int g = 0; g < group; g++) {
    float* out = &attended_.values[static_cast<size_t>(t) * q + (kv * group + g) * dim];
    float largest = -INFINITY, total = 0;
    for (int p = 0; p < step.splits; p++)
      largest = std::max(largest, parts[p * size + group * dim + g]);
    std::fill(out, out + dim, 0.0f);
    for (int p = 0; p < step.splits; p++) {
      const float* part = parts + p * size;
      const float weight = std::exp(part[group * dim + g] - largest);
      total += part[group * (dim + 1) + g] * weight;
      for (int d = 0; d < dim; d++) out[d] += part[g * dim + d] * weight;
    }
    for (int d = 0; d < dim; d++) out[d] /= total;
  }
  if ((group * dim) % kBlock == 0) quantise(attended_, t, kv * group * dim, group * dim, q);
}

// ── the head ────────────────────────────────────────────────────────────────────────────────────

void Model::logits(const int32_t* which, int count, float* out) {
  resize(last_, count, shape_.hidden);
  team_.run(threads_, [&](int) { head(which, count, out); });
}

void Model::head(const int32_t* which, int count, float* out) {
  const int hidden = shape_.hidden;
  team_.share(count, [&](int n) {
    norm(&x_[static_cast<size_t>(which[n]) * hidden], final_norm_, last_, n);
  });
  const Packed& w = head_->packed();
  const int groups = w.groups(), per_task = std::max(1, ceil_div(groups, 64));
  team_.share(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task;
    k_.matmul(w, view(last_, hidden), 0, count, from, std::min(groups, from + per_task), out,
              shape_.vocab, false);
  });
}

}  // namespace twostroke
