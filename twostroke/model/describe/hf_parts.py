"""Parts of a Hugging Face `config.json` that families share: heads, windows, rope and others.

No function here tests for a family: differences are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from twostroke.errors import ModelError
from twostroke.kernels.activations import Activation
from twostroke.model.describe.spec import (
    CONTEXT,
    HEAD_DIM,
    HEADS,
    LATENT_RANK,
    LAYERS,
    MULTIPLIER_MAX,
    NORM_EPS,
    ROPE_FACTOR,
    ROPE_THETA_MAX,
    SOFTCAP_MAX,
    VOCABULARY,
    WIDTH,
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    yarn_attention_factor,
)
from twostroke.model.fields import REQUIRED, Fields, shown

ROPE_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic"}
ROPE_KINDS |= {"llama3": "llama3", "yarn": "yarn", "longrope": "longrope"}
SLIDING, FULL = "sliding_attention", "full_attention"
SILU: Mapping[str, Activation] = {"silu": "silu", "swish": "silu"}


def num_layers(fields: Fields) -> int:
    count: int = fields.integer("num_hidden_layers", *LAYERS)
    return count


def attention(fields: Fields, rope: RopeSpec) -> AttentionSpec:
    """Return attention without a window, with `attention_bias` on all projections."""
    num_heads, num_kv_heads, head_dim = heads(fields)
    biased = fields.boolean("attention_bias", False)
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope,
        scale=head_dim**-0.5,
        qkv_bias=biased,
        output_bias=biased,
    )


def heads(fields: Fields) -> tuple[int, int, int]:
    """Return the number of query heads, of KV heads, and the head size."""
    hidden = fields.integer("hidden_size", *WIDTH)
    num_heads = fields.integer("num_attention_heads", *HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", *HEADS, default=num_heads)
    if "head_dim" not in fields and hidden % num_heads:
        raise ModelError(
            f"{fields.where}: {fields.name_in_file('hidden_size')} {hidden} is not a multiple of "
            f"{fields.name_in_file('num_attention_heads')} {num_heads} and no head_dim is given."
        )
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{fields.where}: {fields.name_in_file('num_attention_heads')} {num_heads} is not a "
            f"multiple of {fields.name_in_file('num_key_value_heads')} {num_kv_heads}."
        )
    return (
        num_heads,
        num_kv_heads,
        fields.integer("head_dim", *HEAD_DIM, default=hidden // num_heads),
    )


def latent_attention(fields: Fields) -> tuple[AttentionSpec, int]:
    """Return multi-head latent attention, and the longest context with its rope scaling."""
    refuse_if_given(fields, "attention_bias")
    num_heads = fields.integer("num_attention_heads", *HEADS)
    nope = fields.integer("qk_nope_head_dim", *HEAD_DIM)
    rotated = fields.integer("qk_rope_head_dim", *HEAD_DIM)
    if rotated % 2:
        fields.refuse("qk_rope_head_dim", "even")
    rope_spec, max_context = rope(fields, rotated)
    head_dim = nope + rope_spec.dim
    scale = head_dim**-0.5
    rope_fields = fields.nested("rope_scaling").overridden_by(fields.nested("rope_parameters"))
    all_dim = rope_fields.number("mscale_all_dim", high=100.0, default=0.0)
    if all_dim and rope_spec.kind != "none":
        scale *= yarn_attention_factor(rope_spec.factor, all_dim) ** 2
    latent = LatentSpec(
        kv_lora_rank=fields.integer("kv_lora_rank", *LATENT_RANK),
        q_lora_rank=fields.integer("q_lora_rank", *LATENT_RANK, default=0),
        value_dim=fields.integer("v_head_dim", *HEAD_DIM),
    )
    heads = num_heads, num_heads, head_dim
    return AttentionSpec(*heads, rope_spec, scale, latent=latent), max_context


def mlp(
    fields: Fields, activation: Activation = "silu", bias: bool = False, inner: Any = REQUIRED
) -> MLPSpec:
    """Return a gated MLP. `inner`: its default width."""
    return MLPSpec(fields.integer("intermediate_size", *WIDTH, default=inner), activation, bias)


def activation(
    fields: Fields, name: str = "hidden_act", known: Mapping[str, Activation] = SILU
) -> Activation:
    """Return the activation, by default the first of `known`."""
    first = next(iter(known))
    value = fields.value(name) if name in fields else first
    if not isinstance(value, str) or value not in known:
        raise ModelError(
            f"{fields.where}: the activation {shown(value)} ({fields.name_in_file(name)}) is not "
            f"supported with this model_type, only {', '.join(map(repr, known))}."
        )
    return known[value]


def model(
    fields: Fields,
    family: str,
    layers: Sequence[LayerSpec],
    max_context: int,
    tied: bool = False,
    eps: float = 1e-6,
    eps_name: str = "rms_norm_eps",
) -> ModelSpec:
    """Return the model. `tied` and `eps` are defaults."""
    default_eps = REQUIRED if fields.is_null(eps_name) else eps
    return ModelSpec(
        family=family,
        vocab_size=fields.integer("vocab_size", *VOCABULARY),
        hidden_size=fields.integer("hidden_size", *WIDTH),
        layers=tuple(layers),
        norm_eps=fields.number(eps_name, low=NORM_EPS[0], high=NORM_EPS[1], default=default_eps),
        max_context=max_context,
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
    )


def text_part(fields: Fields, otherwise: str) -> Fields:
    """Return the fields of the text model in a model with images. `otherwise`: for the message."""
    if "text_config" not in fields:
        raise ModelError(
            f"{fields.where}: has no text_config, which a model of model_type "
            f"{shown(fields.value('model_type'))} has ({otherwise})."
        )
    return fields.nested("text_config")


def multiplier(fields: Fields, name: str, default: float = 1.0) -> float:
    """Return a factor above 0."""
    factor: float = fields.number(name, above=0.0, high=MULTIPLIER_MAX, default=default)
    return factor


def softcap(fields: Fields, name: str, default: float) -> float:
    """Return a softcap; 0 for null, which means none."""
    if fields.is_null(name):
        return 0.0
    cap: float = fields.number(name, high=SOFTCAP_MAX, default=default)
    return cap


def refuse_if_given(fields: Fields, *names: str) -> None:
    """Refuse fields that change the results and that the family's mapping does not support."""
    for name in names:
        if fields.value(name):
            raise ModelError(
                f"{fields.where}: {fields.name_in_file(name)} = {shown(fields.value(name))} is not "
                "supported with this model_type."
            )


# Windows


def window(fields: Fields, default: int | None) -> int | None:
    """Return `sliding_window`. In a config, null means no window."""
    if fields.is_null("sliding_window"):
        return None
    size: int | None = fields.integer("sliding_window", 1, CONTEXT[1], default=default)
    return size


def layer_types(
    fields: Fields, otherwise: Sequence[str], known: Collection[str] = (FULL, SLIDING)
) -> Sequence[str]:
    """Return the type of each layer: `layer_types`, or `otherwise` if the field is missing."""
    if "layer_types" not in fields:
        return otherwise
    types = fields.items("layer_types", str, "a text for each layer")
    if len(types) != len(otherwise):
        raise ModelError(
            f"{fields.where}: layer_types has {len(types)} entries for {len(otherwise)} layers "
            f"({fields.name_in_file('num_hidden_layers')})."
        )
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ModelError(
            f"{fields.where}: the layer type {shown(unknown[0])} (layer_types) is not supported "
            "with this model_type."
        )
    return types


def windows(types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer, by its type."""
    return tuple(window if layer_type == SLIDING else None for layer_type in types)


def one_full_in(period: int, count: int) -> list[str]:
    """Return layer types: the last of every `period` layers has no window."""
    return [FULL if (n + 1) % period == 0 else SLIDING for n in range(count)]


# Rope


def context_length(fields: Fields) -> int:
    positions: int = fields.integer("max_position_embeddings", *CONTEXT)
    return positions


def rope(fields: Fields, head_dim: int, default_theta: float = 10000.0) -> tuple[RopeSpec, int]:
    """Return the rope and the longest context with its scaling.

    A config has `rope_parameters`, or `rope_theta` and `rope_scaling`.
    """
    rope_fields = fields.nested("rope_scaling").overridden_by(fields.nested("rope_parameters"))
    return rope_of(rope_fields, fields, head_dim, context_length(fields), default_theta)


def rope_of(
    given: Fields, fields: Fields, head_dim: int, positions: int, default_theta: float = 10000.0
) -> tuple[RopeSpec, int]:
    """Return the rope and the longest context. `given`: the object that describes the rope.

    `fields` has the entries that `given` lacks.
    """
    kind = given.choice(_type_key(given), ROPE_KINDS, "default")
    smallest = 4 if kind == "dynamic" else 2  # its base is raised to dim / (dim - 2)
    base, dim = _theta_and_dim(given, fields, head_dim, default_theta, smallest)
    if kind == "default":
        return RopeSpec(base, dim), positions
    if kind == "longrope":
        return _longrope(given, fields, base, dim, positions), positions
    original = original_context(given, fields, positions)
    low, high = ROPE_FACTOR
    factor = given.number("factor", low=low, high=high, default=max(1.0, positions / original))
    stretched = int((positions if kind in ("linear", "dynamic") else original) * factor)
    if stretched > CONTEXT[1]:
        given.refuse("factor", f"such that the context stays within {CONTEXT[1]} tokens")
    if kind == "linear":
        return RopeSpec(base, dim, "linear", factor, original_context=positions), stretched
    if kind == "dynamic":
        return RopeSpec(base, dim, "dynamic", factor, original_context=positions), stretched
    if kind == "llama3":
        slow = given.number("low_freq_factor", above=0.0, high=1e6, default=1.0)
        fast = given.number("high_freq_factor", above=slow, high=1e6, default=4.0)
        return RopeSpec(base, dim, "llama3", factor, original, slow, fast), positions
    return _yarn(given, base, dim, factor, original), max(positions, stretched)


def two_ropes(
    fields: Fields, theta_sliding: float, theta_full: float
) -> tuple[dict[str, RopeSpec], int]:
    """Return the rope of each layer type, and the longest context.

    The ropes are in `rope_parameters`, or at the top level of older configs. The context has the
    scaling of the layers without a window.
    """
    head_dim, positions = heads(fields)[2], context_length(fields)
    given, nothing = fields.nested("rope_parameters"), Fields(fields.where, {})
    sliding = given.nested(SLIDING)
    full = fields.nested("rope_scaling").overridden_by(given.nested(FULL))
    rope, max_context = rope_of(full, nothing, head_dim, positions, theta_full)
    other = rope_of(sliding, nothing, head_dim, positions, theta_sliding)[0]
    return {SLIDING: other, FULL: rope}, max_context


def theta(fields: Fields, name: str, default: float) -> float:
    base: float = fields.number(name, above=1.0, high=ROPE_THETA_MAX, default=default)
    return base


def original_context(given: Fields, fields: Fields, positions: int) -> int:
    key = "original_max_position_embeddings"
    original: int = _first(given, fields, key).integer(key, *CONTEXT, default=positions)
    return original


def rope_kind(given: Fields) -> str | None:
    kind: str | None = given.string(_type_key(given), None, longest=64)
    return kind


def _type_key(given: Fields) -> str:
    return "rope_type" if "rope_type" in given else "type"


def _theta_and_dim(
    given: Fields, fields: Fields, head_dim: int, default_theta: float, smallest_dim: int
) -> tuple[float, int]:
    base = theta(_first(given, fields, "rope_theta"), "rope_theta", default_theta)
    name = "partial_rotary_factor"
    source = _first(given, fields, name)
    partial = source.number(name, above=0.0, high=1.0, default=1.0)
    dim = int(head_dim * partial)
    if dim % 2 or dim < smallest_dim:
        raise ModelError(
            f"{fields.where}: head_dim {head_dim} × {source.name_in_file(name)} {partial:g} must "
            f"be an even number of at least {smallest_dim} rotated channels, not {dim} (missing "
            "fields have the default of the model_type)."
        )
    return base, dim


def _first(given: Fields, fields: Fields, name: str) -> Fields:
    return given if name in given else fields


def _divisors(given: Fields, fields: Fields, name: str, dim: int) -> tuple[float, ...]:
    values = given.items(name, (int, float), "numbers above 0")
    if len(values) != dim // 2 or not all(0 < value < math.inf for value in values):
        partial = fields.name_in_file("partial_rotary_factor")
        given.refuse(
            name,
            f"a list of {dim // 2} numbers above 0, one for each rotated pair (by model_type, "
            f"head_dim and {partial})",
        )
    return tuple(map(float, values))


def _longrope(given: Fields, fields: Fields, base: float, dim: int, positions: int) -> RopeSpec:
    """Return longrope: a list of frequency divisors within the original context, and one beyond."""
    original = original_context(fields, given, positions)  # here the top level takes precedence
    factor = given.number("factor", high=ROPE_FACTOR[1], default=positions / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSpec(
        base,
        dim,
        "longrope",
        max(1.0, factor),
        original,
        attention_factor=given.number("attention_factor", above=0.0, high=1e3, default=default),
        freq_factors=_divisors(given, fields, "long_factor", dim),
        short_factors=_divisors(given, fields, "short_factor", dim),
    )


def _yarn(given: Fields, theta: float, dim: int, factor: float, original: int) -> RopeSpec:
    mscale = given.number("mscale", high=100.0, default=0.0)
    all_dim = given.number("mscale_all_dim", high=100.0, default=0.0)
    default = yarn_attention_factor(factor)
    if mscale and all_dim:
        default = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=given.number("beta_fast", above=0.0, high=1e6, default=32.0),
        beta_slow=given.number("beta_slow", above=0.0, high=1e6, default=1.0),
        truncate=given.boolean("truncate", True),
        attention_factor=given.number("attention_factor", above=0.0, high=1e3, default=default),
    )
