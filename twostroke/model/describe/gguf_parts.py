"""Parts of a GGUF file's metadata that architectures share: heads, windows, rope and the rest.

No architecture is asked for here: what differs between them is an argument.
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
QUERY_BETA = "attention.temperature_scale"
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
EXPERT_COUNT = "expert_count"
ATTENTION_SOFTCAP, LOGIT_SOFTCAP = "attn_logit_softcapping", "final_logit_softcapping"

# Settings that not every architecture has, with the values at which they change nothing.
NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    EXPERT_COUNT: (0,),
    ATTENTION_SOFTCAP: (0,),
    LOGIT_SOFTCAP: (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.kv_lora_rank": (0,),
    QUERY_BETA: (0,),
    ATTENTION_SCALE: (0,),  # 0 stands for the usual 1/√head_dim
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "use_parallel_residual": (False,),
    YARN_LOG_MULTIPLIER: (0,),
    "rope.scaling.yarn_ext_factor": (1,),
}


class Settings(Fields):
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile, arch: str, names: TensorNames) -> None:
        super().__init__(str(file.path), file.metadata, prefix=f"{arch}.")
        self.file, self.arch, self.tensor_names = file, arch, names

    def integer(self, name: str, low: int, high: int, default: Any = REQUIRED) -> Any:
        """Some are written once for each layer, and must then be the same in all of them."""
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
        """`read` are those that the architecture has."""
        for name, neutral in NEUTRAL_SETTINGS.items():
            value = self.value(name)
            if name not in read and value is not None and value not in neutral:
                raise ModelError(
                    f"{self.where}: {self.prefix}{name} = {shown(value)} is not supported."
                )

    def has_tensor(self, canonical: str) -> bool:
        return self.tensor_names.tensor(canonical) in self.file.tensors

    def in_any_layer(self, *names: str) -> bool:
        """One is enough to ask for all: those that are missing show when weights are checked."""
        endings = tuple(f".{self.tensor_names.layer[name]}" for name in names)
        return any(tensor.endswith(endings) for tensor in self.file.tensors)


def num_layers(settings: Settings) -> int:
    count: int = settings.integer("block_count", *LAYERS)
    num_tensors = len(settings.file.tensors)
    if count > num_tensors:
        raise ModelError(
            f"{settings.where}: the metadata announces {count} layers ({settings.prefix}"
            f"block_count), but the file has only {num_tensors} tensors. It is damaged; download "
            "it again."
        )
    return count


def attention(settings: Settings, rope: RopeSpec, qk_norm: QKNorm = "none") -> AttentionSpec:
    """Of every layer alike: no window, the usual scale; tensors say whether there are biases."""
    num_heads, num_kv_heads, head_dim = heads(settings)
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope,
        scale=head_dim**-0.5,
        qk_norm=qk_norm,
        qkv_bias=settings.in_any_layer("q_bias", "k_bias", "v_bias"),
        output_bias=settings.in_any_layer("o_bias"),
    )


def heads(settings: Settings) -> tuple[int, int, int]:
    """Of queries, of keys and values, and their size."""
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
            f"{where}: values of another size than keys are not supported "
            f"(attention.key_length {head_dim}, attention.value_length {value_dim})."
        )
    return num_heads, num_kv_heads, head_dim


def latent_attention(settings: Settings) -> tuple[AttentionSpec, int]:
    """And the longest context with the scaling of its rope. In files that have kv_b in two parts,
    the plain key and value lengths are those of latents, and heads' own end in `_mla`."""
    num_heads = settings.integer("attention.head_count", *HEADS)
    hidden = settings.integer("embedding_length", *WIDTH)
    ending = "_mla" if "attention.key_length_mla" in settings else ""
    head_dim = settings.integer(f"attention.key_length{ending}", *HEAD_DIM)
    value_dim = settings.integer(
        f"attention.value_length{ending}", *HEAD_DIM, default=max(1, hidden // num_heads)
    )
    if settings.integer("rope.dimension_count", *HEAD_DIM) >= head_dim:
        settings.refuse("rope.dimension_count", f"less than a head's {head_dim} channels")
    if ROPE_FACTORS_LONG in settings.file.tensors:
        turned, max_context = longrope(settings, head_dim), context(settings)
    else:
        turned, max_context = rope(settings, head_dim)
    scale = head_dim**-0.5
    sharpened = settings.number(YARN_LOG_MULTIPLIER, high=100.0, default=0.0)
    if sharpened and turned.kind == "yarn":
        # In the place of what multiplies cos and sin.
        turned = replace(turned, attention_factor=_attention_factor(settings))
        scale *= (1 + sharpened * math.log(turned.factor)) ** 2
    latent = LatentSpec(
        kv_lora_rank=settings.integer("attention.kv_lora_rank", *LATENT_RANK),
        q_lora_rank=settings.integer("attention.q_lora_rank", 0, LATENT_RANK[1], default=0),
        value_dim=value_dim,
        split=not settings.in_any_layer("kv_b"),
    )
    return AttentionSpec(num_heads, num_heads, head_dim, turned, scale, latent=latent), max_context


def mlp(settings: Settings, activation: Activation = "silu") -> MLPSpec:
    biased = settings.in_any_layer("gate_bias", "up_bias", "down_bias")
    return MLPSpec(settings.integer("feed_forward_length", *WIDTH), activation, biased)


# How a file numbers what the router's products go through; 0 is not said.
SCORING: dict[int, Scoring] = {1: "softmax", 2: "sigmoid", 3: "softmax"}  # 3: of the chosen alone


def deepseek_experts(settings: Settings) -> ExpertsSpec:
    """Scores are sigmoids with a correction, or (V2) their softmax."""
    found = experts(settings, normalised=False, grouped=True)
    routing, count = found.routing, found.num_experts
    groups = settings.integer("expert_group_count", 0, EXPERTS[1], default=1) or 1
    used = settings.integer("expert_group_used_count", 0, EXPERTS[1], default=groups) or groups
    if count % groups or (routing.correction_bias and groups > 1 and count // groups < 2):
        settings.refuse("expert_group_count", f"a divisor of the number of experts, {count}")
    if used > groups or routing.experts_per_token > used * (count // groups):
        settings.refuse("expert_group_used_count", "groups that have all experts of a token")
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
    own = replace(found.expert, intermediate_size=width) if shared else None
    return replace(found, routing=routing, shared=own)


def experts(
    settings: Settings,
    width: str = "expert_feed_forward_length",
    *,
    normalised: bool,
    grouped: bool = False,
) -> ExpertsSpec:
    """`width`: the field that says how wide an expert is. `normalised`: where the file does not
    say whether the weights of a token's experts add up to one. `grouped`: the caller reads groups
    of experts and dense layers."""
    count = settings.integer(EXPERT_COUNT, *EXPERTS)
    if "expert_used_count" not in settings:
        raise ModelError(
            f"{settings.where}: {settings.prefix}{EXPERT_COUNT} is {count}, but there is no "
            f"{settings.prefix}expert_used_count, which says how many of them a token goes "
            "through. The file is incomplete; fetch it again, or use another conversion of the "
            "model."
        )
    chosen = settings.integer("expert_used_count", *EXPERTS)
    if chosen > count:
        raise ModelError(
            f"{settings.where}: {settings.prefix}expert_used_count {chosen} is more than the "
            f"{count} experts there are ({settings.prefix}{EXPERT_COUNT})."
        )
    for name in ("expert_group_count", "expert_group_used_count", "leading_dense_block_count"):
        if grouped:
            continue
        if settings.integer(name, 0, EXPERTS[1], default=0) > (0 if "dense" in name else 1):
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
    settings: Settings, layers: Sequence[LayerSpec], max_context: int, eps: str = RMS_NORM_EPS
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


def _num_embeddings(settings: Settings) -> Any:
    """The size of the vocabulary where the metadata does not say it."""
    embedding = settings.file.tensors.get(settings.tensor_names.tensor("embed"))
    if embedding is not None:
        return embedding.shape[0]
    tokens = settings.file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else REQUIRED


def multiplier(settings: Settings, name: str) -> float:
    """What something is multiplied by; 0: nothing is."""
    factor: float = settings.number(name, high=MULTIPLIER_MAX, default=0.0)
    return factor


def softcap(settings: Settings, name: str, default: float) -> float:
    """0: none."""
    cap: float = settings.number(name, high=SOFTCAP_MAX, default=default)
    return cap


# Windows


def windows(settings: Settings, period: int = 0, default: int = 0) -> tuple[int | None, ...]:
    """The window of each layer. The pattern says which layers have it: a list, or the period of
    which the last layer has none (0: all have it)."""
    count = num_layers(settings)
    window = settings.integer("attention.sliding_window", 0, CONTEXT[1], default=default)
    if not window:
        return (None,) * count
    name = "attention.sliding_window_pattern"
    if isinstance(settings.value(name), list):
        slides = settings.items(name, bool, "true or false for each layer")
        if len(slides) != count:
            expected = f"a list that says for each of the {count} layers whether it slides"
            settings.refuse(name, expected)
    else:
        period = settings.integer(name, 0, LAYERS[1], default=period)
        slides = [period == 0 or (n + 1) % period != 0 for n in range(count)]
    return tuple(window if slide else None for slide in slides)


# Rope


def context(settings: Settings) -> int:
    positions: int = settings.integer("context_length", *CONTEXT)
    return positions


def theta(settings: Settings, name: str = "rope.freq_base", default: Any = 10000.0) -> float:
    base: float = settings.number(name, above=1.0, high=ROPE_THETA_MAX, default=default)
    return base


def rope_dim(settings: Settings, head_dim: int) -> int:
    dim: int = settings.integer("rope.dimension_count", *HEAD_DIM, default=head_dim)
    if dim > head_dim or dim % 2:
        raise ModelError(
            f"{settings.where}: {settings.prefix}rope.dimension_count must be even and at most the "
            f"head size {head_dim} (attention.key_length), not {dim}."
        )
    return dim


def rope(settings: Settings, head_dim: int) -> tuple[RopeSpec, int]:
    """And the longest context with its scaling."""
    base, dim = theta(settings), rope_dim(settings, head_dim)
    positions = context(settings)
    low, high = ROPE_FACTOR
    # Older conversions have only the factor of a linear scaling.
    older = settings.number("rope.scale_linear", low=low, high=high, default=1.0)
    factor = settings.number("rope.scaling.factor", low=low, high=high, default=older)
    kind = settings.string("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{settings.where}: rope scaling {shown(kind)} ({settings.prefix}rope.scaling.type) is "
            "not supported. Supported: none, linear, yarn."
        )
    plain = kind == "none" or factor == 1.0
    if ROPE_FACTORS in settings.file.tensors:
        if not plain:
            raise ModelError(
                f"{settings.where}: rope scaling {kind!r} ({settings.prefix}rope.scaling.type) "
                f"together with the factors of {ROPE_FACTORS} is not supported."
            )
        factors = _factors(settings, ROPE_FACTORS, dim)
        return RopeSpec(base, dim, "factors", freq_factors=factors), positions
    if plain:
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
    # The config's mscale_all_dim; its mscale files do not say, and readers take it for 1. (With
    # latents it means something else: see `latent_attention`.)
    all_dim = settings.number(YARN_LOG_MULTIPLIER, high=100.0, default=0.0)
    sharpened = yarn_attention_factor(factor) / yarn_attention_factor(factor, all_dim)
    return RopeSpec(
        base,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_attention_factor(settings, sharpened),
    ), max_context


def longrope(settings: Settings, head_dim: int) -> RopeSpec:
    """From the two tensors of factors, within the original context and beyond it."""
    dim, positions = rope_dim(settings, head_dim), context(settings)
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


def original_context(settings: Settings) -> int:
    name = "rope.scaling.original_context_length"
    original: int = settings.integer(name, *CONTEXT, default=context(settings))
    return original


def _attention_factor(settings: Settings, usual: float = 1.0) -> float:
    """What multiplies cos and sin. Conversions of yarn write the config's own factor, which takes
    the place of the usual one."""
    factor: float = 1.0
    for key, default in (("yarn_attn_factor", usual), ("attn_factor", 1.0)):
        factor *= settings.number(f"rope.scaling.{key}", above=0.0, high=1e3, default=default)
    return factor


def _factors(settings: Settings, tensor: str, dim: int) -> tuple[float, ...]:
    """What divides each frequency, worked out when the model was converted."""
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
