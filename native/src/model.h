// The decoder, which computes one step per call. `twostroke/model/torch/decoder.py` is the equivalent in torch.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "spec.h"
#include "thread_pool.h"

namespace twostroke {

struct Norm {
  std::vector<float> weight, bias;  // empty: no norm, or no bias

  bool empty() const { return weight.empty(); }
};

struct MLP {
  MLPSpec spec;
  // gate_up has 32 rows of gate, 32 rows of up, and so on. In an MLP without a gate it has only up.
  std::shared_ptr<Matrix> gate_up, down;

  bool empty() const { return down == nullptr; }
  int inner() const { return spec.intermediate_size; }
};

// A mixture of experts. The shared expert is the layer's MLP.
struct Experts {
  ExpertsSpec spec;
  std::shared_ptr<Matrix> router;  // in fp32; the last row is the gate of the shared expert, if any
  std::vector<float> correction;   // added to the scores that choose experts, not to weights; or empty
  std::vector<MLP> experts;

  int count() const { return spec.num_experts; }
  int inner() const { return spec.expert.intermediate_size; }
};

// `Latent::keys` and `Latent::values` have the rows of each head from a multiple of `kHeadRows` on, so
// that a matmul can use the rows of one head.
constexpr int kHeadRows = 32;
constexpr int kLatentHeads = 4;  // heads that one decode task computes in a layer with latents

// Multi-head latent attention.
struct Latent {
  LatentSpec spec;
  std::shared_ptr<Matrix> q_b;              // or null: qkv computes the queries directly
  std::shared_ptr<Matrix> keys, values;     // the two halves of kv_b; prefill expands latents with them
  std::shared_ptr<Matrix> keys_transposed;  // decode projects queries into the space of the latents
  std::vector<float> q_norm, kv_norm;       // norms of the latents; q_norm is empty without q_b

  int rank() const { return spec.kv_lora_rank; }
  int q_rank() const { return spec.q_lora_rank; }
  // The distance in rows from one head to the next.
  static int head_rows(int rows) { return (rows + kHeadRows - 1) / kHeadRows * kHeadRows; }
};

// A layer: its specification and its weights.
struct Layer {
  LayerSpec spec;
  std::shared_ptr<Matrix> qkv, o;          // in a layer with latents, qkv stacks q_a (or q) and kv_a
  std::shared_ptr<const Latent> latent;    // or null
  MLP mlp;                                 // empty in a layer of experts without a shared expert
  std::shared_ptr<const Experts> experts;  // or null
  Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;
  // Weights of the norm of each head [dim], or of the norm over all heads [heads · dim]; or empty.
  std::vector<float> q_norm, k_norm;
  // For an int8 cache, [kv_heads, dim] or empty: keys are multiplied by key_factors = 1 / key_scales
  // before they are stored, queries by key_scales. Two channels that rope rotates have equal scales.
  std::vector<float> key_scales, key_factors;
  std::vector<float> sinks;                    // one score per head, or empty

  int heads() const { return spec.attention.num_heads; }
  int kv_heads() const { return spec.attention.num_kv_heads; }
  int dim() const { return spec.attention.head_dim; }
  int window() const { return spec.attention.window; }
  int rope_table() const { return spec.attention.rope.table; }
  int rope_dim() const { return spec.attention.rope.dim; }
  AttentionParams attention() const {
    const AttentionSpec& rule = spec.attention;
    return {rule.scale, rule.softcap, rule.window, sinks.empty() ? nullptr : sinks.data()};
  }

  int heads_per_kv() const { return heads() / kv_heads(); }
  int q_size() const { return heads() * dim(); }
  int kv_size() const { return kv_heads() * dim(); }
  int qkv_size() const {
    if (!spec.attention.latent) return q_size() + 2 * kv_size();
    const int q_rank = spec.attention.latent->q_lora_rank;
    return (q_rank == 0 ? q_size() : q_rank) + cached_dim();
  }
  int value_dim() const { return spec.attention.latent ? spec.attention.latent->value_dim : dim(); }
  int output_size() const { return heads() * value_dim(); }
  // Number and size of the vectors of one cached token. All heads share the vector of a latent.
  int cached_heads() const { return spec.attention.latent ? 1 : kv_heads(); }
  int cached_dim() const {
    return spec.attention.latent ? spec.attention.latent->kv_lora_rank + rope_dim() : dim();
  }
  // Query heads that one decode task computes: those of one KV head, or with latents kLatentHeads.
  int heads_per_task() const { return latent == nullptr ? heads_per_kv() : kLatentHeads; }
  int num_head_groups() const { return (heads() + heads_per_task() - 1) / heads_per_task(); }
  int nope_dim() const { return dim() - rope_dim(); }
  // Channels of the expanded keys and values of latents, a multiple of 8.
  int expanded_dim() const { return (std::max(dim(), value_dim()) + 7) / 8 * 8; }
  bool has_full_norms() const { return heads() > 1 && spec.attention.qk_norm == QKNorm::kFull; }
  bool has_head_norms() const { return spec.attention.qk_norm != QKNorm::kNone && !has_full_norms(); }
};

struct Rope {  // cosines and sines, [positions, half] each
  std::vector<float> cos, sin;
  int positions, half;
  std::vector<float> query_scales;  // the factor of the queries at each position; or empty
};

// Layers that share a KV pool and block tables.
struct KVGroup {
  int layers = 0, heads = 0, dim = 0;
  int sides = 2;  // 2: keys and values; 1: latents
};

// The specification and the weights of a model.
struct ModelData {
  ModelSpec spec;
  std::vector<Layer> layers;
  std::vector<KVGroup> groups;
  std::shared_ptr<Matrix> embed, head;
  Norm final_norm;
  std::vector<Rope> ropes;
  std::vector<float> positions;  // [max_len, hidden], added to the embedding; or empty

  int vocab() const { return spec.vocab_size; }
  int hidden() const { return spec.hidden_size; }
  int max_len() const { return ropes[0].positions; }
};

// The position of a token counts the tokens of the text; it selects the rope angles and the token id.
// The index of a token counts the tokens in the cache, from which tokens may have been evicted; it
// selects the cache slot and the attention mask.
struct Slot {  // decode: compute the token at `position` of `row`. A row may have several slots.
  int32_t row, position, index;
};

struct Chunk {  // prefill: compute positions [start, start + size) of `row`, the first at `index`
  int32_t row, start, size, index;
};

struct Table {  // the block tables of one KV group, [rows, stride]
  const int32_t* blocks;
  int64_t stride;
};

// The rows of the requests, as `twostroke/exec/rows.py` keeps them.
struct Rows {
  const int32_t* tokens;
  int64_t tokens_stride;
  std::vector<Table> tables;  // one per KV group
};

struct Pool {  // the KV pool of one group, as `kv/host_pool.py` allocates it
  void* data;  // [blocks, layers, sides, heads, block_size, dim] in fp16, or in int8 with scales (`Cache`)
  int blocks, block_size;
  bool is_int8;
};

// The stages whose time is measured.
enum Stage { kEmbed, kNorm, kQkv, kStore, kAttend, kMerge, kOutput, kRoute, kGateUp, kDown, kHead, kStages };
constexpr const char* kStageNames[kStages] = {"embed", "norm",   "qkv",     "store", "attend",
                                              "merge", "output", "route", "gate_up", "down", "head"};

// The tokens of one step: the rows and pools of the requests, and the work of both phases.
struct StepInput {
  const Rows& rows;
  const std::vector<Pool>& pools;
  const std::vector<Slot>& decode;
  const std::vector<Chunk>& prefill;
};

class Model {
 public:
  Model(const Kernels& kernels, ModelData parts, int threads, int threads_prefill, bool exact);

  // Compute decode slots, then chunks, and write the logits [count, vocab] of some tokens. `which`:
  // the indices of these tokens in the step, ascending. `keep_all`: keep the last hidden state of
  // every token until the next step.
  void forward(const StepInput& input, const int32_t* which, int count, float* out, bool keep_all);
  // Write the logits of more tokens of the last step, whose hidden states were kept.
  void logits(const int32_t* which, int count, float* out);

  // Compute attention shares in all later steps: the part of its attention that a decode slot gives to
  // each segment of kSplit cache entries. Shares are valid until the next step. Layers with latents
  // have no shares.
  void keep_shares() { keeps_shares_ = true; }
  int share_slots() const { return share_slots_; }
  int share_parts() const { return share_parts_; }
  // Write the shares of the last step, [slots, parts], averaged over heads and layers.
  void shares(float* out) const;

  // Call work(n) for n = 0 … count − 1 on the decode threads.
  void parallel(int count, const std::function<void(int)>& work);

  int num_kept() const { return num_kept_; }
  // Seconds of each stage since the model was created, measured by worker 0.
  const std::array<double, kStages>& stage_seconds() const { return stage_seconds_; }
  const ModelData& parts() const { return parts_; }
  const std::vector<KVGroup>& groups() const { return parts_.groups; }
  size_t num_bytes() const;

 private:
  // The activations of a step, in fp32 and in the type that the next matmul needs: int8 blocks, bfloat16
  // tiles (if `uses_matrix_units`) or fp16.
  struct Quantised {
    std::vector<float> values, scale, sum, half_sums;
    std::vector<int8_t> codes;
    std::vector<uint16_t> bf16_tiles;
    std::vector<uint16_t> fp16;  // for F16 matrices
    std::vector<float> fp16_scale;
    std::vector<int32_t> residual_block;  // of each token, the block whose rounding error is appended
    bool uses_matrix_units = false;
  };
  struct Step;
  struct ContextPart {  // cache entries [from, to) of a decode slot, for one group of heads
    int slot, group, from, to;
  };

  void reserve(int tokens);
  void resize(Quantised& a, int tokens, int width) const {
    resize(a, tokens, width, uses_matrix_units(tokens));
  }
  void resize(Quantised& a, int tokens, int width, bool matrix_units) const;
  // Return whether a step of `tokens` tokens runs on the matrix units.
  bool uses_matrix_units(int tokens) const;
  bool in_fp16(int dim) const { return !exact_ && k_.fp16.supports(dim); }
  // Return whether the kernel of decode attention prefetches the keys.
  bool prefetches_keys(const Cache& cache) const { return !cache.is_int8 && in_fp16(cache.dim); }
  const PrefillAttention& prefill_attention(int dim) const {
    return in_fp16(dim) ? k_.fp16.prefill : k_.prefill;
  }
  const Int8Attention& int8_attention(int dim) const { return in_fp16(dim) ? k_.fp16.int8 : k_.int8; }
  Activations view(const Quantised& a, int width, bool with_residual = false) const;
  void quantise(Quantised& a, int t, int from, int n, const Matrix& next, bool with_residual = false) const;
  void norm(const float* x, const Norm& norm, float* out) const;
  void norm_and_quantise(const float* x, const Norm& norm, Quantised& a, int t, const Matrix& next,
                         bool with_residual) const;
  // Derive the layout of the work from the tokens of the step, and reserve its memory.
  void plan(Step& step, int workers);
  Cache cache_of(const Step& step, const Layer& layer) const;
  void norm_all(const Step& step, const Norm& norm, const Matrix& next, bool with_residual,
                int worker);
  // Compute the queries, keys and values of every token.
  void project_qkv(const Step& step, const Layer& layer, int worker);
  // Compute the part of a layer after attention: output projection, then MLP or experts.
  void finish_layer(const Step& step, const Layer& layer, int worker);
  // x += scale · norm(branch), with the norm only if the layer has a norm there.
  void add_to_residual(const Step& step, std::vector<float>& branch, const Norm& post_norm);
  void mix_experts(const Step& step, const Layer& layer, int worker);
  void route(const Experts& experts, int t);
  void group_by_expert(const Layer& layer, int from, int to, bool matrix_units);
  // x += scale · norm(a · wᵀ), with the norm only if the layer has a norm there.
  void add_matmul(const Step& step, const Matrix& w, const Activations& a, const Norm& post_norm);
  // Move the wanted tokens to the front; the rest of the step has only those tokens.
  void select_tokens(const Step& wanted, const Layer& layer, const int32_t* which);
  void gate_and_up(const Layer& layer, const Activations& a, int tokens, int worker);
  void gate_units(const MLP& mlp, const Activations& a, int first, int end,
                  int from, int to, int worker, Quantised& inner);
  void multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                bool add);
  void rotate_and_store(const Step& step, const Layer& layer, const Cache& cache, int t, int kv);
  void store(const Step& step, const Layer& layer, const Cache& cache, int from, int to);
  void attend(const Step& step, const Layer& layer, const Cache& cache, int worker);
  void attend_slot(const Step& step, const Layer& layer, const Cache& cache, int task);
  int splits(const Step& step, const Layer& layer) const;
  // The number of splits of slot t that are not empty.
  int num_slot_splits(const Step& step, const Layer& layer, int t) const;
  ContextPart context_part(const Step& step, const Layer& layer, int n) const;
  void prefetch_part(const Step& step, const Layer& layer, const Cache& cache, int n) const;
  void attend_part(const Step& step, const Layer& layer, const Cache& cache, int n);
  void merge(const Step& step, const Layer& layer, int t, int kv);
  void merge_head(const Step& step, const Layer& layer, int t, int head, float* out);
  float* latent_queries(const Layer& layer, int t);
  void project_latent_queries(const Step& step, const Layer& layer);
  void rotate_and_store_latent(const Step& step, const Layer& layer, const Cache& cache, int t);
  void attend_latent(const Step& step, const Layer& layer, const Cache& cache, int worker);
  void queries_to_latent_space(const Step& step, const Layer& layer, int worker, int head);
  void latents_to_values(const Step& step, const Layer& layer, int worker, int head);
  void attend_expanded(const Step& step, const Layer& layer, const Cache& cache, int worker,
                       const Chunk& chunk, int first);
  int heads_at_once(const Layer& layer, int keys) const;
  static int first_seen(const Layer& layer, const Chunk& chunk);
  const float* multiply_head(const Matrix& w, int head, int rows, Quantised& in, int tokens,
                             int worker);
  void head(const int32_t* which, int count, float* out);
  int num_tasks(int tokens) const;
  void end_stage(Stage stage, int worker);
  template <typename F>
  void for_each_token(int from, int to, F&& work);

  const Kernels& k_;  // the kernels of the chosen instruction set
  ModelData parts_;
  int hidden_, max_output_ = 0, max_qkv_ = 0, max_inner_ = 0;  // the largest widths of all layers
  int max_experts_ = 0, max_per_token_ = 0, max_expert_inner_ = 0;
  int max_q_rank_ = 0, max_latent_q_ = 0;
  bool exact_;  // compute in fp32: no quantised activations, no fp16, no matrix units
  bool any_fp16_ = false;    // some matrix is F16
  bool any_branch_ = false;  // some layer needs `branch_`
  int threads_, threads_prefill_;
  ThreadPool thread_pool_;
  int num_kept_ = 0;            // tokens whose last hidden states are kept in `x_`
  std::vector<float> x_, qkv_;  // of each token: the hidden state, and the output of `Layer::qkv`
  std::vector<float> branch_;  // output of attention or MLP, if a norm or a scale follows
  Quantised normed_, attended_, inner_, final_normed_;  // inputs of qkv or MLP, of o, of down, of the head
  // In a layer of experts, for each token: the router's outputs, the weights of its experts, the weighted
  // sum; its experts, and its row in `expert_in_` and `expert_out_` for each of them.
  std::vector<float> router_, share_, mixed_;
  std::vector<int32_t> chosen_, expert_row_;
  // An expert in use, its rows, and its first task in both matmuls.
  struct InUse {
    int expert, first, count, gate_task, down_task, units_per_task, groups_per_task;
  };
  std::vector<InUse> in_use_;
  int gate_tasks_ = 0, down_tasks_ = 0;
  Quantised expert_in_, expert_inner_;
  std::vector<float> expert_out_;
  std::vector<Quantised> worker_normed_;  // per worker: its copy of the normed tokens of a small step
  std::vector<std::vector<float>> scratch_;  // per worker: for attention
  std::vector<std::vector<float>> gate_up_;  // per worker: outputs of gate and up
  std::vector<float> partial_;  // results of each split of decode attention: values, largest score, sum
  std::vector<float> shares_;  // [slots, heads, parts], summed over the layers
  int share_slots_ = 0, share_parts_ = 0, share_heads_ = 0;
  bool keeps_shares_ = false;
  // For layers with latents: the queries and their latents; the queries in the space of the latents; the
  // expanded keys and values of some heads; and per worker the inputs and outputs of one head's matmul.
  std::vector<float> latent_q_, latent_space_q_;
  Quantised q_latent_;
  std::vector<float> expanded_;  // fp32, or fp16 in the same memory
  std::vector<Quantised> head_in_;
  std::vector<std::vector<float>> head_out_;
  std::array<double, kStages> stage_seconds_{};
  std::chrono::steady_clock::time_point stage_start_;
};

}  // namespace twostroke
