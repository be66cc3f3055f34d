"""The families: for each a function from a Hugging Face config to a `ModelSpec`.

An entry of FAMILIES is this function and the family's tensor names (docs/ADDING_A_FAMILY.md).
`hf_parts.py` has the shared parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from twostroke.errors import ModelError
from twostroke.model.describe import hf_expert_families as mixtures
from twostroke.model.describe import hf_experts
from twostroke.model.describe import hf_gemma_families as gemma
from twostroke.model.describe import hf_gpt_families as gpt
from twostroke.model.describe import hf_parts as parts
from twostroke.model.describe.hf_names import (
    GEMMA2_NAMES,
    GEMMA_NAMES,
    GLM4_NAMES,
    GLM_NAMES,
    GPT2_NAMES,
    GPT_NEOX_NAMES,
    GPTJ_NAMES,
    GRANITE_HYBRID_NAMES,
    GRANITE_MOE_NAMES,
    INTERLEAVED_NAMES,
    INTERNLM2_NAMES,
    LLAMA_NAMES,
    MIXTRAL_NAMES,
    OLMO2_NAMES,
    PHI3_NAMES,
    PHI_NAMES,
    QWEN2_MOE_NAMES,
    STARCODER2_NAMES,
)
from twostroke.model.describe.hf_plain import plain
from twostroke.model.describe.spec import (
    CONTEXT,
    EXPERTS,
    HEADS,
    LAYERS,
    MULTIPLIER_MAX,
    WIDTH,
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    with_layers,
    with_query_scales,
    without_rope,
)
from twostroke.model.describe.tensor_names import TensorNames
from twostroke.model.fields import Fields, shown


def _llama(fields: Fields) -> ModelSpec:
    return plain(fields, "llama")


def _mistral(fields: Fields) -> ModelSpec:
    window = parts.window(fields, default=4096)
    return plain(fields, "mistral", windows=(window,) * parts.num_layers(fields))


def _qwen2(fields: Fields) -> ModelSpec:
    return plain(fields, "qwen2", windows=_qwen_windows(fields), qkv_bias=True, output_bias=False)


def _qwen3(fields: Fields) -> ModelSpec:
    return plain(fields, "qwen3", windows=_qwen_windows(fields), qk_norm="head")


def _ministral(fields: Fields) -> ModelSpec:
    """Ministral 8B: Mistral with windows in some layers."""
    window = parts.window(fields, default=4096)
    usual = parts.FULL if window is None else parts.SLIDING
    kinds = parts.layer_types(fields, [usual] * parts.num_layers(fields))
    windows = parts.windows(kinds, window)
    return plain(fields, "ministral", windows, qkv_bias=False, output_bias=False)


# The default of the family's own code for a config without rope fields.
MINISTRAL3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
MINISTRAL3_ROPE |= {"original_max_position_embeddings": 16384, "mscale_all_dim": 1.0}
MINISTRAL3_ROPE |= {"llama_4_scaling_beta": 0.1}


def _ministral3(fields: Fields) -> ModelSpec:
    """Ministral 3: beyond the original context, queries are scaled by their position."""
    if "rope_parameters" not in fields and "rope_scaling" not in fields:
        fields = fields.overridden_by(Fields(fields.where, {"rope_parameters": MINISTRAL3_ROPE}))
    window = parts.window(fields, default=None)
    spec = plain(
        fields.with_defaults({"num_key_value_heads": 8, "head_dim": 128}),
        "ministral3",
        windows=(window,) * parts.num_layers(fields),
        eps=1e-5,
        mlp=parts.mlp(fields, parts.activation(fields)),
        qkv_bias=False,
        output_bias=False,
    )
    given = fields.nested("rope_scaling").overridden_by(fields.nested("rope_parameters"))
    if "llama_4_scaling_beta" not in given:
        raise ModelError(
            f"{fields.where}: there is no llama_4_scaling_beta in rope_parameters (or, in older "
            "configs, rope_scaling), which a model of this model_type has."
        )
    beta = given.number("llama_4_scaling_beta", high=MULTIPLIER_MAX)
    span = parts.original_context(given, fields, parts.context_length(fields))
    return with_query_scales(spec, beta, span)


MISTRAL3_TEXTS = {"mistral": _mistral, "ministral3": _ministral3}


def _mistral3(fields: Fields) -> ModelSpec:
    """Mistral Small 3.1 and 3.2, and all published Ministral 3."""
    text = parts.text_part(fields, "one without images is 'mistral' or 'ministral3'")
    kind = text.value("model_type") if "model_type" in text else "mistral"
    if not isinstance(kind, str) or kind not in MISTRAL3_TEXTS:
        raise ModelError(
            f"{text.where}: the architecture {shown(kind)} (model_type) is not supported, only "
            f"{' and '.join(map(repr, MISTRAL3_TEXTS))}."
        )
    return MISTRAL3_TEXTS[kind](text)


def _smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3: every fourth layer has no rope."""
    count = parts.num_layers(fields)
    period = fields.integer("no_rope_layer_interval", 1, LAYERS[1], default=4)
    has_rope = [(n + 1) % period != 0 for n in range(count)]
    if "no_rope_layers" in fields:  # 1: the layer has rope
        has_rope = [bool(n) for n in fields.items("no_rope_layers", int, "0 or 1 for each layer")]
        if len(has_rope) < count:
            expected = f"a list of 0 or 1 for each of the {count} layers (num_hidden_layers)"
            fields.refuse("no_rope_layers", expected)
    window = parts.window(fields, None) if fields.boolean("use_sliding_window", False) else None
    usual = [parts.FULL if rope or window is None else parts.SLIDING for rope in has_rope[:count]]
    kinds = parts.layer_types(fields, usual)
    windows = parts.windows(kinds, window)
    fields = fields.with_defaults({"num_key_value_heads": 4})
    spec = plain(fields, "smollm3", windows, theta=2e6, tied=True)
    return without_rope(spec, [n for n in range(count) if not has_rope[n]])


def _granite(
    fields: Fields, family: str = "granite", mlp: MLPSpec | ExpertsSpec | None = None
) -> ModelSpec:
    """Granite: embedding, scores, residuals and logits have factors."""
    scale = parts.multiplier(fields, "attention_multiplier")
    return replace(
        plain(fields, family, mlp=mlp, scale=scale),
        embed_scale=parts.multiplier(fields, "embedding_multiplier"),
        residual_scale=parts.multiplier(fields, "residual_multiplier"),
        logit_scale=1 / parts.multiplier(fields, "logits_scaling"),
    )


def _granite_moe(fields: Fields) -> ModelSpec:
    experts = hf_experts.experts(fields, 8, 2, "intermediate_size", 11008)
    return _granite(fields, "granitemoe", experts)


# The dense MLP is called shared, with and without experts.
GRANITE_HYBRID_ALIASES = {"intermediate_size": "shared_intermediate_size"}
GRANITE_HYBRID_ALIASES |= {"moe_intermediate_size": "intermediate_size"}
MAMBA = ("mamba", "linear_attention")  # synonyms: as published, and as transformers saves it


def _granite_moe_hybrid(fields: Fields) -> ModelSpec:
    """Granite 4.0. Only models with attention in all layers are supported."""
    count = parts.num_layers(fields)
    kinds = parts.layer_types(fields, ["mamba"] * count, (*MAMBA, "attention", parts.FULL))
    hybrid = sum(kind in MAMBA for kind in kinds)
    if hybrid:
        raise ModelError(
            f"{fields.where}: mamba layers are not supported, and {hybrid} of the {count} layers "
            "have mamba (layer_types; without it all layers have mamba with this model_type). "
            "Of Granite 4.0, micro, 1b and 350m are supported, but not the hybrids (h-micro, …)."
        )
    mlp, experts = parts.mlp(fields, parts.activation(fields), inner=1024), None
    if fields.integer("num_local_experts", 0, EXPERTS[1], default=8):
        experts = hf_experts.experts(fields, 8, 2, "moe_intermediate_size", 11008)
        experts = replace(experts, shared=mlp)
    spec = _granite(fields, "granitemoehybrid", experts or mlp)
    has_rope = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    return spec if has_rope else without_rope(spec, range(count))


def _internlm2(fields: Fields) -> ModelSpec:
    bias, mlp = fields.boolean("bias", True), parts.mlp(fields, parts.activation(fields))
    return plain(fields, "internlm2", mlp=mlp, qkv_bias=bias, output_bias=bias)


def _internlm3(fields: Fields) -> ModelSpec:
    bias = fields.boolean("bias", False)
    return plain(
        fields,
        "internlm3",
        mlp=parts.mlp(fields, parts.activation(fields), bias),
        qkv_bias=fields.boolean("qkv_bias", False),
        output_bias=bias,
    )


def _seed_oss(fields: Fields) -> ModelSpec:
    return plain(
        fields.with_defaults({"num_key_value_heads": 8, "head_dim": 128}),
        "seed_oss",
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
    )


def _ernie4_5(fields: Fields) -> ModelSpec:
    """ERNIE 4.5 without experts."""
    bias = fields.boolean("use_bias", False)
    return plain(
        fields.with_defaults({"num_key_value_heads": 2, "head_dim": 128}),
        "ernie4_5",
        theta=500000.0,
        tied=True,
        eps=1e-5,
        mlp=parts.mlp(fields, parts.activation(fields), bias),
        qkv_bias=bias,
        output_bias=bias,
    )


GLM_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}


def _glm(fields: Fields) -> ModelSpec:
    """GLM-4-9B: rope rotates half of the channels."""
    return plain(
        fields.with_defaults(GLM_DEFAULTS),
        "glm",
        eps=1.5625e-7,
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=False,
    )


def _glm4(fields: Fields) -> ModelSpec:
    """GLM-4-0414: like GLM-4-9B, with norms after attention and MLP, too."""
    return with_layers(replace(_glm(fields), family="glm4"), post_norm=True)


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, with the defaults of Qwen's own code."""
    count = parts.num_layers(fields)
    window = parts.window(fields, default=4096)
    slides = fields.boolean("use_sliding_window", False)
    first = fields.integer("max_window_layers", 0, LAYERS[1], default=28)
    if not slides or window is None:
        return (None,) * count
    usual = [parts.SLIDING if n >= first else parts.FULL for n in range(count)]
    kinds = parts.layer_types(fields, usual)
    return parts.windows(kinds, window)


def _phi3(fields: Fields) -> ModelSpec:
    """Phi-3, Phi-3.5 and Phi-4."""
    parts.refuse_if_given(fields, "attn_logit_softcapping", "final_logit_softcapping")
    fields = fields.with_defaults({"original_max_position_embeddings": 4096})
    given = fields.nested("rope_scaling").overridden_by(fields.nested("rope_parameters"))
    if parts.rope_kind(given) in ("su", "yarn"):  # earlier names of longrope
        given = given.overridden_by(Fields(given.where, {"rope_type": "longrope"}))
    head_dim = parts.heads(fields)[2]
    rope, max_context = parts.rope_of(given, fields, head_dim, parts.context_length(fields))
    window = parts.window(fields, default=None)
    if window is not None and window >= max_context:
        window = None  # it has no effect
    attention = replace(
        parts.attention(fields, rope), window=window, qkv_bias=False, output_bias=False
    )
    layer = LayerSpec(attention, parts.mlp(fields, parts.activation(fields)))
    layers = [layer] * parts.num_layers(fields)
    return parts.model(fields, "phi3", layers, max_context, eps=1e-5)


def _olmo2(fields: Fields) -> ModelSpec:
    rope, max_context = parts.rope(fields, parts.heads(fields)[2])
    attention = parts.attention(fields, rope)
    return _olmo(fields, "olmo2", [attention] * parts.num_layers(fields), max_context)


def _olmo3(fields: Fields) -> ModelSpec:
    """OLMo 3: windows in three of four layers; rope scaling in the others."""
    theta = parts.theta(fields, "rope_theta", 500000.0)
    ropes, max_context = parts.two_ropes(fields, theta, theta)
    full = parts.attention(fields, ropes[parts.FULL])
    window = parts.window(fields, default=4096)
    sliding = replace(full, rope=ropes[parts.SLIDING], window=window)
    by_kind = {parts.FULL: full, parts.SLIDING: sliding}
    kinds = parts.layer_types(fields, parts.one_full_in(4, parts.num_layers(fields)))
    return _olmo(fields, "olmo3", [by_kind[kind] for kind in kinds], max_context)


def _olmo(
    fields: Fields, family: str, attention: Sequence[AttentionSpec], max_context: int
) -> ModelSpec:
    """Return a model with norms after attention and MLP, and over all heads of q and of k."""
    parts.refuse_if_given(fields, "attn_logit_softcapping", "final_logit_softcapping")
    mlp = parts.mlp(fields, parts.activation(fields))
    layers = [
        LayerSpec(replace(part, qk_norm="full"), mlp, pre_norm=False, post_norm=True)
        for part in attention
    ]
    spec = parts.model(fields, family, layers, max_context, eps=1e-5)
    return replace(spec, norm_fp32=True)


def _exaone4(fields: Fields) -> ModelSpec:
    """EXAONE 4: norms after attention and MLP. If layers have windows, only these have rope."""
    count = parts.num_layers(fields)
    window = parts.window(fields, default=4096)
    pattern = fields.value("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # "LLLG"; the last layer has no window
        letters = [pattern[n % len(pattern)] for n in range(count - 1)] + ["G"]
        usual = [parts.SLIDING if letter == "L" else parts.FULL for letter in letters]
    else:
        period = fields.integer("sliding_window_pattern", 0, LAYERS[1], default=4)
        usual = parts.one_full_in(period or 1, count)
    kinds = parts.layer_types(fields, [parts.FULL] * count if window is None else usual)
    windows = parts.windows(kinds, window)
    spec = plain(fields, "exaone4", windows, eps=1e-5, qk_norm="head")
    full = [n for n in range(count) if window is not None and windows[n] is None]
    return without_rope(with_layers(spec, pre_norm=False, post_norm=True), full)


def _cohere(fields: Fields) -> ModelSpec:
    """Command R."""
    if "model_max_length" in fields:  # the context that the rope was made for
        longest = fields.integer("model_max_length", *CONTEXT)
        fields = fields.overridden_by(Fields(fields.where, {"max_position_embeddings": longest}))
    return _command_r(fields, "cohere", theta=500000.0)


def _cohere2(fields: Fields) -> ModelSpec:
    """Command R7B and A: windows in three of four layers, which alone have rope."""
    count, window = parts.num_layers(fields), parts.window(fields, default=4096)
    period = fields.integer("sliding_window_pattern", 1, LAYERS[1], default=4)
    kinds = parts.layer_types(fields, parts.one_full_in(period, count))
    windows = parts.windows(kinds, window)
    spec = _command_r(fields, "cohere2", windows)
    return without_rope(spec, [n for n in range(count) if windows[n] is None])


def _command_r(
    fields: Fields,
    family: str,
    windows: Sequence[int | None] | None = None,
    theta: float = 10000.0,
) -> ModelSpec:
    """Return a model with attention and MLP in parallel behind one LayerNorm without bias."""
    parts.refuse_if_given(fields, "use_qk_norm")
    spec = plain(fields, family, windows, theta, tied=True, eps=1e-5, eps_name="layer_norm_eps")
    return replace(
        with_layers(spec, parallel=True),
        norm="layer",
        norm_fp32=True,
        logit_scale=parts.multiplier(fields, "logit_scale", 0.0625),
    )


STABLELM_DEFAULTS = {"num_key_value_heads": 32, "partial_rotary_factor": 0.25}


def _stablelm(fields: Fields) -> ModelSpec:
    """StableLM: LayerNorms with bias; rope rotates a quarter of the channels."""
    parts.refuse_if_given(fields, "qk_layernorm")
    spec = plain(
        fields.with_defaults(STABLELM_DEFAULTS),
        "stablelm",
        eps=1e-5,
        eps_name="layer_norm_eps",
        mlp=parts.mlp(fields, parts.activation(fields)),
        qkv_bias=fields.boolean("use_qkv_bias", False),
        output_bias=False,
    )
    parallel = fields.boolean("use_parallel_residual", False)
    return replace(with_layers(spec, parallel=parallel), norm="layer", norm_bias=True)


def _starcoder2(fields: Fields) -> ModelSpec:
    """StarCoder 2: LayerNorms with bias, and an MLP without a gate."""
    bias, window = fields.boolean("use_bias", True), parts.window(fields, default=None)
    gelu = parts.activation(fields, known={"gelu_pytorch_tanh": "gelu_tanh"})
    spec = plain(
        fields.with_defaults({"num_key_value_heads": 2}),
        "starcoder2",
        windows=(window,) * parts.num_layers(fields),
        tied=True,
        eps=1e-5,
        eps_name="norm_epsilon",
        mlp=replace(parts.mlp(fields, gelu, bias), gated=False),
        qkv_bias=bias,
        output_bias=bias,
    )
    return replace(spec, norm="layer", norm_bias=True)


def _minicpm3(fields: Fields) -> ModelSpec:
    """MiniCPM3: latent attention; embedding, residuals and logits have factors."""
    sizes = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64}
    sizes |= {"qk_rope_head_dim": 32}
    hidden, count = fields.integer("hidden_size", *WIDTH), parts.num_layers(fields)
    usual = hidden // fields.integer("num_attention_heads", *HEADS)
    if "v_head_dim" not in fields:
        fields = fields.overridden_by(Fields(fields.where, {"v_head_dim": usual}))
    attention, max_context = parts.latent_attention(fields.with_defaults(sizes))
    mlp = parts.mlp(fields, parts.activation(fields), fields.boolean("mlp_bias", False))
    spec = parts.model(fields, "minicpm3", [LayerSpec(attention, mlp)] * count, max_context, True)
    return replace(
        spec,
        embed_scale=parts.multiplier(fields, "scale_emb", 12.0),
        residual_scale=parts.multiplier(fields, "scale_depth", 1.4) / count**0.5,
        logit_scale=parts.multiplier(fields, "dim_model_base", 256) / hidden,
    )


class Family(NamedTuple):
    spec: Callable[[Fields], ModelSpec]
    names: TensorNames | Callable[[Fields], TensorNames] = LLAMA_NAMES
    aliases: Mapping[str, str] = {}  # a field's usual name → the family's name
    reads: tuple[str, ...] = ()  # fields that are refused for families that do not read them
    quant_methods: tuple[str, ...] = ()  # quantisations that only this family's files have
    images: bool = False  # its models read images, which are not supported


LATENT = ("kv_lora_rank",)
FAMILIES = {  # by model_type
    "cohere": Family(_cohere, INTERLEAVED_NAMES),
    "cohere2": Family(_cohere2, INTERLEAVED_NAMES),
    "deepseek_v2": Family(
        mixtures.deepseek_v2, INTERLEAVED_NAMES, reads=(*LATENT, "n_routed_experts")
    ),
    "deepseek_v3": Family(
        mixtures.deepseek_v3, INTERLEAVED_NAMES, reads=(*LATENT, "n_routed_experts")
    ),
    "ernie4_5": Family(_ernie4_5, INTERLEAVED_NAMES),
    "exaone4": Family(_exaone4, OLMO2_NAMES),
    "falcon": Family(gpt.falcon, gpt.falcon_names, gpt.FALCON_ALIASES),
    "gemma": Family(gemma.gemma, GEMMA_NAMES),
    "gemma2": Family(gemma.gemma2, GEMMA2_NAMES),
    "gemma3": Family(gemma.gemma3, GEMMA2_NAMES, images=True),
    "gemma3_text": Family(gemma.gemma3_text, GEMMA2_NAMES),
    "glm": Family(_glm, GLM_NAMES),
    "glm4": Family(_glm4, GLM4_NAMES),
    "gpt2": Family(gpt.gpt2, GPT2_NAMES, gpt.GPT2_ALIASES),
    "gpt_neox": Family(gpt.gpt_neox, GPT_NEOX_NAMES, gpt.GPT_NEOX_ALIASES),
    "gpt_oss": Family(gpt.gpt_oss, gpt.gpt_oss_names, quant_methods=("mxfp4",)),
    "gptj": Family(gpt.gptj, GPTJ_NAMES, gpt.GPT2_ALIASES),
    "granite": Family(_granite),
    "granitemoe": Family(_granite_moe, GRANITE_MOE_NAMES),
    "granitemoehybrid": Family(_granite_moe_hybrid, GRANITE_HYBRID_NAMES, GRANITE_HYBRID_ALIASES),
    "internlm2": Family(_internlm2, INTERNLM2_NAMES),
    "internlm3": Family(_internlm3),
    "llama": Family(_llama),
    "minicpm3": Family(_minicpm3, reads=LATENT),
    "ministral": Family(_ministral),
    "ministral3": Family(_ministral3),
    "mistral": Family(_mistral),
    "mistral3": Family(_mistral3, images=True),
    "mixtral": Family(mixtures.mixtral, MIXTRAL_NAMES),
    "olmo2": Family(_olmo2, OLMO2_NAMES),
    "olmo3": Family(_olmo3, OLMO2_NAMES),
    "olmoe": Family(mixtures.olmoe),
    "phi": Family(gpt.phi, PHI_NAMES),
    "phi3": Family(_phi3, PHI3_NAMES),
    "qwen2": Family(_qwen2),
    "qwen2_moe": Family(mixtures.qwen2_moe, QWEN2_MOE_NAMES, reads=("num_experts",)),
    "qwen3": Family(_qwen3),
    "qwen3_moe": Family(mixtures.qwen3_moe, reads=("num_experts",)),
    "seed_oss": Family(_seed_oss),
    "smollm3": Family(_smollm3),
    "stablelm": Family(_stablelm),
    "starcoder2": Family(_starcoder2, STARCODER2_NAMES),
}
