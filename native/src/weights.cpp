#include "weights.h"

#include <algorithm>

namespace twostroke {

namespace {
void require_shape(const std::string& name, size_t rows, size_t cols, int expected_rows, int expected_cols) {
  auto shape = [](size_t rows, size_t cols) {
    return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
  };
  require(rows == static_cast<size_t>(expected_rows) && cols == static_cast<size_t>(expected_cols),
          name + " has shape " + shape(rows, cols) + " instead of " + shape(expected_rows, expected_cols));
}
}  // namespace

std::shared_ptr<Matrix> Weights::matrix(const std::string& name, int rows, int cols, bool bias) {
  const auto found = matrices_.find(name);
  require(found != matrices_.end() && found->second != nullptr, "the matrix " + name + " is missing");
  std::shared_ptr<Matrix> matrix = std::move(found->second);
  matrices_.erase(found);
  const Packed& packed = matrix->packed();
  require(packed.lanes == kernels_.lanes_of(packed.format), name + " is packed for other kernels");
  require_shape(name, packed.rows, packed.cols, rows, cols);
  require((packed.bias != nullptr) == bias, name + (bias ? " has no bias" : " has an unexpected bias"));
  return matrix;
}

std::vector<float> Weights::vector(const std::string& name, size_t size) {
  const auto found = vectors_.find(name);
  require(found != vectors_.end(), "the vector " + name + " is missing");
  std::vector<float> values = std::move(found->second);
  vectors_.erase(found);
  require(values.size() == size, name + " has " + std::to_string(values.size()) + " elements instead of " +
                                     std::to_string(size));
  return values;
}

void Weights::require_all_taken() const {
  for (const auto& [name, matrix] : matrices_) require(false, name + " belongs to no layer of the specification");
  for (const auto& [name, values] : vectors_) require(false, name + " belongs to no layer of the specification");
}

namespace {

// Assembles one layer. `at` is the prefix of the names of its weights: "layers.3.".
class LayerAssembler {
 public:
  LayerAssembler(const ModelSpec& model, Weights& weights, std::string at)
      : model_(model), weights_(weights), at_(std::move(at)) {}

  Layer assemble(const LayerSpec& spec, const std::vector<Rope>& ropes) {
    Layer layer;
    layer.spec = spec;
    check_attention(spec, ropes);
    const AttentionSpec& attention = spec.attention;
    layer.latent = latent(attention);
    const int hidden = model_.hidden_size;
    layer.qkv = weights_.matrix(at_ + "qkv", layer.qkv_size(), hidden, attention.qkv_bias);
    layer.o = weights_.matrix(at_ + "o", hidden, layer.output_size(), attention.output_bias);
    if (spec.experts) {
      layer.experts = experts(*spec.experts);
      if (spec.experts->shared) layer.mlp = mlp(*spec.experts->shared, at_ + "shared.");
    } else {
      require(spec.mlp.has_value(), at_ + "mlp is missing");
      layer.mlp = mlp(*spec.mlp, at_);
    }
    if (spec.pre_norm) layer.attn_norm = norm("attn_norm");
    if (spec.pre_norm && (spec.two_norms || !spec.parallel)) layer.mlp_norm = norm("mlp_norm");
    if (spec.post_norm) layer.attn_post_norm = norm("attn_post_norm"), layer.mlp_post_norm = norm("mlp_post_norm");
    if (attention.qk_norm != QKNorm::kNone) {
      const bool full = attention.qk_norm == QKNorm::kFull;
      layer.q_norm = weights_.vector(at_ + "q_norm", full ? layer.q_size() : attention.head_dim);
      layer.k_norm = weights_.vector(at_ + "k_norm", full ? layer.kv_size() : attention.head_dim);
    }
    if (attention.sinks) layer.sinks = weights_.vector(at_ + "sinks", attention.num_heads);
    if (weights_.has(at_ + "key_scales")) {
      require(layer.latent == nullptr, at_ + "key_scales: latent attention has no scales of key channels");
      layer.key_scales = weights_.vector(at_ + "key_scales", layer.kv_size());
      for (float scale : layer.key_scales) layer.key_factors.push_back(1 / scale);
    }
    return layer;
  }

 private:
  void check_attention(const LayerSpec& spec, const std::vector<Rope>& ropes) const {
    const AttentionSpec& attention = spec.attention;
    const std::string at = at_ + "attention: ";
    require(attention.head_dim > 0 && attention.num_kv_heads > 0 && attention.num_heads > 0 &&
                attention.num_heads % attention.num_kv_heads == 0,
            at + "num_heads must be a multiple of num_kv_heads");
    require(attention.scale > 0 && attention.softcap >= 0 && attention.window >= 0,
            at + "scale, softcap or window is negative");
    require(attention.rope.table >= 0 && static_cast<size_t>(attention.rope.table) < ropes.size(),
            at + "there is no rope table " + std::to_string(attention.rope.table));
    const Rope& rope = ropes[attention.rope.table];
    if (!attention.latent) {
      require(2 * rope.half <= attention.head_dim, at + "rope has more channels than a head");
      return;
    }
    const LatentSpec& latent = *attention.latent;
    require(latent.kv_lora_rank > 0 && latent.q_lora_rank >= 0 && latent.value_dim > 0 && latent.norm_eps >= 0 &&
                attention.rope.dim > 0 && attention.head_dim > attention.rope.dim &&
                attention.num_kv_heads == attention.num_heads && attention.qk_norm == QKNorm::kNone &&
                !attention.sinks,
            at + "the specification of latent attention is inconsistent");
    require(2 * rope.half == attention.rope.dim, at + "the rope table has another number of channels");
    require(rope.query_scales.empty(), at + "latent attention does not support query scales");
  }

  Norm norm(const char* name) {
    const size_t size = model_.hidden_size;
    Norm norm{weights_.vector(at_ + name, size), {}};
    if (model_.norm_bias) norm.bias = weights_.vector(at_ + name + "_bias", size);
    return norm;
  }

  std::shared_ptr<const Latent> latent(const AttentionSpec& attention) {
    if (!attention.latent) return nullptr;
    auto latent = std::make_shared<Latent>();
    latent->spec = *attention.latent;
    const int rank = latent->rank(), q_rank = latent->q_rank(), heads = attention.num_heads;
    const int nope = attention.head_dim - attention.rope.dim;
    if (q_rank > 0) {
      latent->q_b = weights_.matrix(at_ + "q_b", heads * attention.head_dim, q_rank);
      latent->q_norm = weights_.vector(at_ + "q_a_norm", q_rank);
    }
    latent->kv_norm = weights_.vector(at_ + "kv_a_norm", rank);
    const std::string kv_b = at_ + "kv_b.";
    latent->keys = weights_.matrix(kv_b + "keys", heads * Latent::head_rows(nope), rank);
    latent->values = weights_.matrix(kv_b + "values", heads * Latent::head_rows(latent->spec.value_dim), rank);
    latent->keys_transposed = weights_.matrix(kv_b + "keys_transposed", heads * Latent::head_rows(rank), nope);
    return latent;
  }

  MLP mlp(const MLPSpec& spec, const std::string& at) {
    require(spec.intermediate_size > 0, at + "intermediate_size must be positive");
    require(spec.gated || spec.activation.kind != ActivationKind::kClampedSwiglu,
            at + "a clamped swiglu needs a gate");
    const int hidden = model_.hidden_size, inner = spec.intermediate_size;
    return {spec, weights_.matrix(at + "gate_up", (spec.gated ? 2 : 1) * inner, hidden, spec.bias),
            weights_.matrix(at + "down", hidden, inner, spec.bias)};
  }

  std::shared_ptr<const Experts> experts(const ExpertsSpec& spec) {
    const RoutingSpec& routing = spec.routing;
    const int count = spec.num_experts, groups = routing.num_groups, used = routing.groups_used;
    require(count > 0 && routing.experts_per_token > 0 && groups > 0 && used > 0 && used <= groups &&
                count % groups == 0 && routing.experts_per_token <= used * (count / groups) &&
                (routing.group_score != GroupScore::kTop2Sum || count / groups > 1),
            at_ + "experts: there are too few experts or groups for a token");
    require(!spec.shared_gate || spec.shared.has_value(), at_ + "experts: shared_gate needs a shared expert");
    auto experts = std::make_shared<Experts>();
    experts->spec = spec;
    experts->router = weights_.matrix(at_ + "router", count + (spec.shared_gate ? 1 : 0), model_.hidden_size, routing.bias);
    require(experts->router->packed().format == Format::kF32, at_ + "router must have the format f32");
    if (routing.correction_bias) experts->correction = weights_.vector(at_ + "router_correction", count);
    for (int n = 0; n < count; n++)
      experts->experts.push_back(mlp(spec.expert, at_ + "experts." + std::to_string(n) + "."));
    return experts;
  }

  const ModelSpec& model_;
  Weights& weights_;
  const std::string at_;
};

std::vector<KVGroup> kv_groups(const std::vector<Layer>& layers) {
  std::vector<KVGroup> groups;
  std::vector<std::vector<bool>> taken;  // the places of each group that a layer has
  for (size_t n = 0; n < layers.size(); n++) {
    const Layer& layer = layers[n];
    const std::string at = "layers." + std::to_string(n) + ": ";
    const int number = layer.spec.kv_group, place = layer.spec.index_in_group;
    require(number >= 0 && static_cast<size_t>(number) < layers.size() && place >= 0 &&
                static_cast<size_t>(place) < layers.size(),
            at + "there is no such KV group or place in the group");
    groups.resize(std::max<size_t>(groups.size(), number + 1));
    taken.resize(groups.size());
    std::vector<bool>& own = taken[number];
    own.resize(std::max<size_t>(own.size(), place + 1));
    require(!own[place], at + "its place in the KV group is taken");
    own[place] = true;
    KVGroup& group = groups[number];
    const int sides = layer.latent == nullptr ? 2 : 1;
    require(group.layers++ == 0 || (group.heads == layer.cached_heads() && group.dim == layer.cached_dim() &&
                                    group.sides == sides),
            at + "its heads have another shape than those of its KV group");
    group.heads = layer.cached_heads(), group.dim = layer.cached_dim(), group.sides = sides;
  }
  for (size_t n = 0; n < groups.size(); n++)
    require(groups[n].layers > 0 && static_cast<size_t>(groups[n].layers) == taken[n].size(),
            "KV group " + std::to_string(n) + " lacks layers");
  return groups;
}

void check_ropes(const std::vector<Rope>& ropes) {
  require(!ropes.empty(), "there is no rope table");
  for (const Rope& rope : ropes) {
    require(rope.positions == ropes[0].positions, "the rope tables have different lengths");
    require(rope.query_scales.empty() || rope.query_scales.size() == static_cast<size_t>(rope.positions),
            "the query scales have another number of positions than the rope tables");
  }
}

}  // namespace

ModelData assemble(ModelSpec spec, Weights weights, std::vector<Rope> ropes) {
  check_ropes(ropes);
  require(spec.norm_eps >= 0 && spec.logit_softcap >= 0, "norm_eps or logit_softcap is negative");
  require(spec.vocab_size > 0 && spec.hidden_size > 0, "vocab_size and hidden_size must be positive");
  ModelData parts;
  const int hidden = spec.hidden_size;
  parts.embed = weights.matrix("embed", spec.vocab_size, hidden);
  parts.head = spec.tie_embeddings ? parts.embed : weights.matrix("head", spec.vocab_size, hidden, spec.head_bias);
  parts.final_norm.weight = weights.vector("final_norm", hidden);
  if (spec.norm_bias) parts.final_norm.bias = weights.vector("final_norm_bias", hidden);
  if (spec.learned_positions)
    parts.positions = weights.vector("positions", static_cast<size_t>(ropes[0].positions) * hidden);
  for (size_t n = 0; n < spec.layers.size(); n++)
    parts.layers.push_back(
        LayerAssembler(spec, weights, "layers." + std::to_string(n) + ".").assemble(spec.layers[n], ropes));
  weights.require_all_taken();
  parts.groups = kv_groups(parts.layers);
  parts.ropes = std::move(ropes);
  parts.spec = std::move(spec);
  return parts;
}

}  // namespace twostroke
