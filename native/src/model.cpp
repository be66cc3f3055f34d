#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace twostroke {

namespace {
constexpr int kSmall = 4;    // in a step of up to 4 tokens every worker computes the norms itself
constexpr int kPanel = 512;  // tokens whose gate and up are kept at one time

// Minimum number of tasks of a matmul with many tokens, for load balance. With few tokens each worker
// has one task, because memory reads fastest in long runs.
constexpr int kTasks = 16;

constexpr auto kOnes = [] {  // the factor in an MLP without a gate
  std::array<float, kBlock> ones{};
  for (float& one : ones) one = 1;
  return ones;
}();
}  // namespace

Model::Model(const Kernels& kernels, ModelData parts, int threads, int threads_prefill, bool exact)
    : k_(kernels),
      parts_(std::move(parts)),
      hidden_(parts_.hidden()),
      exact_(exact),
      threads_(threads),
      threads_prefill_(threads_prefill),
      thread_pool_(std::max(threads, threads_prefill)) {
  auto is_f16 = [](const std::shared_ptr<Matrix>& m) { return m->packed().format == Format::kF16; };
  any_fp16_ = is_f16(parts_.head);
  size_t scratch = 0;
  for (Layer& layer : parts_.layers) {
    auto note_fp16 = [&](const MLP& mlp) {
      if (mlp.empty()) return;
      any_fp16_ = any_fp16_ || is_f16(mlp.gate_up) || is_f16(mlp.down);
    };
    any_fp16_ = any_fp16_ || is_f16(layer.qkv) || is_f16(layer.o);
    note_fp16(layer.mlp);
    if (layer.experts != nullptr) {
      for (const MLP& mlp : layer.experts->experts) note_fp16(mlp);
      max_experts_ = std::max(max_experts_, layer.experts->router->packed().rows);
      max_expert_inner_ = std::max(max_expert_inner_, layer.experts->inner());
      max_per_token_ = std::max(max_per_token_, layer.experts->spec.routing.experts_per_token);
    }
    any_branch_ = any_branch_ || parts_.spec.residual_scale != 1 || !layer.attn_post_norm.empty() ||
                  !layer.mlp_post_norm.empty();
    max_output_ = std::max(max_output_, layer.output_size());
    max_qkv_ = std::max(max_qkv_, layer.qkv_size());
    max_inner_ = std::max(max_inner_, layer.mlp.inner());
    int group = layer.heads_per_kv(), dim = layer.dim();
    if (layer.latent != nullptr) {
      const Latent& latent = *layer.latent;
      any_fp16_ = any_fp16_ || is_f16(latent.keys) || is_f16(latent.values) ||
                  is_f16(latent.keys_transposed) || (latent.q_b != nullptr && is_f16(latent.q_b));
      max_q_rank_ = std::max(max_q_rank_, latent.q_rank());
      if (latent.q_b != nullptr) max_latent_q_ = std::max(max_latent_q_, layer.q_size());
      group = 1, dim = layer.expanded_dim();
    }
    scratch = std::max(scratch, prefill_attention(dim).scratch_floats(group, dim));
    scratch = std::max(scratch, int8_attention(dim).prefill.scratch_floats(group, dim));
    if (k_.matrix_units.min_tokens > 0)
      for (const PrefillAttention& tile : {k_.matrix_units.prefill, k_.matrix_units.int8_prefill})
        scratch = std::max(scratch, tile.scratch_floats(group, dim));
  }
  worker_normed_.resize(thread_pool_.size());
  gate_up_.resize(thread_pool_.size());
  head_in_.resize(thread_pool_.size());
  head_out_.resize(thread_pool_.size());
  for (Quantised& own : worker_normed_) resize(own, kTile, hidden_);
  scratch_.assign(thread_pool_.size(), std::vector<float>(scratch));
}

size_t Model::num_bytes() const {
  size_t total = parts_.embed->num_bytes();
  if (parts_.head != parts_.embed) total += parts_.head->num_bytes();
  auto bytes = [](const MLP& mlp) {
    return mlp.empty() ? 0 : mlp.gate_up->num_bytes() + mlp.down->num_bytes();
  };
  for (const Layer& layer : parts_.layers) {
    total += layer.qkv->num_bytes() + layer.o->num_bytes() + bytes(layer.mlp);
    if (layer.latent != nullptr) {
      const Latent& latent = *layer.latent;
      for (const auto& matrix : {latent.q_b, latent.keys, latent.values, latent.keys_transposed})
        if (matrix != nullptr) total += matrix->num_bytes();
    }
    if (layer.experts == nullptr) continue;
    total += layer.experts->router->num_bytes();
    for (const MLP& mlp : layer.experts->experts) total += bytes(mlp);
  }
  return total;
}

// ── activations ─────────────────────────────────────────────────────────────────────────────────

void Model::resize(Quantised& a, int tokens, int width, bool matrix_units) const {
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  const size_t blocks = ceil_div(width, kBlock);
  auto grow = [](auto& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
  };
  a.uses_matrix_units = matrix_units;
  if (a.uses_matrix_units) {
    const size_t rows = ceil_div(tokens, kTileTokens) * static_cast<size_t>(kTileTokens);
    grow(a.bf16_tiles, rows * blocks * kBlock);
  }
  const size_t places = padded * (blocks + 1);
  grow(a.values, padded * width);
  grow(a.codes, places * kBlock);
  grow(a.scale, places);
  grow(a.sum, places);
  grow(a.half_sums, places * 2);
  grow(a.residual_block, padded);
  if (any_fp16_) {
    grow(a.fp16, padded * blocks * kBlock);
    grow(a.fp16_scale, padded * blocks);
  }
}

bool Model::uses_matrix_units(int tokens) const {
  return !exact_ && k_.matrix_units.min_tokens > 0 && tokens >= k_.matrix_units.min_tokens;
}

Activations Model::view(const Quantised& a, int width, bool with_residual) const {
  return {a.values.data(), width,        exact_ ? nullptr : a.codes.data(),
          a.scale.data(),  a.sum.data(), ceil_div(width, kBlock),
          a.half_sums.data(), a.uses_matrix_units ? a.bf16_tiles.data() : nullptr,
          with_residual ? a.residual_block.data() : nullptr,
          exact_ || a.fp16.empty() ? nullptr : a.fp16.data(), a.fp16_scale.data()};
}

// Quantise channels [from, from + n) of token t for the matmul with `next`. `from` is the beginning of a
// block. `with_residual`: the channels are all of the token's, and the residual of the coarsest block is
// appended.
void Model::quantise(Quantised& a, int t, int from, int n, const Matrix& next, bool with_residual) const {
  if (exact_) return;
  const Packed& w = next.packed();
  const int blocks = w.blocks, places = with_residual ? blocks + 1 : blocks;
  const float* x = a.values.data() + static_cast<size_t>(t) * w.cols + from;
  if (w.format == Format::kF16)
    return k_.fp16.to_fp16_blocks(x, n, t, from / kBlock, blocks, a.fp16.data(), a.fp16_scale.data());
  if (a.uses_matrix_units) return k_.matrix_units.to_bf16(x, n, &a.bf16_tiles[bf16_tile_at(t, from / kBlock, blocks)]);
  k_.quantise(x, n, t, from / kBlock, places, a.codes.data(), a.scale.data(), a.sum.data(),
              a.half_sums.data());
  if (with_residual)
    a.residual_block[t] = k_.quantise_residual(x, n, t, places, a.codes.data(), a.scale.data(), a.sum.data(),
                                  a.half_sums.data());
}

void Model::norm(const float* x, const Norm& norm, float* out) const {
  const float *weight = norm.weight.data(), *bias = norm.bias.empty() ? nullptr : norm.bias.data();
  if (parts_.spec.norm == NormKind::kLayer)
    k_.layer_norm(x, weight, bias, parts_.spec.norm_eps, hidden_, out);
  else
    k_.rms_norm(x, weight, parts_.spec.norm_eps, hidden_, out);
}

// Without a norm, x is quantised unchanged.
void Model::norm_and_quantise(const float* x, const Norm& norm, Quantised& a, int t,
                              const Matrix& next, bool with_residual) const {
  float* out = a.values.data() + static_cast<size_t>(t) * hidden_;
  if (norm.empty())
    std::copy(x, x + hidden_, out);
  else
    this->norm(x, norm, out);
  quantise(a, t, 0, hidden_, next, with_residual);
}

void Model::reserve(int tokens) {
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  if (x_.size() < padded * hidden_) {
    x_.resize(padded * hidden_);
    qkv_.resize(padded * max_qkv_);
    if (any_branch_) branch_.resize(padded * hidden_);
    latent_q_.resize(padded * max_latent_q_);
  }
  resize(normed_, tokens, hidden_);
  resize(attended_, tokens, max_output_);
  if (max_q_rank_ > 0) resize(q_latent_, tokens, max_q_rank_);
  resize(inner_, tokens, max_inner_);
  if (max_experts_ > 0 && mixed_.size() < padded * hidden_) {
    mixed_.resize(padded * hidden_);
    router_.resize(padded * max_experts_);
    share_.resize(padded * max_per_token_);
    chosen_.resize(padded * max_per_token_);
    expert_row_.resize(padded * max_per_token_);
  }
}

// ── a step ──────────────────────────────────────────────────────────────────────────────────────

void Model::forward(const StepInput& input, const int32_t* which, int count, float* out, bool keep_all) {
  const int workers = input.prefill.empty() ? threads_ : threads_prefill_;
  Step step{input, {}, {}, {}};
  for (const Slot& slot : step.decode) step.add(slot.row, slot.position, slot.index);
  for (const Chunk& chunk : step.prefill)
    for (int n = 0; n < chunk.size; n++) step.add(chunk.row, chunk.start + n, chunk.index + n);
  // If logits of few tokens are wanted, the last layer stores all keys and values, and then continues with
  // the wanted tokens only, as with decode slots.
  std::vector<Slot> slots;
  std::vector<int32_t> order;
  const std::vector<Chunk> no_chunks;
  Step wanted{{step.rows, step.pools, slots, no_chunks}, {}, {}, {}};
  wanted.stored = true;
  const bool all = keep_all || step.prefill.empty();
  for (int n = 0; n < count && !all; n++) {
    const int t = which[n];
    slots.push_back({step.row[t], step.position[t], step.index[t]});
    wanted.add(step.row[t], step.position[t], step.index[t]);
    order.push_back(n);
  }
  plan(step, workers);
  if (!all) plan(wanted, workers);
  num_kept_ = all ? step.tokens : 0;
  if (keeps_shares_) {
    share_slots_ = static_cast<int>(step.decode.size());
    share_parts_ = ceil_div(step.longest, kSplit);
    share_heads_ = 0;
    for (const Layer& layer : parts_.layers) share_heads_ = std::max(share_heads_, layer.heads());
    shares_.assign(static_cast<size_t>(share_slots_) * share_heads_ * share_parts_, 0.0f);
  }
  reserve(step.tokens);
  resize(final_normed_, std::max(count, 1), hidden_);
  stage_start_ = std::chrono::steady_clock::now();
  thread_pool_.run(workers, [&](int worker) {
    for_each_token(0, step.tokens, [&](int t) {
      const int32_t token = step.rows.tokens[step.row[t] * step.rows.tokens_stride + step.position[t]];
      float* x = &x_[static_cast<size_t>(t) * hidden_];
      k_.unpack_row(parts_.embed->packed(), token, x);
      if (parts_.spec.embed_scale != 1)
        for (int n = 0; n < hidden_; n++) x[n] *= parts_.spec.embed_scale;
      if (parts_.positions.empty()) return;
      const float* at = &parts_.positions[static_cast<size_t>(step.position[t]) * hidden_];
      for (int n = 0; n < hidden_; n++) x[n] += at[n];
    });
    end_stage(kEmbed, worker);
    for (const Layer& layer : parts_.layers) {
      const Cache cache = cache_of(step, layer);
      project_qkv(step, layer, worker);
      if (all || &layer != &parts_.layers.back()) {
        attend(step, layer, cache, worker);
        finish_layer(step, layer, worker);
        continue;
      }
      store(step, layer, cache, 0, step.tokens);
      end_stage(kStore, worker);
      if (count == 0) break;
      thread_pool_.parallel_for(1, [&](int) { select_tokens(wanted, layer, which); });
      attend(wanted, layer, cache, worker);
      finish_layer(wanted, layer, worker);
    }
    if (count > 0) head(all ? which : order.data(), count, out);
    end_stage(kHead, worker);
  });
}

// Derive the layout of the work from the tokens of the step, and reserve its memory.
void Model::plan(Step& step, int workers) {
  const int decoding = static_cast<int>(step.decode.size());
  step.tokens = static_cast<int>(step.row.size());
  step.small = step.tokens <= kSmall;
  step.whole = decoding >= 4 * workers;
  std::vector<int32_t> rows(step.row.begin(), step.row.begin() + decoding);
  std::sort(rows.begin(), rows.end());
  step.one_each = std::adjacent_find(rows.begin(), rows.end()) == rows.end();
  // The parts of a context do not depend on the other rows of the step, so that the sums of a row are
  // reproducible.
  for (int t = 0; t < decoding; t++) step.longest = std::max(step.longest, step.index[t] + 1);
  size_t floats = 0;
  for (const Layer& layer : parts_.layers) {
    const size_t dim = layer.cached_dim(), heads = layer.num_head_groups() * layer.heads_per_task();
    floats = std::max(floats, decoding * splits(step, layer) * heads * (dim + 2));
    if (layer.latent == nullptr) continue;
    const size_t among = decoding * layer.heads() * dim;
    if (latent_space_q_.size() < among) latent_space_q_.resize(among);
    for (const Chunk& chunk : step.prefill) {
      const int keys = chunk.index + chunk.size - first_seen(layer, chunk);
      const size_t room = 2 * static_cast<size_t>(heads_at_once(layer, keys)) * keys * layer.expanded_dim();
      if (expanded_.size() < room) expanded_.resize(room);
    }
  }
  if (partial_.size() < floats) partial_.resize(floats);
}

// Move the wanted tokens to the front; the rest of the step has those tokens only.
void Model::select_tokens(const Step& wanted, const Layer& layer, const int32_t* which) {
  const size_t hidden = hidden_, line = layer.qkv_size();
  for (int n = 0; n < wanted.tokens; n++) {
    std::memmove(&x_[n * hidden], &x_[which[n] * hidden], hidden * sizeof(float));
    std::memmove(&qkv_[n * line], &qkv_[which[n] * line], line * sizeof(float));
    if (layer.latent == nullptr || layer.latent->q_b == nullptr) continue;
    std::memmove(latent_queries(layer, n), latent_queries(layer, which[n]),
                 layer.q_size() * sizeof(float));
  }
  reserve(wanted.tokens);
}

// Add the time since the end of the last stage to this stage.
void Model::end_stage(Stage stage, int worker) {
  if (worker != 0) return;
  const auto now = std::chrono::steady_clock::now();
  stage_seconds_[stage] += std::chrono::duration<double>(now - stage_start_).count();
  stage_start_ = now;
}

Cache Model::cache_of(const Step& step, const Layer& layer) const {
  const Pool& pool = step.pools[layer.spec.kv_group];
  const KVGroup& group = parts_.groups[layer.spec.kv_group];
  const int element = pool.is_int8 ? 1 : 2, width = group.dim + (pool.is_int8 ? kScaleBytes : 0);
  const size_t part = static_cast<size_t>(pool.block_size) * group.heads * width;  // elements of the keys of one layer
  char* keys = static_cast<char*>(pool.data) + element * group.sides * part * layer.spec.index_in_group;
  char* values = group.sides == 1 ? keys : keys + element * part;  // a latent is both key and value
  return {reinterpret_cast<uint16_t*>(keys), reinterpret_cast<uint16_t*>(values), pool.block_size,
          group.heads, group.dim, group.sides * part * group.layers, pool.is_int8};
}

void Model::norm_all(const Step& step, const Norm& norm, const Matrix& next, bool with_residual,
                     int worker) {
  Quantised& normed = step.small ? worker_normed_[worker] : normed_;
  auto one = [&](int t) {
    norm_and_quantise(&x_[static_cast<size_t>(t) * hidden_], norm, normed, t, next, with_residual);
  };
  if (step.small) {
    for (int t = 0; t < step.tokens; t++) one(t);
  } else {
    for_each_token(0, step.tokens, one);
  }
  end_stage(kNorm, worker);
}

// Compute the queries, keys and values of every token.
void Model::project_qkv(const Step& step, const Layer& layer, int worker) {
  const int width = layer.qkv_size(), q = layer.q_size(), kv = layer.kv_size();
  norm_all(step, layer.attn_norm, *layer.qkv, true, worker);
  const Quantised& normed = step.small ? worker_normed_[worker] : normed_;
  multiply(*layer.qkv, view(normed, hidden_, true), step.tokens, qkv_.data(), width, false);
  if (layer.latent != nullptr) project_latent_queries(step, layer);
  if (layer.has_full_norms())
    for_each_token(0, step.tokens, [&](int t) {
      float *queries = &qkv_[static_cast<size_t>(t) * width], *keys = queries + q;
      k_.rms_norm(queries, layer.q_norm.data(), parts_.spec.norm_eps, q, queries);
      k_.rms_norm(keys, layer.k_norm.data(), parts_.spec.norm_eps, kv, keys);
    });
  end_stage(kQkv, worker);
}

// Compute the part of a layer after attention. A parallel MLP reads the same x as attention, through its
// own norm or the norm of attention.
void Model::finish_layer(const Step& step, const Layer& layer, int worker) {
  auto add_attention = [&] {
    add_matmul(step, *layer.o, view(attended_, layer.output_size()), layer.attn_post_norm);
    end_stage(kOutput, worker);
  };
  if (!layer.spec.parallel) add_attention();
  const Matrix& next = layer.mlp.gate_up ? *layer.mlp.gate_up : *layer.experts->router;
  const bool shares_norm = layer.spec.parallel && layer.mlp_norm.empty();
  norm_all(step, shares_norm ? layer.attn_norm : layer.mlp_norm, next, false, worker);
  if (layer.experts != nullptr) {
    mix_experts(step, layer, worker);
  } else {
    const Quantised& normed = step.small ? worker_normed_[worker] : normed_;
    gate_and_up(layer, view(normed, hidden_), step.tokens, worker);
    end_stage(kGateUp, worker);
  }
  if (layer.spec.parallel) add_attention();
  if (layer.experts != nullptr)
    add_to_residual(step, mixed_, layer.mlp_post_norm);
  else
    add_matmul(step, *layer.mlp.down, view(inner_, layer.mlp.inner()), layer.mlp_post_norm);
  end_stage(kDown, worker);
}

// x += scale · norm(a · wᵀ), with the norm only if the layer has one there.
void Model::add_matmul(const Step& step, const Matrix& w, const Activations& a,
                        const Norm& post_norm) {
  const float scale = parts_.spec.residual_scale;
  if (post_norm.empty() && scale == 1)
    return multiply(w, a, step.tokens, x_.data(), hidden_, true);
  multiply(w, a, step.tokens, branch_.data(), hidden_, false);
  add_to_residual(step, branch_, post_norm);
}

void Model::add_to_residual(const Step& step, std::vector<float>& branch, const Norm& post_norm) {
  const float scale = parts_.spec.residual_scale;
  for_each_token(0, step.tokens, [&](int t) {
    float* own = &branch[static_cast<size_t>(t) * hidden_];
    float* x = &x_[static_cast<size_t>(t) * hidden_];
    if (!post_norm.empty()) norm(own, post_norm, own);
    for (int n = 0; n < hidden_; n++) x[n] += scale * own[n];
  });
}

void Model::gate_and_up(const Layer& layer, const Activations& a, int tokens, int worker) {
  const int units = ceil_div(layer.mlp.inner(), kBlock);
  const int per_task = std::max(1, ceil_div(units, num_tasks(tokens)));
  thread_pool_.parallel_for(ceil_div(units, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(units, from + per_task);
    gate_units(layer.mlp, a, 0, tokens, from, to, worker, inner_);
  });
}

// Compute gate and up (or up alone) of units [from, to) of 32 channels each, apply the activation and
// quantise the result for the next matmul. A panel of tokens at a time stays in the caches.
void Model::gate_units(const MLP& mlp, const Activations& a, int first, int end,
                       int from, int to, int worker, Quantised& inner) {
  const int unit_rows = mlp.spec.gated ? 2 * kBlock : kBlock;  // rows that produce one block of 32 channels
  const int width = mlp.inner();
  const Packed& w = mlp.gate_up->packed();
  const Activation& activation = mlp.spec.activation;
  const auto activate = activation.kind == ActivationKind::kSilu   ? k_.silu_mul
                        : activation.kind == ActivationKind::kGelu ? k_.gelu_mul
                                                                   : k_.gelu_tanh_mul;
  const int g0 = from * unit_rows / w.lanes, g1 = std::min(w.groups(), to * unit_rows / w.lanes);
  const int stride = (to - from) * unit_rows;
  std::vector<float>& both = gate_up_[worker];
  const size_t needed = static_cast<size_t>(std::min(end - first, kPanel)) * stride;
  if (both.size() < needed) both.resize(needed);
  for (int t0 = first; t0 < end; t0 += kPanel) {
    const int t1 = std::min(end, t0 + kPanel);
    k_.matmul(w, a, t0, t1, g0, g1, both.data(), stride, false);
    for (int unit = from; unit < to; unit++) {
      const int at = unit * kBlock, n = std::min(kBlock, width - at);
      const float* pair = &both[(unit - from) * unit_rows];
      for (int t = t0; t < t1; t++, pair += stride) {
        const float* up = mlp.spec.gated ? pair + n : kOnes.data();
        float* out = &inner.values[static_cast<size_t>(t) * width + at];
        if (activation.kind == ActivationKind::kClampedSwiglu)
          k_.clamped_swiglu(pair, up, activation.alpha, activation.limit, n, out);
        else
          activate(pair, up, n, out);
        quantise(inner, t, at, n, *mlp.down);
      }
    }
  }
}

int Model::num_tasks(int tokens) const {
  const int workers = tokens < kTile ? threads_ : threads_prefill_;
  return tokens < kTile ? workers : std::max(kTasks, 4 * workers);
}

void Model::multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                     bool add) {
  const int groups = w.packed().groups(), per_task = std::max(1, ceil_div(groups, num_tasks(tokens)));
  thread_pool_.parallel_for(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task;
    k_.matmul(w.packed(), a, 0, tokens, from, std::min(groups, from + per_task),
              out + from * w.packed().lanes, stride, add);
  });
}

void Model::parallel(int count, const std::function<void(int)>& work) {
  thread_pool_.run(std::min(threads_, count), [&](int) { thread_pool_.parallel_for(count, work); });
}

// ── the head ────────────────────────────────────────────────────────────────────────────────────

void Model::logits(const int32_t* which, int count, float* out) {
  resize(final_normed_, count, hidden_);
  thread_pool_.run(threads_, [&](int) { head(which, count, out); });
}

void Model::head(const int32_t* which, int count, float* out) {
  for_each_token(0, count, [&](int n) {
    const float* x = &x_[static_cast<size_t>(which[n]) * hidden_];
    norm_and_quantise(x, parts_.final_norm, final_normed_, n, *parts_.head, true);
  });
  const Packed& w = parts_.head->packed();
  const int groups = w.groups(), per_task = std::max(1, ceil_div(groups, 64)), vocab = w.rows;
  thread_pool_.parallel_for(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(groups, from + per_task);
    float* logits = out + from * w.lanes;
    k_.matmul(w, view(final_normed_, hidden_, true), 0, count, from, to, logits, vocab, false);
    const float scale = parts_.spec.logit_scale, cap = parts_.spec.logit_softcap;
    if (scale == 1 && cap == 0) return;
    const int rows = std::min(vocab, to * w.lanes) - from * w.lanes;
    for (int n = 0; n < count; n++) {
      float* line = logits + static_cast<size_t>(n) * vocab;
      if (cap != 0)
        k_.soft_cap(line, rows, scale, cap);
      else
        for (int i = 0; i < rows; i++) line[i] *= scale;
    }
  });
}

}  // namespace twostroke
