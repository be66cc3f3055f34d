"""Mixtures of experts in a Hugging Face `config.json`: the parts that families share.

No function here tests for a family: differences are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.spec import (
    EXPERTS,
    LAYERS,
    WIDTH,
    ExpertsSpec,
    MLPSpec,
    ModelSpec,
    RoutingSpec,
    Scoring,
)
from twostroke.model.fields import Fields

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # synonyms


def experts(
    fields: Fields, num_experts: int, per_token: int, width: str, width_default: Any, **routing: Any
) -> ExpertsSpec:
    """Return experts. `width`: the field with the intermediate size of an expert. `num_experts`,
    `per_token` and `width_default` are defaults."""
    name = next((name for name in COUNTS if name in fields), COUNTS[0])
    count = fields.integer(name, 0, EXPERTS[1], default=num_experts)
    if not count:
        fields.refuse(name, "at least 1 with this model_type")
    chosen = fields.integer("num_experts_per_tok", *EXPERTS, default=per_token)
    if chosen > count:
        raise ModelError(
            f"{fields.where}: num_experts_per_tok {chosen} is more than the {count} experts there "
            f"are ({name})."
        )
    inner = fields.integer(width, *WIDTH, default=width_default)
    return ExpertsSpec(
        count, MLPSpec(inner, parts.activation(fields)), RoutingSpec(chosen, **routing)
    )


def sparse_step_mlps(fields: Fields, experts: ExpertsSpec) -> list[MLPSpec | ExpertsSpec]:
    """Return the MLP of each layer: experts in every `decoder_sparse_step`-th layer outside
    `mlp_only_layers`, a dense MLP in the other layers."""
    step = fields.integer("decoder_sparse_step", 1, LAYERS[1], default=1)
    dense = set(fields.items("mlp_only_layers", int, "layer numbers"))
    sparse = [n not in dense and (n + 1) % step == 0 for n in range(parts.num_layers(fields))]
    return _mixed(fields, experts, sparse)


def with_mlps(spec: ModelSpec, mlps: Sequence[MLPSpec | ExpertsSpec]) -> ModelSpec:
    """Return the model with these MLPs, one per layer."""
    pairs = zip(spec.layers, mlps, strict=True)
    return replace(spec, layers=tuple(replace(layer, mlp=mlp) for layer, mlp in pairs))


def deepseek(fields: Fields, v3: bool) -> list[MLPSpec | ExpertsSpec]:
    """Return the MLP of each layer of DeepSeek V2, V2-Lite or V3. The first `first_k_dense_replace`
    layers are dense."""
    groups = fields.integer("n_group", *EXPERTS, default=8 if v3 else 1)
    used = fields.integer("topk_group", *EXPERTS, default=4 if v3 else 1)
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    scoring: Scoring = "sigmoid" if v3 else "softmax"
    method = _one_of(fields, "topk_method", methods)
    _one_of(fields, "scoring_func", (scoring,))
    if method == "greedy":
        groups = used = 1
    found = experts(
        fields,
        256 if v3 else 64,
        8 if v3 else 6,
        "moe_intermediate_size",
        2048 if v3 else 1407,
        scoring=scoring,
        normalised=fields.boolean("norm_topk_prob", v3),
        scale=parts.multiplier(fields, "routed_scaling_factor", 2.5 if v3 else 1.0),
        correction_bias=v3,
        num_groups=groups,
        groups_used=used,
        group_score="top2_sum" if v3 else "max",
    )
    _check_groups(fields, found)
    if fields.integer("moe_layer_freq", 1, LAYERS[1], default=1) != 1:
        fields.refuse("moe_layer_freq", "1: experts in every layer after the first dense ones")
    shared = fields.integer("n_shared_experts", 0, EXPERTS[1], default=1 if v3 else 2)
    if shared:
        width = shared * found.expert.intermediate_size
        found = replace(found, shared=replace(found.expert, intermediate_size=width))
    first = fields.integer("first_k_dense_replace", 0, LAYERS[1], default=3 if v3 else 0)
    sparse = [n >= first for n in range(parts.num_layers(fields))]
    return _mixed(fields, found, sparse)


def _one_of(fields: Fields, name: str, known: Sequence[str]) -> Any:
    """Return a field, by default the first of `known`. Refuse other values."""
    value = fields.value(name) if name in fields else known[0]
    if value not in known:
        fields.refuse(name, f"one of {', '.join(known)} with this model_type")
    return value


def _check_groups(fields: Fields, experts: ExpertsSpec) -> None:
    routing, count = experts.routing, experts.num_experts
    if count % routing.num_groups:
        fields.refuse("n_group", f"a divisor of the number of experts, {count} (n_routed_experts)")
    size = count // routing.num_groups
    if routing.group_score == "top2_sum" and size < 2:
        fields.refuse("n_group", f"such that a group has at least two of the {count} experts")
    if routing.groups_used > routing.num_groups:
        fields.refuse("topk_group", f"at most n_group, {routing.num_groups}")
    if routing.experts_per_token > routing.groups_used * size:
        fields.refuse(
            "topk_group",
            f"such that its groups, of {size} experts each, have the {routing.experts_per_token} "
            "experts of a token (num_experts_per_tok)",
        )


def _mixed(
    fields: Fields, experts: ExpertsSpec, sparse: Sequence[bool]
) -> list[MLPSpec | ExpertsSpec]:
    if all(sparse):
        return [experts] * len(sparse)
    dense = parts.mlp(fields, experts.expert.activation)
    return [experts if one else dense for one in sparse]
