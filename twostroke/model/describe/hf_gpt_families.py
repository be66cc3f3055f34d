"""The families with LayerNorms and MLPs without a gate: GPT-2, GPT-J, GPT-NeoX, Phi and Falcon.

Functions and names as in `hf_families.py`, whose table has them. And gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.model.describe import hf_experts
from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.hf_names import (
    FALCON_NAMES,
    FALCON_TWO_NORMS_NAMES,
    GPT_OSS_MXFP4_NAMES,
    GPT_OSS_NAMES,
)
from twostroke.model.describe.spec import (
    WIDTH,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    with_layers,
    without_rope,
)
from twostroke.model.describe.tensor_names import TensorNames
from twostroke.model.fields import REQUIRED, Fields

# What a family calls a field → the usual name is the key.
GPT2_ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}
GPT2_ALIASES |= {"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"}
GPT2_ALIASES |= {"intermediate_size": "n_inner", "hidden_act": "activation_function"}
GPT2_ALIASES |= {"layer_norm_eps": "layer_norm_epsilon"}
GPT_NEOX_ALIASES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
FALCON_ALIASES = {"num_key_value_heads": "num_kv_heads", "attention_bias": "bias"}
FALCON_ALIASES |= {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"}
FALCON_ALIASES |= {"layer_norm_eps": "layer_norm_epsilon"}

GELU_TANH: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}
GELU_TANH |= {"gelu_pytorch_tanh": "gelu_tanh"}
GELU: dict[str, Activation] = {"gelu": "gelu"}


def gpt2(fields: Fields) -> ModelSpec:
    """Learned positions in rope's place."""
    parts.refuse_if_given(fields, "add_cross_attention")
    spec = _model(fields, "gpt2", GELU_TANH | GELU, tied=True, qkv_bias=True, output_bias=True)
    if not fields.boolean("scale_attn_weights", True):
        spec = _with_scales(spec, [1.0] * spec.num_layers)
    if fields.boolean("scale_attn_by_inverse_layer_idx", False):
        scales = [layer.attention.scale / (n + 1) for n, layer in enumerate(spec.layers)]
        spec = _with_scales(spec, scales)
    return replace(without_rope(spec, range(spec.num_layers)), learned_positions=True)


def _with_scales(spec: ModelSpec, scales: list[float]) -> ModelSpec:
    layers = [
        replace(layer, attention=replace(layer.attention, scale=scale))
        for layer, scale in zip(spec.layers, scales, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def gptj(fields: Fields) -> ModelSpec:
    """Attention and MLP side by side, behind one norm; a bias on the head."""
    parts.refuse_if_given(fields, "tie_word_embeddings")
    head_dim = parts.heads(fields)[2]
    default = REQUIRED if fields.given_as_null("rotary_dim") else 64
    rotated = fields.integer("rotary_dim", 2, head_dim, default=default)
    if rotated % 2 or rotated > head_dim:
        fields.refuse("rotary_dim", f"even and at most the head's {head_dim} channels")
    rope = RopeSpec(10000.0, rotated)
    spec = _model(fields, "gptj", GELU_TANH | GELU, rope=rope, qkv_bias=False, output_bias=False)
    return replace(with_layers(spec, parallel=True), head_bias=True)


def gpt_neox(fields: Fields) -> ModelSpec:
    """Pythia and GPT-NeoX-20B: side by side, each with a norm, or one after another."""
    bias = fields.boolean("attention_bias", True)
    fields = fields.with_defaults({"partial_rotary_factor": 0.25})
    spec = _model(fields, "gpt_neox", GELU | GELU_TANH, qkv_bias=bias, output_bias=bias)
    parallel = fields.boolean("use_parallel_residual", True)
    return with_layers(spec, parallel=parallel, two_norms=parallel)


def phi(fields: Fields) -> ModelSpec:
    """Phi-1, 1.5 and 2: side by side, behind one norm; a bias on the head."""
    parts.refuse_if_given(fields, "qk_layernorm", "tie_word_embeddings")
    fields = fields.with_defaults({"partial_rotary_factor": 0.5})
    spec = _model(fields, "phi", GELU_TANH | GELU, qkv_bias=True, output_bias=True)
    return replace(with_layers(spec, parallel=True), head_bias=True)


def falcon(fields: Fields) -> ModelSpec:
    """Falcon 7B (one KV head), 40B and 180B (two norms), and 2 11B."""
    parts.refuse_if_given(fields, "alibi")
    is_new = fields.boolean("new_decoder_architecture", False)
    if not is_new:
        shared = fields.boolean("multi_query", True)
        count = 1 if shared else fields.value("num_attention_heads")
        fields = fields.over(Fields(fields.where, {fields.called("num_key_value_heads"): count}))
    fields = fields.with_defaults({"max_position_embeddings": 2048})
    spec = _model(fields, "falcon", GELU | GELU_TANH, tied=True, mlp_bias=None)
    parallel = is_new or fields.boolean("parallel_attn", True)
    return with_layers(spec, parallel=parallel, two_norms=_falcon_has_two_norms(fields))


def falcon_names(fields: Fields) -> TensorNames:
    return FALCON_TWO_NORMS_NAMES if _falcon_has_two_norms(fields) else FALCON_NAMES


def _falcon_has_two_norms(fields: Fields) -> bool:
    is_new = fields.boolean("new_decoder_architecture", False)
    return is_new and fields.integer("num_ln_in_parallel_attn", 1, 2, default=2) == 2


def _model(
    fields: Fields,
    family: str,
    activations: Mapping[str, Activation],
    tied: bool = False,
    mlp_bias: bool | None = True,
    **different: Any,
) -> ModelSpec:
    """LayerNorms with bias, and an MLP without a gate. The first of `activations` is the usual
    one; `mlp_bias`: None for as attention has it; `different`: what is of the attention."""
    rope, max_context = parts.rope(fields, parts.heads(fields)[2])
    attention = replace(parts.attention(fields, rope), **different)
    bias = attention.qkv_bias if mlp_bias is None else mlp_bias
    inner = 4 * fields.integer("hidden_size", *WIDTH)
    mlp = parts.mlp(fields, parts.activation(fields, known=activations), bias, inner)
    layer = LayerSpec(attention, replace(mlp, gated=False))
    layers = [layer] * parts.num_layers(fields)
    spec = parts.model(fields, family, layers, max_context, tied, 1e-5, "layer_norm_eps")
    return replace(spec, norm="layer", norm_bias=True)


def gpt_oss(fields: Fields) -> ModelSpec:
    """Every other layer slides, and each head has a sink; experts of a clamped activation."""
    experts = hf_experts.experts(fields, 128, 4, "intermediate_size", 2880, bias=True)
    clamped = ClampedSwiglu(
        alpha=parts.multiplier(fields, "swiglu_alpha", 1.702),
        limit=parts.multiplier(fields, "swiglu_limit", 7.0),
    )
    mlp = replace(experts, expert=replace(experts.expert, activation=clamped, bias=True))
    fields = fields.with_defaults({"head_dim": 64, "num_key_value_heads": 8})
    rope, max_context = parts.rope(fields, parts.heads(fields)[2], default_theta=150000.0)
    bias = fields.boolean("attention_bias", True)
    attention = replace(parts.attention(fields, rope), qkv_bias=bias, output_bias=bias, sinks=True)
    kinds = parts.layer_kinds(fields, parts.one_full_in(2, parts.num_layers(fields)))
    windows = parts.windows(kinds, parts.window(fields, default=128))
    layers = [LayerSpec(replace(attention, window=window), mlp) for window in windows]
    spec = parts.model(fields, "gpt_oss", layers, max_context, eps=1e-5)
    return replace(spec, norm_fp32=True)


def gpt_oss_names(fields: Fields) -> TensorNames:
    return GPT_OSS_MXFP4_NAMES if fields.value("quantization_config") else GPT_OSS_NAMES
