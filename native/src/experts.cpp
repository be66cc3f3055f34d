// The mixture of experts of a layer. `Kernels.route` and `Kernels.experts` of
// `twostroke/kernels/reference.py` define the results.
//
// The rows of the tokens of one expert are gathered, so that the expert multiplies them as a block and a
// step reads only the experts in use. The bits of a token's result do not depend on the other tokens:
// products of rows are independent, and the experts of a token are added in the order of their scores.

#include "step.h"

#include <cmath>
#include <cstring>

namespace twostroke {

namespace {
constexpr int kAtOnce = 512;     // tokens whose rows are in memory together
constexpr float kTiny = 1e-20f;  // lower bound of the sum of scores that is divided by
constexpr float kNever = -INFINITY;
}  // namespace

void Model::mix_experts(const Step& step, const Layer& layer, int worker) {
  const Experts& experts = *layer.experts;
  const int rows = experts.router->packed().rows, each = experts.spec.routing.experts_per_token;
  const int tokens = step.tokens;
  const bool matrix_units = uses_matrix_units(tokens);
  const Quantised& normed = step.small ? worker_normed_[worker] : normed_;
  const bool shared = layer.mlp.down != nullptr;
  if (shared) {
    gate_and_up(layer, view(normed, hidden_), tokens, worker);
    end_stage(kGateUp, worker);
    multiply(*layer.mlp.down, view(inner_, layer.mlp.inner()), tokens, mixed_.data(), hidden_, false);
    end_stage(kDown, worker);
  }
  multiply(*experts.router, view(normed, hidden_), tokens, router_.data(), rows, false);
  if (!step.small) for_each_token(0, tokens, [&](int t) { route(experts, t); });
  for (int t0 = 0; t0 < tokens; t0 += kAtOnce) {
    const int t1 = std::min(tokens, t0 + kAtOnce);
    thread_pool_.parallel_for(1, [&](int) {
      for (int t = t0; step.small && t < t1; t++) route(experts, t);
      group_by_expert(layer, t0, t1, matrix_units);
    });
    for_each_token(t0 * each, t1 * each, [&](int n) {
      const MLP& mlp = experts.experts[chosen_[n]];
      float* to = &expert_in_.values[static_cast<size_t>(expert_row_[n]) * hidden_];
      std::memcpy(to, &normed.values[static_cast<size_t>(n / each) * hidden_], hidden_ * sizeof(float));
      quantise(expert_in_, expert_row_[n], 0, hidden_, *mlp.gate_up);
    });
    end_stage(kRoute, worker);
    const int inner = experts.inner(), units = ceil_div(inner, kBlock);
    auto owner = [&](int task, int InUse::*first) -> const InUse& {  // the last expert whose first task is ≤ task
      auto after = [&](int n, const InUse& one) { return n < one.*first; };
      return *(std::upper_bound(in_use_.begin(), in_use_.end(), task, after) - 1);
    };
    thread_pool_.parallel_for(gate_tasks_, [&](int task) {
      const InUse& one = owner(task, &InUse::gate_task);
      const int from = (task - one.gate_task) * one.units_per_task;
      gate_units(experts.experts[one.expert], view(expert_in_, hidden_), one.first,
                 one.first + one.count, from, std::min(units, from + one.units_per_task), worker,
                 expert_inner_);
    });
    end_stage(kGateUp, worker);
    thread_pool_.parallel_for(down_tasks_, [&](int task) {
      const InUse& one = owner(task, &InUse::down_task);
      const Packed& w = experts.experts[one.expert].down->packed();
      const int from = (task - one.down_task) * one.groups_per_task;
      const int to = std::min(w.groups(), from + one.groups_per_task);
      float* out = &expert_out_[static_cast<size_t>(one.first) * hidden_ + from * w.lanes];
      k_.matmul(w, view(expert_inner_, inner), one.first, one.first + one.count, from, to, out,
                hidden_, false);
    });
    for_each_token(t0, t1, [&](int t) {
      float* sum = &mixed_[static_cast<size_t>(t) * hidden_];
      if (!shared) std::memset(sum, 0, hidden_ * sizeof(float));
      if (experts.spec.shared_gate) {
        const float gate = 1 / (1 + std::exp(-router_[static_cast<size_t>(t) * rows + rows - 1]));
        for (int i = 0; i < hidden_; i++) sum[i] *= gate;
      }
      for (int n = t * each; n < (t + 1) * each; n++) {
        const float* out = &expert_out_[static_cast<size_t>(expert_row_[n]) * hidden_];
        const float share = share_[n];
        for (int i = 0; i < hidden_; i++) sum[i] += share * out[i];
      }
    });
    end_stage(kDown, worker);
  }
}

// Choose the experts of a token, best first, and compute the factors of their outputs.
void Model::route(const Experts& experts, int t) {
  const RoutingSpec& rule = experts.spec.routing;
  const int count = experts.count(), each = rule.experts_per_token;
  const float* products = &router_[static_cast<size_t>(t) * experts.router->packed().rows];
  std::vector<float> scores(count), choice(count);
  const float largest = *std::max_element(products, products + count);
  float sum = 0;
  for (int e = 0; e < count; e++) {
    scores[e] = (rule.scoring == Scoring::kSigmoid) ? 1 / (1 + std::exp(-products[e])) : std::exp(products[e] - largest);
    sum += scores[e];
  }
  for (int e = 0; e < count; e++) {
    if (!(rule.scoring == Scoring::kSigmoid)) scores[e] /= sum;
    choice[e] = scores[e] + (experts.correction.empty() ? 0 : experts.correction[e]);
  }
  auto take_best = [](std::vector<float>& of) {  // NaN is never the best
    const int best = static_cast<int>(std::max_element(of.begin(), of.end()) - of.begin());
    of[best] = kNever;
    return best;
  };
  if (rule.num_groups > rule.groups_used) {
    const int size = count / rule.num_groups;
    std::vector<float> of_group(rule.num_groups), kept(count, kNever);
    for (int g = 0; g < rule.num_groups; g++) {
      float first = kNever, second = kNever;
      for (int e = g * size; e < (g + 1) * size; e++) {
        if (choice[e] > first) second = first, first = choice[e];
        else if (choice[e] > second) second = choice[e];
      }
      of_group[g] = rule.group_score == GroupScore::kTop2Sum ? first + second : first;
    }
    for (int n = 0; n < rule.groups_used; n++) {
      const int g = take_best(of_group);
      std::copy(&choice[g * size], &choice[g * size] + size, &kept[g * size]);
    }
    choice.swap(kept);
  }
  int32_t* chosen = &chosen_[static_cast<size_t>(t) * each];
  float *share = &share_[static_cast<size_t>(t) * each], total = 0;
  for (int n = 0; n < each; n++) {
    chosen[n] = take_best(choice);
    total += share[n] = scores[chosen[n]];
  }
  const float factor = rule.normalised ? rule.scale / std::max(total, kTiny) : rule.scale;
  for (int n = 0; n < each; n++) share[n] *= factor;
}

// Assign places to the rows of tokens [from, to); the rows of an expert begin at a tile. Split both
// matmuls into tasks of equal cost.
void Model::group_by_expert(const Layer& layer, int from, int to, bool matrix_units) {
  const Experts& experts = *layer.experts;
  const int each = experts.spec.routing.experts_per_token, tile = matrix_units ? kTileTokens : kTile;
  std::vector<int> next(experts.count());
  for (int n = from * each; n < to * each; n++) next[chosen_[n]]++;
  in_use_.clear();
  int rows = 0, cost = 0;
  auto cost_of = [](int count) { return std::max(count, kTile); };  // few tokens are bound by reading the weights
  for (int e = 0; e < experts.count(); e++) {
    if (next[e] == 0) continue;
    in_use_.push_back({e, rows, next[e], 0, 0, 0, 0});
    cost += cost_of(next[e]);
    next[e] = rows;
    rows += ceil_div(in_use_.back().count, tile) * tile;
  }
  for (int n = from * each; n < to * each; n++) expert_row_[n] = next[chosen_[n]]++;
  const int units = ceil_div(experts.inner(), kBlock);
  // More tasks than workers: the few experts are rarely a multiple of the workers.
  const int tasks = std::max(num_tasks(std::min(to - from, kTile)), 4 * threads_);
  gate_tasks_ = down_tasks_ = 0;
  for (InUse& one : in_use_) {
    const double share = static_cast<double>(cost_of(one.count)) * tasks / cost;  // share of the tasks
    auto split = [&](int parts) { return std::max(1, std::min(parts, static_cast<int>(parts / share))); };
    const int groups = experts.experts[one.expert].down->packed().groups();
    one.units_per_task = split(units), one.groups_per_task = split(groups);
    one.gate_task = gate_tasks_, one.down_task = down_tasks_;
    gate_tasks_ += ceil_div(units, one.units_per_task);
    down_tasks_ += ceil_div(groups, one.groups_per_task);
  }
  resize(expert_in_, rows, hidden_, matrix_units);
  resize(expert_inner_, rows, max_expert_inner_, matrix_units);
  if (expert_out_.size() < static_cast<size_t>(rows) * hidden_)
    expert_out_.resize(static_cast<size_t>(rows) * hidden_);
}

}  // namespace twostroke
