"""Functions that read parts of a `ModelSpec` from the metadata of a GGUF file: attention, windows,
rope, experts.

Several architectures share each function. No function tests for an architecture: differences are
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from twostroke.errors import ModelError
from twostroke.kernels.activations import Activation
from twostroke.model.describe.spec import (
    CONTEXT,
    EXPERTS,
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
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    QKNorm,
    RopeSpec,
    RoutingSpec,
    Scoring,
    yarn_attention_factor,
)
from twostroke.model.describe.tensor_names import TensorNames
from twostroke.model.fields import REQUIRED, Fields, shown
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.gguf.gguf_file import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
RMS_NORM_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
ATTENTION_SCALE = "attention.scale"
TEMPERATURE_SCALE = "attention.temperature_scale"
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
EXPERT_COUNT = "expert_count"
ATTENTION_SOFTCAP, LOGIT_SOFTCAP = "attn_logit_softcapping", "final_logit_softcapping"

# Settings that only some architectures read → the values that have no effect. In other
# architectures any other value is refused.
NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    EXPERT_COUNT: (0,),
    ATTENTION_SOFTCAP: (0,),
    LOGIT_SOFTCAP: (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.kv_lora_rank": (0,),
    TEMPERATURE_SCALE: (0,),
    ATTENTION_SCALE: (0,),  # 0 means the usual 1/√head_dim
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "use_parallel_residual": (False,),
    YARN_LOG_MULTIPLIER: (0,),
    "rope.scaling.yarn_ext_factor": (1,),
}


class GGUFSettings(Fields):
    """The metadata of a GGUF file, without the prefix of the architecture (`llama.`)."""

    def __init__(self, file: GGUFFile, arch: str, names: TensorNames) -> None:
        super().__init__(str(file.path), file.metadata, prefix=f"{arch}.")
        self.file, self.arch, self.tensor_names = file, arch, names

    def integer(self, name: str, low: int, high: int, default: Any = REQUIRED) -> Any:
        """Return an integer. If the file has a list with a value per layer, all must be equal."""
        value = self.value(name)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise ModelError(
                    f"{self.where}: {self.prefix}{name} differs from layer to layer, which is not "
                    "supported."
                )
            value = value[0]
        return self._integer(name, value, low, high, default)

    def refuse_unsupported(self, read: Collection[str]) -> None:
        """Refuse a setting with an effect that is not in `read`, the names that the architecture
        reads."""
        for name, neutral in NEUTRAL_SETTINGS.items():
            value = self.value(name)
            if name not in read and value is not None and value not in neutral:
                raise ModelError(
                    f"{self.where}: {self.prefix}{name} = {shown(value)} is not supported."
                )

    def has_tensor(self, canonical: str) -> bool:
        return self.tensor_names.tensor(canonical) in self.file.tensors

    def in_any_layer(self, *names: str) -> bool:
        """Return whether any layer has one of these tensors. If other layers lack the tensor,
        `check_weights` refuses the file later."""
        endings = tuple(f".{self.tensor_names.layer[name]}" for name in names)
        return any(tensor.endswith(endings) for tensor in self.file.tensors)


def num_layers(settings: GGUFSettings) -> int:
    count: int = settings.integer("block_count", *LAYERS)
    num_tensors = len(settings.file.tensors)
    if count > num_tensors:
        raise ModelError(
            f"{settings.where}: the metadata announces {count} layers ({settings.prefix}"
            f"block_count), but the file has only {num_tensors} tensors. It is damaged; download "
            "it again."
        )
    return count


def attention(
    settings: GGUFSettings, rope_spec: RopeSpec, qk_norm: QKNorm = "none"
) -> AttentionSpec:
    """Return attention without a window, with the scale 1/√head_dim and the biases of the file."""
    num_heads, num_kv_heads, head_dim = heads(settings)
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope_spec,
        scale=head_dim**-0.5,
        qk_norm=qk_norm,
        qkv_bias=settings.in_any_layer("q_bias", "k_bias", "v_bias"),
        output_bias=settings.in_any_layer("o_bias"),
    )


def heads(settings: GGUFSettings) -> tuple[int, int, int]:
    """Return the number of query heads, the number of KV heads and the head size."""
    arch, where = settings.arch, settings.where
    hidden = settings.integer("embedding_length", *WIDTH)
    num_heads = settings.integer("attention.head_count", *HEADS)
    num_kv_heads = settings.integer("attention.head_count_kv", *HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: attention.head_count {num_heads} is not a multiple of "
            f"attention.head_count_kv {num_kv_heads}."
        )
    if "attention.key_length" not in settings and hidden % num_heads:
        raise ModelError(
            f"{where}: {arch}.embedding_length {hidden} is not a multiple of "
            f"{arch}.attention.head_count {num_heads} and no {arch}.attention.key_length is given."
        )
    head_dim = settings.integer("attention.key_length", *HEAD_DIM, default=hidden // num_heads)
    value_dim = settings.integer("attention.value_length", *HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{where}: keys and values of different sizes are not supported "
            f"(attention.key_length {head_dim}, attention.value_length {value_dim})."
        )
    return num_heads, num_kv_heads, head_dim


def latent_attention(settings: GGUFSettings) -> tuple[AttentionSpec, int]:
    """Return latent attention, and the longest context with its rope scaling.

    In files with a split kv_b, `attention.key_length` and `attention.value_length` are sizes of the
    latents. The sizes of the heads are then in `attention.key_length_mla` and
    `attention.value_length_mla`.
    """
    num_heads = settings.integer("attention.head_count", *HEADS)
    hidden = settings.integer("embedding_length", *WIDTH)
    suffix = "_mla" if "attention.key_length_mla" in settings else ""
    head_dim = settings.integer(f"attention.key_length{suffix}", *HEAD_DIM)
    value_dim = settings.integer(
        f"attention.value_length{suffix}", *HEAD_DIM, default=max(1, hidden // num_heads)
    )
    if settings.integer("rope.dimension_count", *HEAD_DIM) >= head_dim:
        settings.refuse("rope.dimension_count", f"less than a head's {head_dim} channels")
    if ROPE_FACTORS_LONG in settings.file.tensors:
        rope_spec, max_context = longrope(settings, head_dim), context_length(settings)
    else:
        rope_spec, max_context = rope(settings, head_dim)
    scale = head_dim**-0.5
    log_multiplier = settings.number(YARN_LOG_MULTIPLIER, high=100.0, default=0.0)
    if log_multiplier and rope_spec.kind == "yarn":
        # With latents the multiplier changes the scale of the scores, instead of cos and sin.
        rope_spec = replace(rope_spec, attention_factor=_attention_factor(settings))
        scale *= (1 + log_multiplier * math.log(rope_spec.factor)) ** 2
    latent = LatentSpec(
        kv_lora_rank=settings.integer("attention.kv_lora_rank", *LATENT_RANK),
        q_lora_rank=settings.integer("attention.q_lora_rank", 0, LATENT_RANK[1], default=0),
        value_dim=value_dim,
        split=not settings.in_any_layer("kv_b"),
    )
    spec = AttentionSpec(num_heads, num_heads, head_dim, rope_spec, scale, latent=latent)
    return spec, max_context


def mlp(settings: GGUFSettings, activation: Activation = "silu") -> MLPSpec:
    biased = settings.in_any_layer("gate_bias", "up_bias", "down_bias")
    return MLPSpec(settings.integer("feed_forward_length", *WIDTH), activation, biased)


# `expert_gating_func` → scoring function. 0 means that the file does not say. 3 is a softmax over
# the chosen experts only, which is a softmax over all experts with normalised weights.
SCORING: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax"}


def deepseek_experts(settings: GGUFSettings) -> ExpertsSpec:
    """Return DeepSeek's experts. DeepSeek-V3 scores experts by a sigmoid and adds a correction;
    DeepSeek-V2 scores experts by a softmax."""
    found = experts(settings, normalised=False, grouped=True)
    routing, count = found.routing, found.num_experts
    groups = settings.integer("expert_group_count", 0, EXPERTS[1], default=1) or 1
    used = settings.integer("expert_group_used_count", 0, EXPERTS[1], default=groups) or groups
    if count % groups or (routing.correction_bias and groups > 1 and count // groups < 2):
        settings.refuse("expert_group_count", f"a divisor of the number of experts, {count}")
    if used > groups or routing.experts_per_token > used * (count // groups):
        settings.refuse("expert_group_used_count", "enough groups for all experts of a token")
    sigmoid = routing.correction_bias and not settings.value("expert_gating_func")
    routing = replace(
        routing,
        scoring="sigmoid" if sigmoid else routing.scoring,
        num_groups=groups,
        groups_used=used,
        group_score="top2_sum" if routing.correction_bias else "max",
    )
    shared = settings.integer("expert_shared_count", 0, EXPERTS[1], default=0)
    width = shared * found.expert.intermediate_size
    shared_mlp = replace(found.expert, intermediate_size=width) if shared else None
    return replace(found, routing=routing, shared=shared_mlp)


def experts(
    settings: GGUFSettings,
    width: str = "expert_feed_forward_length",
    *,
    normalised: bool,
    grouped: bool = False,
) -> ExpertsSpec:
    """Return a mixture of experts.

    `width`: the setting with an expert's intermediate size. `normalised`: whether the weights of a
    token's experts add up to one, if the file does not say. `grouped`: the caller supports groups
    of experts and leading dense layers. Otherwise a file with such settings is refused.
    """
    count = settings.integer(EXPERT_COUNT, *EXPERTS)
    if "expert_used_count" not in settings:
        raise ModelError(
            f"{settings.where}: {settings.prefix}{EXPERT_COUNT} is {count}, but there is no "
            f"{settings.prefix}expert_used_count, the number of experts for each token. The file "
            "is incomplete; download it again, or use another conversion of the model."
        )
    chosen = settings.integer("expert_used_count", *EXPERTS)
    if chosen > count:
        raise ModelError(
            f"{settings.where}: {settings.prefix}expert_used_count {chosen} is more than the "
            f"{count} experts there are ({settings.prefix}{EXPERT_COUNT})."
        )
    if not grouped:
        max_values = {"expert_group_count": 1, "expert_group_used_count": 1}
        max_values["leading_dense_block_count"] = 0
        for name, max_value in max_values.items():
            if settings.integer(name, 0, EXPERTS[1], default=0) > max_value:
                settings.refuse(name, "absent with this architecture")
    function = settings.integer("expert_gating_func", 0, max(SCORING), default=0)
    normalised = settings.boolean("expert_weights_norm", normalised) or function == 3
    mlp = MLPSpec(settings.integer(width, *WIDTH))
    routing = RoutingSpec(
        chosen,
        SCORING.get(function, "softmax"),
        normalised,
        multiplier(settings, "expert_weights_scale") or 1.0,
        bias=settings.in_any_layer("router_bias"),
        correction_bias=settings.in_any_layer("router_correction"),
    )
    return ExpertsSpec(count, mlp, routing)


def model(
    settings: GGUFSettings, layers: Sequence[LayerSpec], max_context: int, eps: str = RMS_NORM_EPS
) -> ModelSpec:
    vocabulary = settings.integer("vocab_size", *VOCABULARY, default=_num_embeddings(settings))
    low, high = NORM_EPS
    return ModelSpec(
        family=settings.arch,
        vocab_size=vocabulary,
        hidden_size=settings.integer("embedding_length", *WIDTH),
        layers=tuple(layers),
        norm_eps=settings.number(eps, low=low, high=high),
        max_context=max_context,
        tie_embeddings=not settings.has_tensor("head"),
    )


def _num_embeddings(settings: GGUFSettings) -> Any:
    """Return the size of the vocabulary, from the embedding or the tokenizer."""
    embedding = settings.file.tensors.get(settings.tensor_names.tensor("embed"))
    if embedding is not None:
        return embedding.shape[0]
    tokens = settings.file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else REQUIRED


def multiplier(settings: GGUFSettings, name: str) -> float:
    """Return a factor; 0 means that there is no factor."""
    factor: float = settings.number(name, high=MULTIPLIER_MAX, default=0.0)
    return factor


def softcap(settings: GGUFSettings, name: str, default: float) -> float:
    """Return a softcap; 0 means that there is no softcap."""
    cap: float = settings.number(name, high=SOFTCAP_MAX, default=default)
    return cap


# Windows


def windows(settings: GGUFSettings, period: int = 0, default: int = 0) -> tuple[int | None, ...]:
    """Return the window of each layer; None for a layer without a window.

    The pattern in the file is a list with a value for each layer, or a period: the last layer of
    each period has no window. With the period 0 all layers have the window.
    """
    count = num_layers(settings)
    window = settings.integer("attention.sliding_window", 0, CONTEXT[1], default=default)
    if not window:
        return (None,) * count
    name = "attention.sliding_window_pattern"
    if isinstance(settings.value(name), list):
        has_window = settings.items(name, bool, "true or false for each layer")
        if len(has_window) != count:
            expected = f"a list of {count} values, one for each layer: true if it has the window"
            settings.refuse(name, expected)
    else:
        period = settings.integer(name, 0, LAYERS[1], default=period)
        has_window = [period == 0 or (n + 1) % period != 0 for n in range(count)]
    return tuple(window if has else None for has in has_window)


# Rope


def context_length(settings: GGUFSettings) -> int:
    positions: int = settings.integer("context_length", *CONTEXT)
    return positions


def theta(settings: GGUFSettings, name: str = "rope.freq_base", default: Any = 10000.0) -> float:
    base: float = settings.number(name, above=1.0, high=ROPE_THETA_MAX, default=default)
    return base


def rope_dim(settings: GGUFSettings, head_dim: int) -> int:
    dim: int = settings.integer("rope.dimension_count", *HEAD_DIM, default=head_dim)
    if dim > head_dim or dim % 2:
        raise ModelError(
            f"{settings.where}: {settings.prefix}rope.dimension_count must be even and at most the "
            f"head size {head_dim} (attention.key_length), not {dim}."
        )
    return dim


def rope(settings: GGUFSettings, head_dim: int) -> tuple[RopeSpec, int]:
    """Return the rope, and the longest context with the rope's scaling."""
    base, dim = theta(settings), rope_dim(settings, head_dim)
    positions = context_length(settings)
    low, high = ROPE_FACTOR
    # Older conversions support linear scaling only, and write its factor to `rope.scale_linear`.
    linear_factor = settings.number("rope.scale_linear", low=low, high=high, default=1.0)
    factor = settings.number("rope.scaling.factor", low=low, high=high, default=linear_factor)
    kind = settings.string("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{settings.where}: rope scaling {shown(kind)} ({settings.prefix}rope.scaling.type) is "
            "not supported. Supported: none, linear, yarn."
        )
    unscaled = kind == "none" or factor == 1.0
    if ROPE_FACTORS in settings.file.tensors:
        if not unscaled:
            raise ModelError(
                f"{settings.where}: rope scaling {kind!r} ({settings.prefix}rope.scaling.type) "
                f"together with the factors of {ROPE_FACTORS} is not supported."
            )
        factors = _factors(settings, ROPE_FACTORS, dim)
        return RopeSpec(base, dim, "factors", freq_factors=factors), positions
    if unscaled:
        return RopeSpec(base, dim), positions
    original = original_context(settings)
    max_context = max(positions, int(original * factor))
    if max_context > CONTEXT[1]:
        settings.refuse(
            "rope.scaling.factor" if "rope.scaling.factor" in settings else "rope.scale_linear",
            f"such that the context stays within {CONTEXT[1]} tokens",
        )
    if kind == "linear":
        return RopeSpec(base, dim, "linear", factor, original), max_context
    fast = settings.number("rope.scaling.yarn_beta_fast", above=0.0, high=1e6, default=32.0)
    slow = settings.number("rope.scaling.yarn_beta_slow", above=0.0, high=1e6, default=1.0)
    # This is `mscale_all_dim` of config.json. GGUF files do not contain `mscale`; llama.cpp assumes
    # 1. (With latents `mscale_all_dim` has another meaning: see `latent_attention`.)
    mscale_all_dim = settings.number(YARN_LOG_MULTIPLIER, high=100.0, default=0.0)
    default_factor = yarn_attention_factor(factor) / yarn_attention_factor(factor, mscale_all_dim)
    return RopeSpec(
        base,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_attention_factor(settings, default_factor),
    ), max_context


def longrope(settings: GGUFSettings, head_dim: int) -> RopeSpec:
    """Return longrope. One tensor has the factors for positions within the original context, the
    other the factors for a longer context."""
    dim, positions = rope_dim(settings, head_dim), context_length(settings)
    original = original_context(settings)
    return RopeSpec(
        theta(settings),
        dim,
        "longrope",
        max(1.0, positions / original),
        original,
        attention_factor=_attention_factor(settings),
        freq_factors=_factors(settings, ROPE_FACTORS_LONG, dim),
        short_factors=_factors(settings, ROPE_FACTORS_SHORT, dim),
    )


def original_context(settings: GGUFSettings) -> int:
    name = "rope.scaling.original_context_length"
    original: int = settings.integer(name, *CONTEXT, default=context_length(settings))
    return original


def _attention_factor(settings: GGUFSettings, default_factor: float = 1.0) -> float:
    """Return the factor of cos and sin. `default_factor`: used if the file does not have the
    `attention_factor` of a yarn config."""
    factor: float = 1.0
    for key, default in (("yarn_attn_factor", default_factor), ("attn_factor", 1.0)):
        factor *= settings.number(f"rope.scaling.{key}", above=0.0, high=1e3, default=default)
    return factor


def _factors(settings: GGUFSettings, tensor: str, dim: int) -> tuple[float, ...]:
    """Return the converter's divisors of the frequencies, one for each pair of rotated channels."""
    info = settings.file.tensors.get(tensor)
    if info is None:
        raise ModelError(
            f"{settings.where}: the tensor {tensor!r} is missing. The file is incomplete; download "
            "it again."
        )
    factors = dequantize(settings.file.raw(tensor), info.type, info.shape)
    if factors.shape != (dim // 2,) or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(
            f"{settings.where}: the tensor {tensor} must hold {dim // 2} numbers above "
            f"0, one for each pair of rotated channels; it has shape {factors.shape}."
        )
    return tuple(float(factor) for factor in factors)
