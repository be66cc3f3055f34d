#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace twostroke {

namespace {
constexpr int kSmall = 4;         // tokens of a step that every member norms for itself
constexpr int kPanel = 512;       // tokens whose gate and up are kept at one time

// Tasks of a product at the least. (Weights that pass by once are read best in long runs, one for
// each member; with many tokens more tasks even out what the members lose to others.)
constexpr int kTasks = 16;

constexpr auto kOnes = [] {  // what an MLP without a gate multiplies by
  std::array<float, kBlock> ones{};
  for (float& one : ones) one = 1;
  return ones;
}();
}  // namespace

std::vector<KVGroup> check_model(const ModelParts& parts, const Kernels& kernels) {
  auto fit = [](bool fine, const std::string& what) {
    if (!fine) throw std::invalid_argument("the model's parts do not fit each other: " + what);
  };
  auto is = [&](const std::shared_ptr<Matrix>& m, int rows, int cols, const std::string& what) {
    fit(m != nullptr, what + " is missing");
    const Packed& p = m->packed();
    fit(p.lanes == kernels.lanes_of(p.format), what + " is packed for other kernels");
    fit(p.rows == rows && p.cols == cols, what + " has another shape");
  };
  fit(parts.embed != nullptr && !parts.ropes.empty(), "there is no embedding, or no rope table");
  const int hidden = parts.hidden();
  is(parts.embed, parts.vocab(), hidden, "the embedding");
  is(parts.head, parts.vocab(), hidden, "the head");
  auto is_norm = [&](const Norm& norm) {
    const size_t size = hidden;
    return norm.weight.size() == size && (norm.bias.empty() || norm.bias.size() == size);
  };
  fit(is_norm(parts.final_norm), "the final norm");
  fit(parts.eps >= 0 && parts.logit_softcap >= 0, "a negative number");
  for (const Rope& rope : parts.ropes) {
    fit(rope.positions == parts.max_len(), "rope tables of different lengths");
    fit(rope.query_scales.empty() || rope.query_scales.size() == static_cast<size_t>(rope.positions),
        "scales of queries for another number of positions");
  }
  const size_t table = static_cast<size_t>(parts.max_len()) * hidden;
  fit(parts.positions.empty() || parts.positions.size() == table, "the embedding of positions");
  std::vector<KVGroup> groups;
  std::vector<std::vector<bool>> taken;  // which layers of each group there are
  for (size_t n = 0; n < parts.layers.size(); n++) {
    const Layer& layer = parts.layers[n];
    const std::string at = "layer " + std::to_string(n) + ": ";
    fit(layer.dim > 0 && layer.kv_heads > 0 && layer.heads > 0 && layer.heads % layer.kv_heads == 0,
        at + "heads come in whole groups");
    if (layer.latent != nullptr) {
      const Latent& latent = *layer.latent;
      const int rank = latent.rank(), heads = layer.heads, nope = layer.nope_dim();
      fit(rank > 0 && latent.value_dim > 0 && latent.eps >= 0 && layer.rope_dim > 0 && nope > 0 &&
              layer.kv_heads == heads && layer.q_norm.empty() && layer.sinks.empty(),
          at + "latent attention");
      fit((latent.q_b == nullptr) == latent.q_norm.empty(), at + "the norm of queries' latents");
      if (latent.q_b != nullptr) is(latent.q_b, layer.q_size(), latent.q_rank(), at + "q_b");
      is(latent.keys, heads * Latent::head_rows(nope), rank, at + "kv_b's keys");
      is(latent.values, heads * Latent::head_rows(latent.value_dim), rank, at + "kv_b's values");
      is(latent.keys_transposed, heads * Latent::head_rows(rank), nope, at + "kv_b's keys, transposed");
    }
    is(layer.qkv, layer.qkv_size(), hidden, at + "qkv");
    is(layer.o, hidden, layer.output_size(), at + "o");
    auto is_mlp = [&](const MLP& mlp, const std::string& what) {
      fit(mlp.down != nullptr, what + "down is missing");
      is(mlp.down, hidden, mlp.inner(), what + "down");
      is(mlp.gate_up, (layer.gated ? 2 : 1) * mlp.inner(), hidden, what + "gate_up");
    };
    if (layer.experts == nullptr || layer.mlp.down != nullptr) is_mlp(layer.mlp, at);
    if (layer.experts != nullptr) {
      const Experts& experts = *layer.experts;
      const Routing& routing = experts.routing;
      const int count = experts.count(), groups = routing.groups, used = routing.groups_used;
      fit(count > 0 && routing.experts_per_token > 0 && groups > 0 && used > 0 && used <= groups &&
              count % groups == 0 && routing.experts_per_token <= used * (count / groups) &&
              (!routing.top2_sum || count / groups > 1),
          at + "as many experts as a token is to have");
      fit(!experts.shared_gate || layer.mlp.down != nullptr, at + "a gate without a shared expert");
      fit(experts.correction.empty() || experts.correction.size() == experts.each.size(),
          at + "the correction");
      is(experts.router, count + (experts.shared_gate ? 1 : 0), hidden, at + "the router");
      fit(experts.router->packed().format == Format::kF32, at + "the router is not in floats");
      for (const MLP& mlp : experts.each) {
        is_mlp(mlp, at + "an expert's ");
        fit(mlp.inner() == experts.inner(), at + "experts of different widths");
      }
    }
    for (const Norm* norm :
         {&layer.attn_norm, &layer.mlp_norm, &layer.attn_post_norm, &layer.mlp_post_norm})
      fit(norm->empty() ? norm->bias.empty() : is_norm(*norm), at + "a norm");
    const size_t q = layer.q_norm.size(), k = layer.k_norm.size(), dim = layer.dim;
    const size_t q_size = layer.q_size(), kv_size = layer.kv_size();
    fit((q == 0 && k == 0) || (q == dim && k == dim) || (q == q_size && k == kv_size),
        at + "q_norm and k_norm");
    fit(layer.key_scales.empty() || (layer.latent == nullptr && layer.key_scales.size() == kv_size),
        at + "the scales of key channels");
    fit(layer.sinks.empty() || layer.sinks.size() == static_cast<size_t>(layer.heads), at + "sinks");
    fit(layer.attention.scale > 0 && layer.attention.softcap >= 0 && layer.attention.window >= 0,
        at + "scale, softcap or window is negative");
    fit(layer.rope >= 0 && static_cast<size_t>(layer.rope) < parts.ropes.size(),
        at + "it has no rope table");
    const int angles = 2 * parts.ropes[layer.rope].half;
    fit(layer.latent == nullptr ? angles <= layer.dim : angles == layer.rope_dim,
        at + "angles of another shape");
    fit(layer.latent == nullptr || parts.ropes[layer.rope].query_scales.empty(),
        at + "latent attention with scales of queries");
    const size_t most = parts.layers.size();
    fit(layer.group >= 0 && static_cast<size_t>(layer.group) < most && layer.in_group >= 0 &&
            static_cast<size_t>(layer.in_group) < most,
        at + "its KV group");
    groups.resize(std::max<size_t>(groups.size(), layer.group + 1));
    taken.resize(groups.size());
    KVGroup& group = groups[layer.group];
    std::vector<bool>& own = taken[layer.group];
    own.resize(std::max<size_t>(own.size(), layer.in_group + 1));
    fit(!own[layer.in_group], at + "its place in the KV group is taken");
    const int parts_of = layer.latent == nullptr ? 2 : 1;
    fit(group.layers++ == 0 || (group.heads == layer.cached_heads() &&
                                group.dim == layer.cached_dim() && group.parts == parts_of),
        at + "heads of another shape than its KV group has");
    own[layer.in_group] = true;
    group.heads = layer.cached_heads(), group.dim = layer.cached_dim(), group.parts = parts_of;
  }
  for (size_t n = 0; n < groups.size(); n++)
    fit(groups[n].layers > 0 && static_cast<size_t>(groups[n].layers) == taken[n].size(),
        "KV group " + std::to_string(n) + " lacks layers");
  return groups;
}

Model::Model(const Kernels& kernels, ModelParts parts, int threads, int threads_prefill, bool exact)
    : k_(kernels),
      parts_(std::move(parts)),
      groups_(check_model(parts_, kernels)),
      hidden_(parts_.hidden()),
      exact_(exact),
      threads_(threads),
      threads_prefill_(threads_prefill),
      team_(std::max(threads, threads_prefill)) {
  auto is_f16 = [](const std::shared_ptr<Matrix>& m) { return m->packed().format == Format::kF16; };
  any_fp16_ = is_f16(parts_.head);
  size_t scratch = 0;
  for (Layer& layer : parts_.layers) {
    if (!layer.sinks.empty()) layer.attention.sinks = layer.sinks.data();
    auto look_at = [&](const MLP& mlp) {
      if (mlp.down == nullptr) return;
      any_fp16_ = any_fp16_ || is_f16(mlp.gate_up) || is_f16(mlp.down);
    };
    any_fp16_ = any_fp16_ || is_f16(layer.qkv) || is_f16(layer.o);
    look_at(layer.mlp);
    if (layer.experts != nullptr) {
      for (const MLP& mlp : layer.experts->each) look_at(mlp);
      most_experts_ = std::max(most_experts_, layer.experts->router->packed().rows);
      most_expert_inner_ = std::max(most_expert_inner_, layer.experts->inner());
      most_per_token_ = std::max(most_per_token_, layer.experts->routing.experts_per_token);
    }
    any_branch_ = any_branch_ || parts_.residual_scale != 1 || !layer.attn_post_norm.empty() ||
                  !layer.mlp_post_norm.empty();
    most_output_ = std::max(most_output_, layer.output_size());
    most_qkv_ = std::max(most_qkv_, layer.qkv_size());
    most_inner_ = std::max(most_inner_, layer.mlp.inner());
    int group = layer.heads_per_kv(), dim = layer.dim;
    if (layer.latent != nullptr) {
      const Latent& latent = *layer.latent;
      any_fp16_ = any_fp16_ || is_f16(latent.keys) || is_f16(latent.values) ||
                  is_f16(latent.keys_transposed) || (latent.q_b != nullptr && is_f16(latent.q_b));
      most_q_rank_ = std::max(most_q_rank_, latent.q_rank());
      if (latent.q_b != nullptr) most_latent_q_ = std::max(most_latent_q_, layer.q_size());
      group = 1, dim = layer.expanded_dim();
    }
    scratch = std::max(scratch, prefill_attention(dim).scratch_floats(group, dim));
    scratch = std::max(scratch, int8_attention(dim).prefill.scratch_floats(group, dim));
    if (k_.matrix_units.min_tokens > 0)
      for (const PrefillAttention& tile : {k_.matrix_units.prefill, k_.matrix_units.int8_prefill})
        scratch = std::max(scratch, tile.scratch_floats(group, dim));
  }
  own_.resize(team_.size());
  both_.resize(team_.size());
  head_in_.resize(team_.size());
  head_out_.resize(team_.size());
  for (Quantised& own : own_) resize(own, kTile, hidden_);
  scratch_.assign(team_.size(), std::vector<float>(scratch));
}

size_t Model::num_bytes() const {
  size_t total = parts_.embed->num_bytes();
  if (parts_.head != parts_.embed) total += parts_.head->num_bytes();
  auto bytes = [](const MLP& mlp) {
    return mlp.down == nullptr ? 0 : mlp.gate_up->num_bytes() + mlp.down->num_bytes();
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
    for (const MLP& mlp : layer.experts->each) total += bytes(mlp);
  }
  return total;
}

// ── activations ─────────────────────────────────────────────────────────────────────────────────

void Model::resize(Quantised& a, int tokens, int width, bool matrix_units) const {
  const size_t padded = ceil_div(tokens, kTile) * static_cast<size_t>(kTile);
  const size_t blocks = ceil_div(width, kBlock);
  auto grow = [](auto& numbers, size_t size) {
    if (numbers.size() < size) numbers.resize(size);
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

// Whether a step of so many tokens goes through the machine's matrix units.
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

// Channels [from, from + n) of token t, from a block's beginning on, as the product with `next`
// wants them. `with_residual`: all of them, and the coarsest block once more.
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
  if (parts_.layer_norms)
    k_.layer_norm(x, weight, bias, parts_.eps, hidden_, out);
  else
    k_.rms_norm(x, weight, parts_.eps, hidden_, out);
}

// A layer without a norm there takes x as it is.
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
    qkv_.resize(padded * most_qkv_);
    if (any_branch_) branch_.resize(padded * hidden_);
    latent_q_.resize(padded * most_latent_q_);
  }
  resize(normed_, tokens, hidden_);
  resize(attended_, tokens, most_output_);
  if (most_q_rank_ > 0) resize(q_latent_, tokens, most_q_rank_);
  resize(inner_, tokens, most_inner_);
  if (most_experts_ > 0 && mixed_.size() < padded * hidden_) {
    mixed_.resize(padded * hidden_);
    router_.resize(padded * most_experts_);
    share_.resize(padded * most_per_token_);
    chosen_.resize(padded * most_per_token_);
    place_.resize(padded * most_per_token_);
  }
}

// ── a step ──────────────────────────────────────────────────────────────────────────────────────

void Model::forward(const Rows& rows, const std::vector<Pool>& pools,
                    const std::vector<Slot>& decode, const std::vector<Chunk>& prefill,
                    const int32_t* which, int count, float* out, bool keep_all) {
  const int members = prefill.empty() ? threads_ : threads_prefill_;
  Step step{rows, pools, decode, prefill, {}, {}, {}};
  for (const Slot& slot : decode) step.add(slot.row, slot.position, slot.index);
  for (const Chunk& chunk : prefill)
    for (int n = 0; n < chunk.size; n++) step.add(chunk.row, chunk.start + n, chunk.index + n);
  // Few tokens of a chunk are wanted: once all keys and values are stored, the last layer goes on
  // with those alone, as with decode slots.
  std::vector<Slot> slots;
  std::vector<int32_t> order;
  const std::vector<Chunk> no_chunks;
  Step wanted{rows, pools, slots, no_chunks, {}, {}, {}};
  wanted.stored = true;
  const bool all = keep_all || prefill.empty();
  for (int n = 0; n < count && !all; n++) {
    const int t = which[n];
    slots.push_back({step.row[t], step.position[t], step.index[t]});
    wanted.add(step.row[t], step.position[t], step.index[t]);
    order.push_back(n);
  }
  plan(step, members);
  if (!all) plan(wanted, members);
  kept_ = all ? step.tokens : 0;
  if (keeps_shares_) {
    share_slots_ = static_cast<int>(decode.size());
    share_parts_ = ceil_div(step.longest, kSplit);
    share_heads_ = 0;
    for (const Layer& layer : parts_.layers) share_heads_ = std::max(share_heads_, layer.heads);
    shares_.assign(static_cast<size_t>(share_slots_) * share_heads_ * share_parts_, 0.0f);
  }
  reserve(step.tokens);
  resize(last_, std::max(count, 1), hidden_);
  stage_start_ = std::chrono::steady_clock::now();
  team_.run(members, [&](int member) {
    for_each_token(0, step.tokens, [&](int t) {
      const int32_t token = rows.tokens[step.row[t] * rows.tokens_stride + step.position[t]];
      float* x = &x_[static_cast<size_t>(t) * hidden_];
      k_.unpack_row(parts_.embed->packed(), token, x);
      if (parts_.embed_scale != 1)
        for (int n = 0; n < hidden_; n++) x[n] *= parts_.embed_scale;
      if (parts_.positions.empty()) return;
      const float* at = &parts_.positions[static_cast<size_t>(step.position[t]) * hidden_];
      for (int n = 0; n < hidden_; n++) x[n] += at[n];
    });
    end_stage(kEmbed, member);
    for (const Layer& layer : parts_.layers) {
      const Cache cache = cache_of(step, layer);
      project(step, layer, member);
      if (all || &layer != &parts_.layers.back()) {
        attend(step, layer, cache, member);
        finish(step, layer, member);
        continue;
      }
      store(step, layer, cache, 0, step.tokens);
      end_stage(kStore, member);
      if (count == 0) break;
      team_.parallel_for(1, [&](int) { pick(wanted, layer, which); });
      attend(wanted, layer, cache, member);
      finish(wanted, layer, member);
    }
    if (count > 0) head(all ? which : order.data(), count, out);
    end_stage(kHead, member);
  });
}

// What follows from a step's tokens.
void Model::plan(Step& step, int members) {
  const int decoding = static_cast<int>(step.decode.size());
  step.tokens = static_cast<int>(step.row.size());
  step.small = step.tokens <= kSmall;
  step.whole = decoding >= 4 * members;
  std::vector<int32_t> rows(step.row.begin(), step.row.begin() + decoding);
  std::sort(rows.begin(), rows.end());
  step.one_each = std::adjacent_find(rows.begin(), rows.end()) == rows.end();
  // Always the same parts, whoever else is in the step: so a stream's sums never depend on others.
  for (int t = 0; t < decoding; t++) step.longest = std::max(step.longest, step.index[t] + 1);
  size_t floats = 0;
  for (const Layer& layer : parts_.layers) {
    const size_t dim = layer.cached_dim(), heads = layer.groups_of_heads() * layer.heads_together();
    floats = std::max(floats, decoding * splits(step, layer) * heads * (dim + 2));
    if (layer.latent == nullptr) continue;
    const size_t among = decoding * layer.heads * dim;
    if (among_latents_.size() < among) among_latents_.resize(among);
    for (const Chunk& chunk : step.prefill) {
      const int keys = chunk.index + chunk.size - first_seen(layer, chunk);
      const size_t room = 2 * static_cast<size_t>(heads_at_once(layer, keys)) * keys * layer.expanded_dim();
      if (expanded_.size() < room) expanded_.resize(room);
    }
  }
  if (partial_.size() < floats) partial_.resize(floats);
}

// The wanted tokens to the front: what is left of the step is theirs.
void Model::pick(const Step& wanted, const Layer& layer, const int32_t* which) {
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

// The time since the last stage ended was this one's.
void Model::end_stage(Stage stage, int member) {
  if (member != 0) return;
  const auto now = std::chrono::steady_clock::now();
  stage_seconds_[stage] += std::chrono::duration<double>(now - stage_start_).count();
  stage_start_ = now;
}

Cache Model::cache_of(const Step& step, const Layer& layer) const {
  const Pool& pool = step.pools[layer.group];
  const KVGroup& group = groups_[layer.group];
  const int element = pool.is_int8 ? 1 : 2, width = group.dim + (pool.is_int8 ? kScaleBytes : 0);
  const size_t part = static_cast<size_t>(pool.block_size) * group.heads * width;  // keys of one layer
  char* keys = static_cast<char*>(pool.data) + element * group.parts * part * layer.in_group;
  char* values = group.parts == 1 ? keys : keys + element * part;  // a latent is the key, and the value
  return {reinterpret_cast<uint16_t*>(keys), reinterpret_cast<uint16_t*>(values), pool.block_size,
          group.heads, group.dim, group.parts * part * group.layers, pool.is_int8};
}

void Model::norm_all(const Step& step, const Norm& norm, const Matrix& next, bool with_residual,
                     int member) {
  Quantised& normed = step.small ? own_[member] : normed_;
  auto one = [&](int t) {
    norm_and_quantise(&x_[static_cast<size_t>(t) * hidden_], norm, normed, t, next, with_residual);
  };
  if (step.small) {
    for (int t = 0; t < step.tokens; t++) one(t);
  } else {
    for_each_token(0, step.tokens, one);
  }
  end_stage(kNorm, member);
}

// Queries, keys and values of every token.
void Model::project(const Step& step, const Layer& layer, int member) {
  const int width = layer.qkv_size(), q = layer.q_size(), kv = layer.kv_size();
  norm_all(step, layer.attn_norm, *layer.qkv, true, member);
  const Quantised& normed = step.small ? own_[member] : normed_;
  multiply(*layer.qkv, view(normed, hidden_, true), step.tokens, qkv_.data(), width, false);
  if (layer.latent != nullptr) project_latent_queries(step, layer);
  if (layer.has_full_norms())
    for_each_token(0, step.tokens, [&](int t) {
      float *queries = &qkv_[static_cast<size_t>(t) * width], *keys = queries + q;
      k_.rms_norm(queries, layer.q_norm.data(), parts_.eps, q, queries);
      k_.rms_norm(keys, layer.k_norm.data(), parts_.eps, kv, keys);
    });
  end_stage(kQkv, member);
}

// What comes after attention. A parallel MLP reads x before the sums, as attention did, through the
// same norm if it has none of its own.
void Model::finish(const Step& step, const Layer& layer, int member) {
  auto add_attention = [&] {
    add_product(step, *layer.o, view(attended_, layer.output_size()), layer.attn_post_norm);
    end_stage(kOutput, member);
  };
  if (!layer.parallel) add_attention();
  const Matrix& next = layer.mlp.gate_up ? *layer.mlp.gate_up : *layer.experts->router;
  const bool shares_norm = layer.parallel && layer.mlp_norm.empty();
  norm_all(step, shares_norm ? layer.attn_norm : layer.mlp_norm, next, false, member);
  if (layer.experts != nullptr) {
    mix_experts(step, layer, member);
  } else {
    const Quantised& normed = step.small ? own_[member] : normed_;
    gate_and_up(layer, view(normed, hidden_), step.tokens, member);
    end_stage(kGateUp, member);
  }
  if (layer.parallel) add_attention();
  if (layer.experts != nullptr)
    add_branch(step, mixed_, layer.mlp_post_norm);
  else
    add_product(step, *layer.mlp.down, view(inner_, layer.mlp.inner()), layer.mlp_post_norm);
  end_stage(kDown, member);
}

// x += scale · a · wᵀ, normed first where the layer has a norm there.
void Model::add_product(const Step& step, const Matrix& w, const Activations& a,
                        const Norm& post_norm) {
  const float scale = parts_.residual_scale;
  if (post_norm.empty() && scale == 1)
    return multiply(w, a, step.tokens, x_.data(), hidden_, true);
  multiply(w, a, step.tokens, branch_.data(), hidden_, false);
  add_branch(step, branch_, post_norm);
}

void Model::add_branch(const Step& step, std::vector<float>& branch, const Norm& post_norm) {
  const float scale = parts_.residual_scale;
  for_each_token(0, step.tokens, [&](int t) {
    float* own = &branch[static_cast<size_t>(t) * hidden_];
    float* x = &x_[static_cast<size_t>(t) * hidden_];
    if (!post_norm.empty()) norm(own, post_norm, own);
    for (int n = 0; n < hidden_; n++) x[n] += scale * own[n];
  });
}

void Model::gate_and_up(const Layer& layer, const Activations& a, int tokens, int member) {
  const int units = ceil_div(layer.mlp.inner(), kBlock);
  const int per_task = std::max(1, ceil_div(units, num_tasks(tokens)));
  team_.parallel_for(ceil_div(units, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(units, from + per_task);
    gate_units(layer, layer.mlp, a, 0, tokens, from, to, member, inner_);
  });
}

// Gate and up of some channels (or up alone), 32 to a unit, and at once what the next product wants of
// them: a panel of tokens at a time, which stays in the caches in between.
void Model::gate_units(const Layer& layer, const MLP& mlp, const Activations& a, int first, int end,
                       int from, int to, int member, Quantised& inner) {
  const int unit_rows = layer.gated ? 2 * kBlock : kBlock;  // rows that make one block of the inner layer
  const int width = mlp.inner();
  const Packed& w = mlp.gate_up->packed();
  const Activation& how = layer.activation;
  const auto activate = how.kind == ActivationKind::kSilu   ? k_.silu_mul
                        : how.kind == ActivationKind::kGelu ? k_.gelu_mul
                                                            : k_.gelu_tanh_mul;
  const int g0 = from * unit_rows / w.lanes, g1 = std::min(w.groups(), to * unit_rows / w.lanes);
  const int stride = (to - from) * unit_rows;
  std::vector<float>& both = both_[member];
  const size_t needed = static_cast<size_t>(std::min(end - first, kPanel)) * stride;
  if (both.size() < needed) both.resize(needed);
  for (int t0 = first; t0 < end; t0 += kPanel) {
    const int t1 = std::min(end, t0 + kPanel);
    k_.matmul(w, a, t0, t1, g0, g1, both.data(), stride, false);
    for (int unit = from; unit < to; unit++) {
      const int at = unit * kBlock, n = std::min(kBlock, width - at);
      const float* pair = &both[(unit - from) * unit_rows];
      for (int t = t0; t < t1; t++, pair += stride) {
        const float* up = layer.gated ? pair + n : kOnes.data();
        float* out = &inner.values[static_cast<size_t>(t) * width + at];
        if (how.kind == ActivationKind::kClampedSwiglu)
          k_.clamped_swiglu(pair, up, how.alpha, how.limit, n, out);
        else
          activate(pair, up, n, out);
        quantise(inner, t, at, n, *mlp.down);
      }
    }
  }
}

int Model::num_tasks(int tokens) const {
  const int members = tokens < kTile ? threads_ : threads_prefill_;
  return tokens < kTile ? members : std::max(kTasks, 4 * members);
}

void Model::multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                     bool add) {
  const int groups = w.packed().groups(), per_task = std::max(1, ceil_div(groups, num_tasks(tokens)));
  team_.parallel_for(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task;
    k_.matmul(w.packed(), a, 0, tokens, from, std::min(groups, from + per_task),
              out + from * w.packed().lanes, stride, add);
  });
}

void Model::parallel(int count, const std::function<void(int)>& work) {
  team_.run(std::min(threads_, count), [&](int) { team_.parallel_for(count, work); });
}

// ── the head ────────────────────────────────────────────────────────────────────────────────────

void Model::logits(const int32_t* which, int count, float* out) {
  resize(last_, count, hidden_);
  team_.run(threads_, [&](int) { head(which, count, out); });
}

void Model::head(const int32_t* which, int count, float* out) {
  for_each_token(0, count, [&](int n) {
    const float* x = &x_[static_cast<size_t>(which[n]) * hidden_];
    norm_and_quantise(x, parts_.final_norm, last_, n, *parts_.head, true);
  });
  const Packed& w = parts_.head->packed();
  const int groups = w.groups(), per_task = std::max(1, ceil_div(groups, 64)), vocab = w.rows;
  team_.parallel_for(ceil_div(groups, per_task), [&](int task) {
    const int from = task * per_task, to = std::min(groups, from + per_task);
    float* logits = out + from * w.lanes;
    k_.matmul(w, view(last_, hidden_, true), 0, count, from, to, logits, vocab, false);
    const float scale = parts_.logit_scale, cap = parts_.logit_softcap;
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
