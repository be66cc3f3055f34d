// One decoder, a step at a time: `twostroke/model/torch/decoder.py` says the same in torch.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pack.h"
#include "team.h"

namespace twostroke {

enum class ActivationKind { kSilu, kGeluTanh, kGelu, kClampedSwiglu };

struct Activation {
  ActivationKind kind;
  float alpha, limit;  // of a clamped swiglu
};

struct Norm {
  std::vector<float> weight, bias;  // empty where there is none

  bool empty() const { return weight.empty(); }
};

// `RoutingSpec` of `twostroke/model/describe/spec.py`.
struct Routing {
  int experts_per_token = 1;
  bool sigmoid = false, normalised = true;
  float scale = 1;
  int groups = 1, groups_used = 1;
  bool top2_sum = false;  // of a group's scores, or the largest
};

struct MLP {
  std::shared_ptr<Matrix> gate_up, down;  // gate and up: 32 rows of each in turn, or up alone

  int inner() const { return down == nullptr ? 0 : down->packed().cols; }
};

// `ExpertsSpec`, with its weights. The shared expert is the layer's MLP.
struct Experts {
  std::shared_ptr<Matrix> router;  // in floats; where the shared expert has a gate, that is the last row
  bool shared_gate = false;
  std::vector<float> correction;   // or empty
  std::vector<MLP> each;
  Routing routing;

  int count() const { return static_cast<int>(each.size()); }
  int inner() const { return each[0].inner(); }
};

// `LatentSpec`, with its weights. Of kv_b each head's rows for keys, and those for values, begin at a
// multiple of `kHeadRows`, so that a product may take those of one head.
constexpr int kHeadRows = 32;
constexpr int kLatentHeads = 4;  // that a decode task has of a layer with latents

struct Latent {
  std::shared_ptr<Matrix> q_b;             // or null: queries are made from x
  std::shared_ptr<Matrix> keys, values;    // of kv_b: what a latent becomes, for prefill
  std::shared_ptr<Matrix> keys_transposed; // what a query becomes among latents, for decode
  std::vector<float> q_norm, kv_norm;      // of the latents; the first empty without q_b
  float eps = 0;
  int value_dim = 0;

  int rank() const { return static_cast<int>(kv_norm.size()); }
  int q_rank() const { return static_cast<int>(q_norm.size()); }
  // Rows from one head to the next.
  static int head_rows(int rows) { return (rows + kHeadRows - 1) / kHeadRows * kHeadRows; }
};

// `AttentionSpec`, `MLPSpec` and `LayerSpec` of `twostroke/model/describe/spec.py`, with their weights.
struct Layer {
  std::shared_ptr<Matrix> qkv, o;          // with latents: q_a (or q) and kv_a
  std::shared_ptr<const Latent> latent;    // or null
  MLP mlp;  // empty in a layer of experts without a shared one
  std::shared_ptr<const Experts> experts;  // or null
  Norm attn_norm, mlp_norm, attn_post_norm, mlp_post_norm;
  std::vector<float> q_norm, k_norm;  // empty, over each head, or over all heads
  // What each key channel is divided by and each query channel multiplied by, [kv_heads, dim], for a
  // cache in int8: the same for channels that rope turns together; or empty.
  std::vector<float> key_scales, key_factors;  // the second: 1 / the first
  std::vector<float> sinks;           // empty, or of each head: what `attention.sinks` points to
  int heads, kv_heads, dim;
  AttentionParams attention;
  Activation activation;
  bool gated = true, parallel = false;
  int rope;             // which of the model's tables
  int rope_dim = 0;     // with latents: how many channels of a head, its last, have rope
  int group, in_group;  // its KV group, and which of the group's layers it is

  int heads_per_kv() const { return heads / kv_heads; }
  int q_size() const { return heads * dim; }
  int kv_size() const { return kv_heads * dim; }
  int qkv_size() const {
    if (latent == nullptr) return q_size() + 2 * kv_size();
    return (latent->q_b == nullptr ? q_size() : latent->q_rank()) + cached_dim();
  }
  int value_dim() const { return latent == nullptr ? dim : latent->value_dim; }
  int output_size() const { return heads * value_dim(); }
  // What attention reads of a cached token: of a latent, one vector for all heads.
  int cached_heads() const { return latent == nullptr ? kv_heads : 1; }
  int cached_dim() const { return latent == nullptr ? dim : latent->rank() + rope_dim; }
  // Heads that decode computes together: those of a KV head, or some of those that share latents.
  int heads_together() const { return latent == nullptr ? heads_per_kv() : kLatentHeads; }
  int groups_of_heads() const { return (heads + heads_together() - 1) / heads_together(); }
  int nope_dim() const { return dim - rope_dim; }
  // Channels of a latent's keys and values, once they are expanded.
  int expanded_dim() const { return (std::max(dim, value_dim()) + 7) / 8 * 8; }
  bool has_head_norms() const { return !q_norm.empty() && !has_full_norms(); }
  bool has_full_norms() const { return heads > 1 && q_norm.size() == static_cast<size_t>(q_size()); }
};

struct Rope {  // cosines and sines, [positions, half] each
  std::vector<float> cos, sin;
  int positions, half;
  std::vector<float> query_scales;  // what each position's queries are multiplied by; or empty
};

// Layers whose keys and values share a pool and block tables.
struct KVGroup {
  int layers = 0, heads = 0, dim = 0;
  int parts = 2;  // keys and values, or (1) latents
};

struct ModelParts {
  std::vector<Layer> layers;
  std::shared_ptr<Matrix> embed, head;
  Norm final_norm;
  std::vector<Rope> ropes;
  float eps, embed_scale, residual_scale, logit_scale, logit_softcap;  // softcap 0: none
  bool layer_norms;  // less the mean, or (RMS) not
  std::vector<float> positions;  // [max_len, hidden], added to the embedding; or empty

  int vocab() const { return embed->packed().rows; }
  int hidden() const { return embed->packed().cols; }
  int max_len() const { return ropes[0].positions; }
};

// A token's position is its place in the text: rope turns by it, and its id is read there. Its index
// is its place in the cache: where its keys and values are stored, and what attention counts by.
struct Slot {  // decode: feed the token at `position` of `row`. Drafts are further slots of the row.
  int32_t row, position, index;
};

struct Chunk {  // prefill: feed positions [start, start + size) of `row`, the first at `index`
  int32_t row, start, size, index;
};

struct Table {  // the block tables of one KV group: [rows, stride]
  const int32_t* blocks;
  int64_t stride;
};

// The rows of the requests, as `exec/state.py` keeps them.
struct Rows {
  const int32_t* tokens;
  int64_t tokens_stride;
  std::vector<Table> tables;  // of each KV group
};

struct Pool {  // of one KV group, as `kv/host_pool.py` makes it
  void* data;  // [blocks, layers, parts, heads, block_size, dim] in fp16; in int8 with scales, see `Cache`
  int blocks, block_size;
  bool is_int8;
};

// What a step's time goes to.
enum Stage { kEmbed, kNorm, kQkv, kStore, kAttend, kMerge, kOutput, kRoute, kGateUp, kDown, kHead, kStages };
constexpr const char* kStageNames[kStages] = {"embed", "norm",   "qkv",     "store", "attend",
                                              "merge", "output", "route", "gate_up", "down", "head"};

// Throws unless the parts of a model fit each other; its KV groups.
std::vector<KVGroup> check_model(const ModelParts& parts, const Kernels& kernels);

class Model {
 public:
  Model(const Kernels& kernels, ModelParts parts, int threads, int threads_prefill, bool exact);

  // Decode slots, then chunks, and the logits [count, vocab] of the tokens `which` of them, which
  // come in their order. `keep_all`: the last hidden state of every token stays until the next step.
  void forward(const Rows& rows, const std::vector<Pool>& pools, const std::vector<Slot>& decode,
               const std::vector<Chunk>& prefill, const int32_t* which, int count, float* out,
               bool keep_all);
  // Logits of more tokens of a step that was kept.
  void logits(const int32_t* which, int count, float* out);

  // From now on, what shares of attention each decode slot gives to stretches of kSplit cache
  // entries is kept until the next step. Not of layers with latents.
  void keep_shares() { keeps_shares_ = true; }
  int share_slots() const { return share_slots_; }
  int share_parts() const { return share_parts_; }
  // The last step's, [slots, parts], means over heads and layers.
  void shares(float* out) const;

  // `work(n)` for n of 0 … count − 1, by the threads that decode.
  void parallel(int count, const std::function<void(int)>& work);

  int num_kept() const { return kept_; }
  // Seconds of each stage since the model was made, as its first member saw them.
  const std::array<double, kStages>& stage_seconds() const { return stage_seconds_; }
  const ModelParts& parts() const { return parts_; }
  const std::vector<KVGroup>& groups() const { return groups_; }
  size_t num_bytes() const;

 private:
  struct Quantised {  // activations of a step: floats, and 8-bit blocks or (`uses_matrix_units`) bfloat16
    std::vector<float> values, scale, sum, half_sums;
    std::vector<int8_t> codes;
    std::vector<uint16_t> bf16_tiles;
    std::vector<uint16_t> fp16;  // for products with F16
    std::vector<float> fp16_scale;
    std::vector<int32_t> residual_block;  // of each token: its coarsest block, which is coded twice
    bool uses_matrix_units = false;
  };
  struct Step;
  struct Part {  // of a decode slot's context, for some of its heads
    int t, group, from, to;
  };

  void reserve(int tokens);
  void resize(Quantised& a, int tokens, int width) const {
    resize(a, tokens, width, uses_matrix_units(tokens));
  }
  void resize(Quantised& a, int tokens, int width, bool matrix_units) const;
  bool uses_matrix_units(int tokens) const;
  bool in_fp16(int dim) const { return !exact_ && k_.fp16.take(dim); }
  // Decode attention asks for what it is about to read itself.
  bool fetches_ahead(const Cache& cache) const { return !cache.is_int8 && in_fp16(cache.dim); }
  const PrefillAttention& prefill_attention(int dim) const {
    return in_fp16(dim) ? k_.fp16.prefill : k_.prefill;
  }
  const Int8Attention& int8_attention(int dim) const { return in_fp16(dim) ? k_.fp16.int8 : k_.int8; }
  Activations view(const Quantised& a, int width, bool with_residual = false) const;
  void quantise(Quantised& a, int t, int from, int n, const Matrix& next, bool with_residual = false) const;
  void norm(const float* x, const Norm& norm, float* out) const;
  void norm_and_quantise(const float* x, const Norm& norm, Quantised& a, int t, const Matrix& next,
                         bool with_residual) const;
  void plan(Step& step, int members);
  Cache cache_of(const Step& step, const Layer& layer) const;
  void norm_all(const Step& step, const Norm& norm, const Matrix& next, bool with_residual,
                int member);
  void project(const Step& step, const Layer& layer, int member);
  void finish(const Step& step, const Layer& layer, int member);
  void add_branch(const Step& step, std::vector<float>& branch, const Norm& post_norm);
  void mix_experts(const Step& step, const Layer& layer, int member);
  void route(const Experts& experts, int t);
  void group_by_expert(const Layer& layer, int from, int to, bool matrix_units);
  void add_product(const Step& step, const Matrix& w, const Activations& a, const Norm& post_norm);
  void pick(const Step& wanted, const Layer& layer, const int32_t* which);
  void gate_and_up(const Layer& layer, const Activations& a, int tokens, int member);
  void gate_units(const Layer& layer, const MLP& mlp, const Activations& a, int first, int end,
                  int from, int to, int member, Quantised& inner);
  void multiply(const Matrix& w, const Activations& a, int tokens, float* out, int stride,
                bool add);
  void rotate_and_store(const Step& step, const Layer& layer, const Cache& cache, int t, int kv);
  void store(const Step& step, const Layer& layer, const Cache& cache, int from, int to);
  void attend(const Step& step, const Layer& layer, const Cache& cache, int member);
  void attend_slot(const Step& step, const Layer& layer, const Cache& cache, int task);
  int splits(const Step& step, const Layer& layer) const;
  int own_splits(const Step& step, const Layer& layer, int t) const;
  Part part(const Step& step, const Layer& layer, int n) const;
  void prefetch_part(const Step& step, const Layer& layer, const Cache& cache, int n) const;
  void attend_part(const Step& step, const Layer& layer, const Cache& cache, int n);
  void merge(const Step& step, const Layer& layer, int t, int kv);
  void merge_head(const Step& step, const Layer& layer, int t, int head, float* out);
  float* latent_queries(const Layer& layer, int t);
  void project_latent_queries(const Step& step, const Layer& layer);
  void rotate_and_store_latent(const Step& step, const Layer& layer, const Cache& cache, int t);
  void attend_latent(const Step& step, const Layer& layer, const Cache& cache, int member);
  void bring_among_latents(const Step& step, const Layer& layer, int member, int head);
  void leave_latents(const Step& step, const Layer& layer, int member, int head);
  void attend_expanded(const Step& step, const Layer& layer, const Cache& cache, int member,
                       const Chunk& chunk, int first);
  int heads_at_once(const Layer& layer, int keys) const;
  static int first_seen(const Layer& layer, const Chunk& chunk);
  const float* multiply_head(const Matrix& w, int head, int rows, Quantised& in, int tokens,
                             int member);
  void head(const int32_t* which, int count, float* out);
  int num_tasks(int tokens) const;
  void end_stage(Stage stage, int member);
  template <typename F>
  void for_each_token(int from, int to, F&& work);

  const Kernels& k_;
  ModelParts parts_;
  std::vector<KVGroup> groups_;
  int hidden_, most_output_ = 0, most_qkv_ = 0, most_inner_ = 0;  // widths: of a layer at the most
  int most_experts_ = 0, most_per_token_ = 0, most_expert_inner_ = 0;
  int most_q_rank_ = 0, most_latent_q_ = 0;
  bool exact_, any_fp16_ = false, any_branch_ = false;
  int threads_, threads_prefill_;
  Team team_;
  int kept_ = 0;
  std::vector<float> x_, qkv_;
  std::vector<float> branch_;  // what attention or MLP return, where it is normed or scaled first
  Quantised normed_, attended_, inner_, last_;
  // Of a step's tokens in a layer of experts: the router's products, whom it chooses and how much of
  // each; where a token's rows are among those of the experts; and what comes of them all.
  std::vector<float> router_, share_, mixed_;
  std::vector<int32_t> chosen_, place_;
  // An expert in use, its rows, and the first of its tasks in both products.
  struct InUse {
    int expert, first, count, gate_task, down_task, units_per_task, groups_per_task;
  };
  std::vector<InUse> in_use_;
  int gate_tasks_ = 0, down_tasks_ = 0;
  Quantised expert_in_, expert_inner_;
  std::vector<float> expert_out_;
  std::vector<Quantised> own_;  // of each member: what it norms for itself in a small step
  std::vector<std::vector<float>> scratch_, both_;
  std::vector<float> partial_;  // of split decode attention: acc, largest, sum
  std::vector<float> shares_;  // [slots, heads, parts], added up over the layers
  int share_slots_ = 0, share_parts_ = 0, share_heads_ = 0;
  bool keeps_shares_ = false;
  // Of layers with latents: queries and their latents; queries among the latents of the cache; keys
  // and values of some heads; and of each member, inputs and outputs of one head's products.
  std::vector<float> latent_q_, among_latents_;
  Quantised q_latent_;
  std::vector<float> expanded_;  // or fp16
  std::vector<Quantised> head_in_;
  std::vector<std::vector<float>> head_out_;
  std::array<double, kStages> stage_seconds_{};
  std::chrono::steady_clock::time_point stage_start_;
};

}  // namespace twostroke
