"""A Hugging Face `config.json` → `ModelSpec`. What we cannot run is refused here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.fields import REQUIRED, Fields, read_json, shown
from twostroke.model.spec import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    LAYERS,
    NORM_EPS,
    ROPE_FACTOR,
    ROPE_THETA_MAX,
    VOCABULARY,
    WIDTH,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    yarn_attention_factor,
)

# model_type → (biases on q, k, v; norms on q and k) that the family has without saying so.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
ROPE_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic"}
ROPE_KINDS |= {"llama3": "llama3", "yarn": "yarn"}
DTYPES = ("float64", "float32", "float16", "bfloat16")
# A field of the spec → where config.json says it.
FIELDS = {"family": "model_type", "num_layers": "num_hidden_layers", "qk_norm": "model_type"}
FIELDS |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
FIELDS |= {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
FIELDS |= {"tie_embeddings": "tie_word_embeddings"}


def load_hf_config(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no config.json there. A model folder holds config.json and *.safetensors; "
            "for a GGUF model give the path of the .gguf file itself."
        ) from None
    return spec_from_hf(config, where=str(path)), config


def dtype_of(config: Mapping[str, Any], where: str) -> str:
    """The type that the weights were trained in, by torch's name for it."""
    fields = Fields(where, config)
    name = "dtype" if "dtype" in fields else "torch_dtype"
    known = [*DTYPES, *(f"torch.{dtype}" for dtype in DTYPES)]
    return str(fields.choice(name, known, default="bfloat16")).removeprefix("torch.")


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    fields = Fields(where, config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(
            f"{where}: the architecture {shown(family)} is not supported. Supported: "
            f"{', '.join(sorted(FAMILIES))} (model_type)."
        )
    _refuse_unsupported(fields)
    biased, qk_norm = FAMILIES[family]
    hidden = fields.integer("hidden_size", *WIDTH)
    num_heads = fields.integer("num_attention_heads", *HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", *HEADS, default=num_heads)
    if "head_dim" not in fields and hidden % num_heads:
        raise ModelError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads} "
            "and no head_dim is given."
        )
    head_dim = fields.integer("head_dim", *HEAD_DIM, default=hidden // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}."
        )
    rope, max_context = _rope(fields, head_dim)
    attention_bias = fields.boolean("attention_bias", False)
    # Absent, it is what the families' own code takes; a null is a mistake.
    eps = REQUIRED if "rms_norm_eps" in config else 1e-6
    attention = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope,
        scale=head_dim**-0.5,
        qk_norm="head" if qk_norm else "none",
        qkv_bias=biased or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
    )
    mlp = MLPSpec(
        fields.integer("intermediate_size", *WIDTH), bias=fields.boolean("mlp_bias", False)
    )
    windows = _windows(fields, family)
    return ModelSpec(
        family=family,
        vocab_size=fields.integer("vocab_size", *VOCABULARY),
        hidden_size=hidden,
        layers=tuple(LayerSpec(replace(attention, window=window), mlp) for window in windows),
        norm_eps=fields.number("rms_norm_eps", low=NORM_EPS[0], high=NORM_EPS[1], default=eps),
        max_context=max_context,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def _refuse_unsupported(fields: Fields) -> None:
    where = fields.where
    activation = fields.value("hidden_act")
    if activation is not None and activation not in ("silu", "swish"):
        raise ModelError(
            f"{where}: the activation {shown(activation)} (hidden_act) is not supported, only "
            "'silu'."
        )
    quantization = fields.value("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{where}: weights quantised by {shown(method)} (quantization_config) are not "
            "supported. Use the unquantised model, or a GGUF of it."
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
        if fields.value(key):
            raise ModelError(
                f"{where}: {key} = {shown(fields.value(key))} is not supported (dense models are)."
            )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.value(key):
            raise ModelError(f"{where}: {key} = {shown(fields.value(key))} is not supported.")


def _windows(fields: Fields, family: str) -> tuple[int | None, ...]:
    """As each family's own code reads its config, absent keys included."""
    count = fields.integer("num_hidden_layers", *LAYERS)
    if family == "llama" or fields.given_as_null("sliding_window"):
        return (None,) * count
    window = fields.integer("sliding_window", 1, CONTEXT[1], default=4096)
    if family == "mistral":
        return (window,) * count
    slides = fields.boolean("use_sliding_window", False)
    first = fields.integer("max_window_layers", 0, LAYERS[1], default=28)
    if not slides:
        return (None,) * count
    kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(count)]
    if "layer_types" in fields:
        kinds = fields.items("layer_types", str, "a text for each layer")
    if len(kinds) != count:
        raise ModelError(
            f"{fields.where}: layer_types has {len(kinds)} entries for {count} layers "
            "(num_hidden_layers)."
        )
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            f"{fields.where}: the layer type {shown(unknown[0])} (layer_types) is not supported."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, head_dim: int) -> tuple[RopeSpec, int]:
    """Rope from either spelling (`rope_parameters`, or `rope_theta` + `rope_scaling`)."""
    positions = fields.integer("max_position_embeddings", *CONTEXT)
    given = fields.nested("rope_scaling").over(fields.nested("rope_parameters"))
    theta = _first(given, fields, "rope_theta").number(
        "rope_theta", above=1.0, high=ROPE_THETA_MAX, default=10000.0
    )
    kind = given.choice("rope_type" if "rope_type" in given else "type", ROPE_KINDS, "default")
    partial = _first(given, fields, "partial_rotary_factor").number(
        "partial_rotary_factor", above=0.0, high=1.0, default=1.0
    )
    dim = int(head_dim * partial)
    smallest = 4 if kind == "dynamic" else 2  # its base is raised to dim / (dim - 2)
    if dim % 2 or dim < smallest:
        raise ModelError(
            f"{fields.where}: head_dim {head_dim} × partial_rotary_factor {partial:g} must be an "
            f"even number of at least {smallest} rotated channels, not {dim}."
        )
    if kind == "default":
        return RopeSpec(theta, dim), positions
    key = "original_max_position_embeddings"
    original = _first(given, fields, key).integer(key, *CONTEXT, default=positions)
    low, high = ROPE_FACTOR
    factor = given.number("factor", low=low, high=high, default=max(1.0, positions / original))
    stretched = int((positions if kind in ("linear", "dynamic") else original) * factor)
    if stretched > CONTEXT[1]:
        given.refuse("factor", f"such that the context stays within {CONTEXT[1]} tokens")
    if kind == "linear":
        return RopeSpec(theta, dim, "linear", factor, original_context=positions), stretched
    if kind == "dynamic":
        return RopeSpec(theta, dim, "dynamic", factor, original_context=positions), stretched
    if kind == "llama3":
        slow = given.number("low_freq_factor", above=0.0, high=1e6, default=1.0)
        fast = given.number("high_freq_factor", above=slow, high=1e6, default=4.0)
        return RopeSpec(theta, dim, "llama3", factor, original, slow, fast), positions
    return _yarn(given, theta, dim, factor, original), max(positions, stretched)


def _first(given: Fields, fields: Fields, name: str) -> Fields:
    return given if name in given else fields


def _yarn(given: Fields, theta: float, dim: int, factor: float, original: int) -> RopeSpec:
    mscale = given.number("mscale", high=100.0, default=0.0)
    all_dim = given.number("mscale_all_dim", high=100.0, default=0.0)
    sharpened = yarn_attention_factor(factor)
    if mscale and all_dim:
        sharpened = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=given.number("beta_fast", above=0.0, high=1e6, default=32.0),
        beta_slow=given.number("beta_slow", above=0.0, high=1e6, default=1.0),
        truncate=given.boolean("truncate", True),
        attention_factor=given.number("attention_factor", above=0.0, high=1e3, default=sharpened),
    )
