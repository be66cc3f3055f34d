// The specification of a model: the dataclasses of `twostroke/model/describe/spec.py`, field by
// field.
//
// `visit` lists the fields of a struct for the reader. A field that this decoder does not need is listed
// with `unused`; the reader rejects every field that is not listed.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace twostroke {

enum class QKNorm { kNone, kHead, kFull };  // RMS norm of q and k over each head, or over all heads
enum class NormKind { kRms, kLayer };
enum class Scoring { kSoftmax, kSigmoid };
enum class GroupScore { kMax, kTop2Sum };  // of the scores of a group's experts
enum class ActivationKind { kSilu, kGeluTanh, kGelu, kClampedSwiglu };

struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float alpha = 1, limit = 0;  // used by kClampedSwiglu
};

struct RopeSpec {
  int table = 0;  // index of the model's rope tables
  int dim = 0;    // channels of a head with rope; with latents, the last ones

  template <typename Reader>
  void visit(Reader& read) {
    read("table", table);
    read("dim", dim);
  }
};

struct LatentSpec {
  int kv_lora_rank = 0, q_lora_rank = 0;  // q_lora_rank 0: queries are projected from x directly
  int value_dim = 0;
  float norm_eps = 0;

  template <typename Reader>
  void visit(Reader& read) {
    read("kv_lora_rank", kv_lora_rank);
    read("q_lora_rank", q_lora_rank);
    read("value_dim", value_dim);
    read("norm_eps", norm_eps);
    read.unused("split");
  }
};

struct AttentionSpec {
  int num_heads = 0, num_kv_heads = 0, head_dim = 0;
  RopeSpec rope;
  float scale = 0, softcap = 0;  // softcap 0: none
  int window = 0;                // 0: none
  QKNorm qk_norm = QKNorm::kNone;
  bool qkv_bias = false, output_bias = false, sinks = false;
  std::optional<LatentSpec> latent;

  template <typename Reader>
  void visit(Reader& read) {
    read("num_heads", num_heads);
    read("num_kv_heads", num_kv_heads);
    read("head_dim", head_dim);
    read("rope", rope);
    read("scale", scale);
    read("softcap", softcap);
    read.or_none("window", window);
    read.choice("qk_norm", qk_norm, {"none", "head", "full"});
    read("qkv_bias", qkv_bias);
    read("output_bias", output_bias);
    read("sinks", sinks);
    read("latent", latent);
  }
};

struct MLPSpec {
  int intermediate_size = 0;
  Activation activation;
  bool bias = false, gated = true;

  template <typename Reader>
  void visit(Reader& read) {
    read("intermediate_size", intermediate_size);
    read("activation", activation);
    read("bias", bias);
    read("gated", gated);
  }
};

struct RoutingSpec {
  int experts_per_token = 1;
  Scoring scoring = Scoring::kSoftmax;
  bool normalised = true;
  float scale = 1;
  bool bias = false, correction_bias = false;
  int num_groups = 1, groups_used = 1;
  GroupScore group_score = GroupScore::kMax;

  template <typename Reader>
  void visit(Reader& read) {
    read("experts_per_token", experts_per_token);
    read.choice("scoring", scoring, {"softmax", "sigmoid"});
    read("normalised", normalised);
    read("scale", scale);
    read("bias", bias);
    read("correction_bias", correction_bias);
    read("num_groups", num_groups);
    read("groups_used", groups_used);
    read.choice("group_score", group_score, {"max", "top2_sum"});
  }
};

struct ExpertsSpec {
  int num_experts = 0;
  MLPSpec expert;
  RoutingSpec routing;
  std::optional<MLPSpec> shared;
  bool shared_gate = false;

  template <typename Reader>
  void visit(Reader& read) {
    read("num_experts", num_experts);
    read("expert", expert);
    read("routing", routing);
    read("shared", shared);
    read("shared_gate", shared_gate);
  }
};

struct LayerSpec {
  AttentionSpec attention;
  std::optional<MLPSpec> mlp;  // a layer has either `mlp` or `experts`
  std::optional<ExpertsSpec> experts;
  bool pre_norm = true, post_norm = false, parallel = false, two_norms = false;
  int kv_group = 0, index_in_group = 0;  // the KV group of the layer, and its place in the group

  template <typename Reader>
  void visit(Reader& read) {
    read("attention", attention);
    read("mlp", mlp);
    read("experts", experts);
    read("pre_norm", pre_norm);
    read("post_norm", post_norm);
    read("parallel", parallel);
    read("two_norms", two_norms);
    read("kv_group", kv_group);
    read("index_in_group", index_in_group);
  }
};

struct ModelSpec {
  int vocab_size = 0, hidden_size = 0;
  std::vector<LayerSpec> layers;
  float norm_eps = 0;
  bool tie_embeddings = false, head_bias = false, learned_positions = false;
  float embed_scale = 1, residual_scale = 1, logit_scale = 1;
  float logit_softcap = 0;  // 0: none
  NormKind norm = NormKind::kRms;
  bool norm_bias = false;

  template <typename Reader>
  void visit(Reader& read) {
    read("vocab_size", vocab_size);
    read("hidden_size", hidden_size);
    read("layers", layers);
    read("norm_eps", norm_eps);
    read("tie_embeddings", tie_embeddings);
    read("head_bias", head_bias);
    read("learned_positions", learned_positions);
    read("embed_scale", embed_scale);
    read("residual_scale", residual_scale);
    read("logit_scale", logit_scale);
    read("logit_softcap", logit_softcap);
    read.choice("norm", norm, {"rms", "layer"});
    read("norm_bias", norm_bias);
    read.unused("family");
    read.unused("max_context");
    read.unused("norm_fp32");
  }
};

}  // namespace twostroke
