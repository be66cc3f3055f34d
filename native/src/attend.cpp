// Attention of a step: keys and values into the cache, then chunks and decode slots, each its way.
#include <algorithm>
#include <cmath>

#include "step.h"

namespace twostroke {

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

// All tokens of a step from one on.
void Model::store(const Step& step, const Layer& layer, const Cache& cache, int from) {
  share_tokens(from, step.tokens, [&](int t) {
    for (int kv = 0; kv < shape_.kv_heads; kv++) rotate_and_store(step, layer, cache, t, kv);
  });
}

void Model::attend(const Step& step, const Layer& layer, const Cache& cache, int member) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim, q = s.heads * dim;
  const int decoding = static_cast<int>(step.decode.size());
  const int chunk_tokens = step.tokens - decoding;
  // A chunk's queries see keys that other tasks make; a decode slot needs only its own.
  if (chunk_tokens > 0) store(step, layer, cache, decoding);
  if (!step.whole && !step.stored) {
    team_.share(decoding * s.kv_heads, [&](int n) {
      rotate_and_store(step, layer, cache, n / s.kv_heads, n % s.kv_heads);
    });
  }
  lap(kStore, member);
  const PrefillAttention& tile = is_wide(step.tokens) ? k_.wide.prefill : prefill_attention();
  std::vector<int> tiles;  // of each chunk
  int tasks = 0;
  for (const Chunk& chunk : step.prefill) {
    tiles.push_back(ceil_div(chunk.size, tile.queries));
    tasks += tiles.back() * s.kv_heads;
  }
  const int decode_tasks = decoding * (step.whole ? 1 : s.kv_heads * step.splits);
  const bool whole_blocks = (group * dim) % kBlock == 0;
  team_.share(tasks + decode_tasks, [&](int n) {
    if (n >= tasks) return attend_slot(step, layer, cache, n - tasks);
    int first = decoding, at = tasks - 1 - n;  // the last tiles have the most keys: those first
    size_t c = 0;
    for (; at >= tiles[c] * s.kv_heads; c++) {
      at -= tiles[c] * s.kv_heads;
      first += step.prefill[c].size;
    }
    const Chunk& chunk = step.prefill[c];
    const int kv = at % s.kv_heads, from = at / s.kv_heads * tile.queries;
    const int count = std::min(tile.queries, chunk.size - from);
    const int stride = (s.heads + 2 * s.kv_heads) * dim;
    const float* queries = &qkv_[static_cast<size_t>(first + from) * stride];
    float* out = &attended_.values[static_cast<size_t>(first + from) * q];
    tile.attend(cache, step.table(first), queries, stride, chunk.start + from, count, kv, group,
                1.0f / std::sqrt(static_cast<float>(dim)), layer.window, scratch_[member].data(),
                out, q);
    if (whole_blocks)
      for (int t = first + from; t < first + from + count; t++)
        quantise(attended_, t, kv * group * dim, group * dim, *layer.o);
  });
  lap(kAttend, member);
  if (!step.whole) {
    team_.share(decoding * s.kv_heads,
                [&](int n) { merge(step, layer, n / s.kv_heads, n % s.kv_heads); });
  }
  if (!whole_blocks)
    share_tokens(0, step.tokens, [&](int t) { quantise(attended_, t, 0, q, *layer.o); });
  lap(kMerge, member);
}

// A decode slot, all of it; or (if there are few) one part of its context for one KV head.
void Model::attend_slot(const Step& step, const Layer& layer, const Cache& cache, int task) {
  if (!step.whole) return attend_part(step, layer, cache, task);
  const int parts = step.splits * shape_.kv_heads, first = task * parts;
  if (!step.stored)
    for (int kv = 0; kv < shape_.kv_heads; kv++) rotate_and_store(step, layer, cache, task, kv);
  prefetch_part(step, layer, cache, first);
  for (int n = first; n < first + parts; n++) {
    if (n + 1 < first + parts) prefetch_part(step, layer, cache, n + 1);
    attend_part(step, layer, cache, n);
  }
  for (int kv = 0; kv < shape_.kv_heads; kv++) merge(step, layer, task, kv);
}

// Part n of all decode slots' contexts: by slot, KV head, and place.
Model::Part Model::part(const Step& step, const Layer& layer, int n) const {
  const int place = n % step.splits, t = n / step.splits / shape_.kv_heads;
  const int end = step.position[t] + 1;
  const int begin = layer.window > 0 ? std::max(0, end - layer.window) : 0;
  const int from = std::max(begin, place * kSplit);
  return {t, n / step.splits % shape_.kv_heads, from, std::max(from, std::min(end, (place + 1) * kSplit))};
}

void Model::prefetch_part(const Step& step, const Layer& layer, const Cache& cache, int n) const {
  const Part p = part(step, layer, n);
  k_.prefetch_keys(cache, step.table(p.t), p.from, p.to, p.kv);
}

void Model::attend_part(const Step& step, const Layer& layer, const Cache& cache, int n) {
  const Shape& s = shape_;
  const int group = s.heads / s.kv_heads, dim = s.dim;
  const Part p = part(step, layer, n);
  float* acc = &partial_[static_cast<size_t>(n) * group * (dim + 2)];
  float *largest = acc + group * dim, *sum = largest + group;
  const float* queries = &qkv_[static_cast<size_t>(p.t) * (s.heads + 2 * s.kv_heads) * dim];
  if (!step.whole) k_.prefetch_keys(cache, step.table(p.t), p.from, p.to, p.kv);
  const DecodeAttention attend_one = in_halves() ? k_.halves.decode : k_.decode;
  attend_one(cache, step.table(p.t), queries, p.from, p.to, p.kv, group,
             1.0f / std::sqrt(static_cast<float>(dim)), acc, largest, sum);
}

void Model::merge(const Step& step, const Layer& layer, int t, int kv) {
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
  if ((group * dim) % kBlock == 0) quantise(attended_, t, kv * group * dim, group * dim, *layer.o);
}

}  // namespace twostroke
