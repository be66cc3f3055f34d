// Multi-head latent attention, equivalent to `twostroke/model/torch/latent.py`.
//
//   decode    the query of a head is multiplied by the key rows of kv_b and attends to the cached
//             latents; the result is multiplied by the value rows of kv_b
//   prefill   the latents that a chunk sees are expanded to keys and values, some heads at a time.
//             Attention reads the keys and values like a cache, in fp16 or in fp32
#include <algorithm>
#include <cstring>

#include "step.h"

namespace twostroke {

namespace {
constexpr size_t kExpandedBytes = 64 << 20;  // maximum memory of expanded keys and values; one head may exceed it
constexpr int kExpandedKeys = 64;            // per task
constexpr int kExpandedHeads = 8;            // per task
constexpr int kExpandedSpan = 128;           // a multiple of the key blocks of every kernel
}  // namespace

// ── queries and the cache ───────────────────────────────────────────────────────────────────────

// The queries of all heads of token t.
float* Model::latent_queries(const Layer& layer, int t) {
  if (layer.latent->q_b == nullptr) return &qkv_[static_cast<size_t>(t) * layer.qkv_size()];
  return &latent_q_[static_cast<size_t>(t) * layer.q_size()];
}

void Model::project_latent_queries(const Step& step, const Layer& layer) {
  const Latent& latent = *layer.latent;
  if (latent.q_b == nullptr) return;
  const int rank = latent.q_rank();
  for_each_token(0, step.tokens, [&](int t) {
    float* to = &q_latent_.values[static_cast<size_t>(t) * rank];
    k_.rms_norm(&qkv_[static_cast<size_t>(t) * layer.qkv_size()], latent.q_norm.data(), latent.spec.norm_eps, rank, to);
    quantise(q_latent_, t, 0, rank, *latent.q_b, true);
  });
  multiply(*latent.q_b, view(q_latent_, rank, true), step.tokens, latent_q_.data(), layer.q_size(), false);
}

// Rotate the queries of one token. Norm its latent, rotate its rope key, and store both in the cache.
void Model::rotate_and_store_latent(const Step& step, const Layer& layer, const Cache& cache, int t) {
  const Latent& latent = *layer.latent;
  const Rope& rope = parts_.ropes[layer.rope_table()];
  const size_t angles = static_cast<size_t>(step.position[t]) * rope.half;
  const float *cos = &rope.cos[angles], *sin = &rope.sin[angles];
  k_.rope(latent_queries(layer, t) + layer.nope_dim(), layer.heads(), layer.dim(), cos, sin, rope.half);
  const int rank = latent.rank(), width = layer.cached_dim();
  float* own = &qkv_[static_cast<size_t>(t + 1) * layer.qkv_size() - width];
  k_.rms_norm(own, latent.kv_norm.data(), latent.spec.norm_eps, rank, own);
  k_.rope(own + rank, 1, layer.rope_dim(), cos, sin, rope.half);
  k_.to_fp16(own, width, cache.keys + cache.offset(step.table(layer, t), step.index[t], 0));
}

// ── matmul of one head ──────────────────────────────────────────────────────────────────────────

// Multiply the tokens of `in` by the rows of one head: [tokens, Latent::head_rows(rows)]. The result is
// valid until the next call of the same worker.
const float* Model::multiply_head(const Matrix& w, int head, int rows, Quantised& in, int tokens,
                                  int worker) {
  const Packed& packed = w.packed();
  const int stride = Latent::head_rows(rows), groups = stride / packed.lanes;
  for (int n = 0; n < tokens; n++) quantise(in, n, 0, packed.cols, w, true);
  std::vector<float>& out = head_out_[worker];
  const size_t needed = static_cast<size_t>(tokens) * stride;
  if (out.size() < needed) out.resize(needed);
  k_.matmul(packed, view(in, packed.cols, true), 0, tokens, head * groups, (head + 1) * groups, out.data(),
            stride, false);
  return out.data();
}

// ── decode ──────────────────────────────────────────────────────────────────────────────────────

void Model::attend_latent(const Step& step, const Layer& layer, const Cache& cache, int worker) {
  if (!step.stored) store(step, layer, cache, 0, step.tokens);
  end_stage(kStore, worker);
  const int decoding = static_cast<int>(step.decode.size());
  if (decoding > 0) {
    thread_pool_.parallel_for(layer.heads(), [&](int head) { queries_to_latent_space(step, layer, worker, head); });
    const int tasks = decoding * (step.whole ? 1 : splits(step, layer) * layer.num_head_groups());
    thread_pool_.parallel_for(tasks, [&](int n) { attend_slot(step, layer, cache, n); });
    thread_pool_.parallel_for(layer.heads(), [&](int head) { latents_to_values(step, layer, worker, head); });
  }
  int first = decoding;
  for (const Chunk& chunk : step.prefill) {
    attend_expanded(step, layer, cache, worker, chunk, first);
    first += chunk.size;
  }
  end_stage(kAttend, worker);
  for_each_token(0, step.tokens, [&](int t) { quantise(attended_, t, 0, layer.output_size(), *layer.o); });
  end_stage(kMerge, worker);
}

// Move the queries of one head, for all decode slots, to the latent space:
// q · (W latent) = (qᵀ W) · latent.
void Model::queries_to_latent_space(const Step& step, const Layer& layer, int worker, int head) {
  const Latent& latent = *layer.latent;
  const int nope = layer.nope_dim(), rank = latent.rank(), tokens = static_cast<int>(step.decode.size());
  Quantised& in = head_in_[worker];
  resize(in, tokens, nope, false);
  for (int t = 0; t < tokens; t++)
    std::memcpy(&in.values[static_cast<size_t>(t) * nope], latent_queries(layer, t) + head * layer.dim(),
                nope * sizeof(float));
  const float* made = multiply_head(*latent.keys_transposed, head, rank, in, tokens, worker);
  for (int t = 0; t < tokens; t++, made += Latent::head_rows(rank)) {
    float* to = &latent_space_q_[(static_cast<size_t>(t) * layer.heads() + head) * layer.cached_dim()];
    std::memcpy(to, made, rank * sizeof(float));
    std::memcpy(to + rank, latent_queries(layer, t) + head * layer.dim() + nope, layer.rope_dim() * sizeof(float));
  }
}

// Convert the attention result of one head, a mean of latents, to the value of each slot.
void Model::latents_to_values(const Step& step, const Layer& layer, int worker, int head) {
  const Latent& latent = *layer.latent;
  const int rank = latent.rank(), width = latent.spec.value_dim, tokens = static_cast<int>(step.decode.size());
  Quantised& in = head_in_[worker];
  resize(in, tokens, rank, false);
  std::vector<float> mean(layer.cached_dim());  // the channels of the rope key are not part of the value
  for (int t = 0; t < tokens; t++) {
    merge_head(step, layer, t, head, mean.data());
    std::memcpy(&in.values[static_cast<size_t>(t) * rank], mean.data(), rank * sizeof(float));
  }
  const float* made = multiply_head(*latent.values, head, width, in, tokens, worker);
  for (int t = 0; t < tokens; t++, made += Latent::head_rows(width))
    std::memcpy(&attended_.values[static_cast<size_t>(t) * layer.output_size() + head * width], made,
                width * sizeof(float));
}

// ── prefill ─────────────────────────────────────────────────────────────────────────────────────

// The first cache index whose latent is expanded for a chunk.
int Model::first_seen(const Layer& layer, const Chunk& chunk) {
  return first_key(layer.window(), chunk.index, kExpandedSpan);
}

// The number of heads that are expanded together.
int Model::heads_at_once(const Layer& layer, int keys) const {
  const size_t each = static_cast<size_t>(keys) * 2 * layer.expanded_dim() * sizeof(float);
  return static_cast<int>(std::clamp<size_t>(kExpandedBytes / each, 1, layer.heads()));
}

// Attention of one chunk, whose first token is token `first` of the step.
void Model::attend_expanded(const Step& step, const Layer& layer, const Cache& cache, int worker,
                            const Chunk& chunk, int first) {
  const Latent& latent = *layer.latent;
  const int rank = latent.rank(), nope = layer.nope_dim(), value_dim = latent.spec.value_dim;
  const int dim = layer.expanded_dim(), out_size = layer.output_size();
  const int since = first_seen(layer, chunk), keys = chunk.index + chunk.size - since;
  const int at_once = heads_at_once(layer, keys), blocks = ceil_div(keys, kExpandedKeys);
  const bool matrix_units = uses_matrix_units(step.tokens);
  const bool to_fp16 = matrix_units || in_fp16(dim);
  const PrefillAttention& tile = matrix_units ? k_.matrix_units.prefill
                                 : to_fp16    ? k_.fp16.prefill
                                              : k_.prefill_floats;
  const int tiles = ceil_div(chunk.size, tile.queries);
  const int32_t *table = step.table(layer, first), no_blocks = 0;
  const size_t element = to_fp16 ? sizeof(uint16_t) : sizeof(float), of_head = keys * dim * element;
  uint8_t *all_keys = reinterpret_cast<uint8_t*>(expanded_.data()), *all_values = all_keys + at_once * of_head;
  // Store n consecutive channels of a key or value.
  auto put = [&](const float* from, int n, uint8_t* to) {
    if (to_fp16)
      k_.to_fp16(from, n, reinterpret_cast<uint16_t*>(to));
    else
      std::memcpy(to, from, n * sizeof(float));
  };
  const size_t line = dim * element;
  for (int head0 = 0; head0 < layer.heads(); head0 += at_once) {
    const int heads = std::min(at_once, layer.heads() - head0), shares = ceil_div(heads, kExpandedHeads);
    thread_pool_.parallel_for(blocks * shares, [&](int task) {
      const int from = task / shares * kExpandedKeys, count = std::min(kExpandedKeys, keys - from);
      const int h0 = task % shares * kExpandedHeads, h1 = std::min(heads, h0 + kExpandedHeads);
      Quantised& in = head_in_[worker];
      resize(in, count, rank, matrix_units);
      std::vector<float> turned(static_cast<size_t>(count) * layer.rope_dim());
      for (int n = 0; n < count; n++) {
        const uint16_t* cached = cache.keys + cache.offset(table, since + from + n, 0);
        float *latents = &in.values[static_cast<size_t>(n) * rank], *rope = &turned[static_cast<size_t>(n) * layer.rope_dim()];
        for (int d = 0; d < rank; d++) latents[d] = fp16_to_float(cached[d]);
        for (int d = 0; d < layer.rope_dim(); d++) rope[d] = fp16_to_float(cached[rank + d]);
      }
      for (int h = h0; h < h1; h++) {
        uint8_t* to = all_keys + h * of_head + from * line;
        const float* made = multiply_head(*latent.keys, head0 + h, nope, in, count, worker);
        for (int n = 0; n < count; n++, to += line, made += Latent::head_rows(nope)) {
          put(made, nope, to);
          put(&turned[static_cast<size_t>(n) * layer.rope_dim()], layer.rope_dim(), to + nope * element);
          std::memset(to + layer.dim() * element, 0, (dim - layer.dim()) * element);
        }
        to = all_values + h * of_head + from * line;
        made = multiply_head(*latent.values, head0 + h, value_dim, in, count, worker);
        for (int n = 0; n < count; n++, to += line, made += Latent::head_rows(value_dim)) {
          put(made, value_dim, to);
          std::memset(to + value_dim * element, 0, (dim - value_dim) * element);
        }
      }
    });
    thread_pool_.parallel_for(tiles * heads, [&](int task) {
      const int from = (tiles - 1 - task / heads) * tile.queries;  // the last tiles have the most keys
      const int h = task % heads, head = head0 + h, count = std::min(tile.queries, chunk.size - from);
      const Cache own{reinterpret_cast<uint16_t*>(all_keys + h * of_head),
                      reinterpret_cast<uint16_t*>(all_values + h * of_head), keys, 1, dim, 0};
      std::vector<float>& lines = head_out_[worker];  // queries, then outputs
      const size_t size = static_cast<size_t>(count) * dim;
      if (lines.size() < 2 * size) lines.resize(2 * size);
      float *queries = lines.data(), *out = queries + size;
      for (int n = 0; n < count; n++) {
        float* to = queries + static_cast<size_t>(n) * dim;
        std::memcpy(to, latent_queries(layer, first + from + n) + head * layer.dim(), layer.dim() * sizeof(float));
        std::fill(to + layer.dim(), to + dim, 0.0f);
      }
      tile.attend(own, &no_blocks, queries, dim, chunk.index + from - since, count, 0, 1,
                  layer.attention(), scratch_[worker].data(), out, dim);
      for (int n = 0; n < count; n++)
        std::memcpy(&attended_.values[static_cast<size_t>(first + from + n) * out_size + head * value_dim],
                    out + static_cast<size_t>(n) * dim, value_dim * sizeof(float));
    });
  }
}

}  // namespace twostroke
