// Attention of a step: stores keys and values in the cache, then computes chunks and decode slots.
#include <algorithm>
#include <cmath>

#include "step.h"

namespace twostroke {

namespace {
void multiply_channels(float* x, const float* by, int dim) {
  for (int d = 0; d < dim; d++) x[d] *= by[d];
}
}  // namespace

// Apply norms, rope and scales to the queries and the key of one KV head. Store key and value in the
// cache.
void Model::rotate_and_store(const Step& step, const Layer& layer, const Cache& cache, int t,
                             int kv) {
  const int group = layer.heads_per_kv(), dim = layer.dim();
  float* line = &qkv_[static_cast<size_t>(t) * layer.qkv_size()];
  float *q = line + kv * group * dim, *key = line + layer.q_size() + kv * dim;
  const float* value = key + layer.kv_size();
  if (layer.has_head_norms()) {
    for (int g = 0; g < group; g++)
      k_.rms_norm(q + g * dim, layer.q_norm.data(), parts_.spec.norm_eps, dim, q + g * dim);
    k_.rms_norm(key, layer.k_norm.data(), parts_.spec.norm_eps, dim, key);
  }
  const Rope& rope = parts_.ropes[layer.rope_table()];
  const size_t angles = static_cast<size_t>(step.position[t]) * rope.half;
  k_.rope(q, group, dim, &rope.cos[angles], &rope.sin[angles], rope.half);
  k_.rope(key, 1, dim, &rope.cos[angles], &rope.sin[angles], rope.half);
  const float scale = rope.query_scales.empty() ? 1.0f : rope.query_scales[step.position[t]];
  if (scale != 1.0f)
    for (int i = 0; i < group * dim; i++) q[i] *= scale;
  if (!layer.key_scales.empty()) {
    for (int g = 0; g < group; g++) multiply_channels(q + g * dim, &layer.key_scales[kv * dim], dim);
    multiply_channels(key, &layer.key_factors[kv * dim], dim);
  }
  if (cache.is_int8) {
    cache.store_int8(cache.keys, step.table(layer, t), step.index[t], kv, key);
    return cache.store_int8(cache.values, step.table(layer, t), step.index[t], kv, value);
  }
  const size_t at = cache.offset(step.table(layer, t), step.index[t], kv);
  k_.to_fp16(key, dim, cache.keys + at);
  k_.to_fp16(value, dim, cache.values + at);
}

void Model::store(const Step& step, const Layer& layer, const Cache& cache, int from, int to) {
  for_each_token(from, to, [&](int t) {
    if (layer.latent != nullptr) return rotate_and_store_latent(step, layer, cache, t);
    for (int kv = 0; kv < layer.kv_heads(); kv++) rotate_and_store(step, layer, cache, t, kv);
  });
}

void Model::attend(const Step& step, const Layer& layer, const Cache& cache, int worker) {
  if (layer.latent != nullptr) return attend_latent(step, layer, cache, worker);
  const int group = layer.heads_per_kv(), dim = layer.dim(), q = layer.q_size();
  const int kv_heads = layer.kv_heads(), stride = layer.qkv_size();
  const int decoding = static_cast<int>(step.decode.size());
  // Queries of a chunk, and slots of one row, read keys that other tasks store, so the keys are stored
  // first. A slot that is alone in its row needs only its own key: its task stores that key itself.
  if (step.tokens > decoding) store(step, layer, cache, decoding, step.tokens);
  if (!step.stored && !step.whole) {
    thread_pool_.parallel_for(decoding * kv_heads, [&](int n) {
      rotate_and_store(step, layer, cache, n / kv_heads, n % kv_heads);
    });
  } else if (!step.stored && !step.one_each) {
    store(step, layer, cache, 0, decoding);
  }
  end_stage(kStore, worker);
  const bool matrix_units = uses_matrix_units(step.tokens);
  const PrefillAttention& tile =
      cache.is_int8 ? (matrix_units ? k_.matrix_units.int8_prefill : int8_attention(dim).prefill)
                    : (matrix_units ? k_.matrix_units.prefill : prefill_attention(dim));
  std::vector<int> tiles;  // per chunk
  int tasks = 0;
  for (const Chunk& chunk : step.prefill) {
    tiles.push_back(ceil_div(chunk.size, tile.queries));
    tasks += tiles.back() * kv_heads;
  }
  const int decode_tasks = decoding * (step.whole ? 1 : kv_heads * splits(step, layer));
  const bool whole_blocks = (group * dim) % kBlock == 0;
  thread_pool_.parallel_for(tasks + decode_tasks, [&](int n) {
    if (n >= tasks) return attend_slot(step, layer, cache, n - tasks);
    int first = decoding, at = tasks - 1 - n;  // the last tiles have the most keys and start first
    size_t c = 0;
    for (; at >= tiles[c] * kv_heads; c++) {
      at -= tiles[c] * kv_heads;
      first += step.prefill[c].size;
    }
    const Chunk& chunk = step.prefill[c];
    const int kv = at % kv_heads, from = at / kv_heads * tile.queries;
    const int count = std::min(tile.queries, chunk.size - from);
    const float* queries = &qkv_[static_cast<size_t>(first + from) * stride];
    float* out = &attended_.values[static_cast<size_t>(first + from) * q];
    tile.attend(cache, step.table(layer, first), queries, stride, chunk.index + from, count, kv,
                group, layer.attention(), scratch_[worker].data(), out, q);
    if (whole_blocks)
      for (int t = first + from; t < first + from + count; t++)
        quantise(attended_, t, kv * group * dim, group * dim, *layer.o);
  });
  end_stage(kAttend, worker);
  if (!step.whole) {
    thread_pool_.parallel_for(decoding * kv_heads,
                       [&](int n) { merge(step, layer, n / kv_heads, n % kv_heads); });
  }
  if (!whole_blocks)
    for_each_token(0, step.tokens, [&](int t) { quantise(attended_, t, 0, q, *layer.o); });
  end_stage(kMerge, worker);
}

// Compute one whole decode slot; or, if there are few slots, one part of its context for one group of
// heads.
void Model::attend_slot(const Step& step, const Layer& layer, const Cache& cache, int task) {
  const int each = splits(step, layer), groups = layer.num_head_groups();
  // All heads of a part come before the next part, because the heads of a block are contiguous.
  auto at = [&](int slot, int n) { return (slot * groups + n % groups) * each + n / groups; };
  if (!step.whole) {
    const int parts = groups * each;
    return attend_part(step, layer, cache, at(task / parts, task % parts));
  }
  const bool plain = layer.latent == nullptr;
  if (plain && !step.stored && step.one_each)
    for (int kv = 0; kv < layer.kv_heads(); kv++) rotate_and_store(step, layer, cache, task, kv);
  const int parts = groups * num_slot_splits(step, layer, task);
  prefetch_part(step, layer, cache, at(task, 0));
  for (int n = 0; n < parts; n++) {
    if (n + 1 < parts) prefetch_part(step, layer, cache, at(task, n + 1));
    attend_part(step, layer, cache, at(task, n));
  }
  if (plain)
    for (int kv = 0; kv < layer.kv_heads(); kv++) merge(step, layer, task, kv);
}

// The number of parts that a context is split into. A window reaches into the last parts only.
int Model::splits(const Step& step, const Layer& layer) const {
  const int window = layer.window(), size = split_size(layer);
  const int all = ceil_div(step.longest, size);
  return window > 0 ? std::min(all, (window - 2) / size + 2) : all;
}

// The number of parts that are not empty for slot t.
int Model::num_slot_splits(const Step& step, const Layer& layer, int t) const {
  const int end = step.index[t] + 1, window = layer.window(), size = split_size(layer);
  const int begin = window > 0 ? std::max(0, end - window) : 0;
  return ceil_div(end, size) - begin / size;
}

// Part n of the contexts of all decode slots, ordered by slot, group of heads, and place.
Model::ContextPart Model::context_part(const Step& step, const Layer& layer, int n) const {
  const int parts = splits(step, layer), groups = layer.num_head_groups(), t = n / parts / groups;
  const int end = step.index[t] + 1, window = layer.window(), size = split_size(layer);
  const int begin = window > 0 ? std::max(0, end - window) : 0;
  const int place = begin / size + n % parts;
  const int from = std::max(begin, place * size), to = std::min(end, (place + 1) * size);
  return {t, n / parts % groups, from, std::max(from, to)};
}

void Model::prefetch_part(const Step& step, const Layer& layer, const Cache& cache, int n) const {
  const ContextPart p = context_part(step, layer, n);
  if (layer.latent == nullptr && !prefetches_keys(cache)) k_.prefetch_keys(cache, step.table(layer, p.slot), p.from, p.to, p.group);
}

void Model::attend_part(const Step& step, const Layer& layer, const Cache& cache, int n) {
  const int together = layer.heads_per_task(), dim = layer.cached_dim();
  const ContextPart p = context_part(step, layer, n);
  if (p.from == p.to) return;
  float* acc = &partial_[static_cast<size_t>(n) * together * (dim + 2)];
  float *largest = acc + together * dim, *sum = largest + together;
  const int32_t* table = step.table(layer, p.slot);
  const DecodeAttention attend_one = cache.is_int8  ? int8_attention(dim).decode
                                     : in_fp16(dim) ? k_.fp16.decode
                                                    : k_.decode;
  if (layer.latent != nullptr) {
    const int first = p.group * together, count = std::min(together, layer.heads() - first);
    const float* queries = &latent_space_q_[(static_cast<size_t>(p.slot) * layer.heads() + first) * dim];
    return attend_one(cache, table, queries, p.from, p.to, 0, count, layer.attention(), acc, largest, sum);
  }
  const float* queries = &qkv_[static_cast<size_t>(p.slot) * layer.qkv_size()];
  if (!step.whole && !prefetches_keys(cache)) k_.prefetch_keys(cache, table, p.from, p.to, p.group);
  attend_one(cache, table, queries, p.from, p.to, p.group, together, layer.attention(), acc, largest, sum);
}

// Merge the parts of one head into `cached_dim` channels.
void Model::merge_head(const Step& step, const Layer& layer, int t, int head, float* out) {
  const int together = layer.heads_per_task(), dim = layer.cached_dim();
  const int num_parts = num_slot_splits(step, layer, t);
  const int group = head / together, g = head % together;
  const size_t size = static_cast<size_t>(together) * (dim + 2);
  const float* parts = &partial_[static_cast<size_t>(t * layer.num_head_groups() + group) * splits(step, layer) * size];
  float largest = -INFINITY, total = 0;
  for (int p = 0; p < num_parts; p++)
    largest = std::max(largest, parts[p * size + together * dim + g]);
  std::fill(out, out + dim, 0.0f);
  for (int p = 0; p < num_parts; p++) {
    const float* part = parts + p * size;
    const float weight = std::exp(part[together * dim + g] - largest);
    total += part[together * (dim + 1) + g] * weight;
    for (int d = 0; d < dim; d++) out[d] += part[g * dim + d] * weight;
  }
  total += layer.attention().sink_weight(head, largest);
  if (keeps_shares_ && t < share_slots_) {
    float* shares = &shares_[(static_cast<size_t>(t) * share_heads_ + head) * share_parts_];
    for (int p = 0; p < std::min(num_parts, share_parts_); p++) {
      const float* part = parts + p * size;
      shares[p] += part[together * (dim + 1) + g] * std::exp(part[together * dim + g] - largest) / total;
    }
  }
  for (int d = 0; d < dim; d++) out[d] /= total;
}

void Model::shares(float* out) const {
  int heads = 0;
  for (const Layer& layer : parts_.layers) heads += layer.heads();
  for (int t = 0; t < share_slots_; t++)
    for (int p = 0; p < share_parts_; p++) {
      float sum = 0;
      for (int head = 0; head < share_heads_; head++)
        sum += shares_[(static_cast<size_t>(t) * share_heads_ + head) * share_parts_ + p];
      out[static_cast<size_t>(t) * share_parts_ + p] = sum / heads;
    }
}

void Model::merge(const Step& step, const Layer& layer, int t, int kv) {
  const int group = layer.heads_per_kv(), dim = layer.dim();
  float* out = &attended_.values[static_cast<size_t>(t) * layer.q_size()];
  for (int head = kv * group; head < (kv + 1) * group; head++)
    merge_head(step, layer, t, head, out + head * dim);
  if ((group * dim) % kBlock == 0) quantise(attended_, t, kv * group * dim, group * dim, *layer.o);
}

}  // namespace twostroke
