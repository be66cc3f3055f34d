"""Families with experts: from a Hugging Face config to a `ModelSpec`. `hf_families.py` has the
entries, and Granite's functions, with and without experts; `hf_experts.py` has the shared parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from twostroke.model.describe import hf_experts
from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.hf_plain import plain
from twostroke.model.describe.spec import LAYERS, WIDTH, LayerSpec, ModelSpec
from twostroke.model.fields import Fields


def mixtral(fields: Fields) -> ModelSpec:
    windows = (parts.window(fields, default=None),) * parts.num_layers(fields)
    experts = hf_experts.experts(fields, 8, 2, "intermediate_size", 14336)
    return plain(fields, "mixtral", windows, theta=1e6, eps=1e-5, mlp=experts)


def qwen2_moe(fields: Fields) -> ModelSpec:
    """Qwen2-MoE: experts and a gated shared expert."""
    count, window = parts.num_layers(fields), None
    kinds: Sequence[str] = [parts.FULL] * count
    if fields.boolean("use_sliding_window", False):  # else the size says nothing
        window = parts.window(fields, default=4096)
        first = fields.integer("max_window_layers", 0, LAYERS[1], default=28)
        usual = [parts.SLIDING if n < first and n % 2 == 0 else parts.FULL for n in range(count)]
        kinds = parts.layer_types(fields, usual)
    normalised = fields.boolean("norm_topk_prob", False)
    experts = hf_experts.experts(
        fields, 60, 4, "moe_intermediate_size", 1408, normalised=normalised
    )
    width = fields.integer("shared_expert_intermediate_size", *WIDTH, default=5632)
    shared = replace(experts.expert, intermediate_size=width)
    experts = replace(experts, shared=shared, shared_gate=True)
    biased = fields.boolean("qkv_bias", True)
    bias: dict[str, Any] = {"qkv_bias": biased, "output_bias": False}
    spec = plain(fields, "qwen2_moe", parts.windows(kinds, window), mlp=experts, **bias)
    return hf_experts.with_mlps(spec, hf_experts.sparse_step_mlps(fields, experts))


def qwen3_moe(fields: Fields) -> ModelSpec:
    slides = fields.boolean("use_sliding_window", False)
    window = parts.window(fields, default=4096) if slides else None
    normalised = fields.boolean("norm_topk_prob", False)
    experts = hf_experts.experts(
        fields, 128, 8, "moe_intermediate_size", 768, normalised=normalised
    )
    windows = (window,) * parts.num_layers(fields)
    spec = plain(fields, "qwen3_moe", windows, mlp=experts, qk_norm="head")
    return hf_experts.with_mlps(spec, hf_experts.sparse_step_mlps(fields, experts))


def olmoe(fields: Fields) -> ModelSpec:
    """OLMoE: norms over all heads of q and of k."""
    parts.refuse_if_given(fields, "clip_qkv")
    normalised = fields.boolean("norm_topk_prob", False)
    experts = hf_experts.experts(fields, 64, 8, "intermediate_size", 2048, normalised=normalised)
    return plain(fields, "olmoe", eps=1e-5, mlp=experts, qk_norm="full")


# The defaults of the family's own code; q_lora_rank may be null.
DEEPSEEK_DEFAULTS = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
DEEPSEEK_DEFAULTS |= {"qk_rope_head_dim": 64, "v_head_dim": 128}


def deepseek_v2(fields: Fields) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite."""
    return _deepseek(fields, "deepseek_v2", v3=False)


def deepseek_v3(fields: Fields) -> ModelSpec:
    """DeepSeek-V3 and R1, Kimi K2, Moonlight."""
    if not fields.boolean("rope_interleave", True):
        fields.refuse("rope_interleave", "true: weights whose rope pairs are neighbours")
    return _deepseek(fields, "deepseek_v3", v3=True)


def _deepseek(fields: Fields, family: str, v3: bool) -> ModelSpec:
    """Return a model with latent attention, and with experts in all but the first layers."""
    count = parts.num_layers(fields)
    attention, max_context = parts.latent_attention(fields.with_defaults(DEEPSEEK_DEFAULTS))
    biased = not v3 and fields.boolean("mlp_bias", False)
    layer = LayerSpec(attention, parts.mlp(fields, parts.activation(fields), biased))
    spec = parts.model(fields, family, [layer] * count, max_context)
    first = fields.integer("first_k_dense_replace", 0, LAYERS[1], default=3 if v3 else 0)
    if not fields.value("n_routed_experts") or first >= count:
        return spec
    if biased:
        fields.refuse("mlp_bias", "false in a model with experts")
    return hf_experts.with_mlps(spec, hf_experts.deepseek(fields, v3))
