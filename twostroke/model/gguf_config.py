"""GGUF metadata → `ModelSpec`. What we cannot run is refused here, by name. No torch.

Where the metadata says nothing (biases, tied embeddings, Llama 3's rope factors), the presence of
the tensors decides. In the other direction every tensor must have its place in the spec: one that
is left over belongs to mathematics we would silently leave out.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.dequant import dequantize
from twostroke.model.fields import REQUIRED, Fields, shown
from twostroke.model.gguf import GGUFFile
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

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # SmolLM2, Mistral and Llama 3.x call themselves llama
ROPE_FACTORS = "rope_freqs.weight"

GLOBAL_TENSORS = {"embed": "token_embd.weight", "final_norm": "output_norm.weight"}
GLOBAL_TENSORS |= {"head": "output.weight"}
LAYER_TENSORS = {"attn_norm": "attn_norm.weight", "mlp_norm": "ffn_norm.weight"}
LAYER_TENSORS |= {"q": "attn_q.weight", "k": "attn_k.weight", "v": "attn_v.weight"}
LAYER_TENSORS |= {"o": "attn_output.weight", "o_bias": "attn_output.bias"}
LAYER_TENSORS |= {"q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias"}
LAYER_TENSORS |= {"q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight"}
LAYER_TENSORS |= {"gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight"}
LAYER_TENSORS |= {"gate_bias": "ffn_gate.bias", "up_bias": "ffn_up.bias"}
LAYER_TENSORS |= {"down_bias": "ffn_down.bias"}

# A field of the spec → where the metadata says it, under the architecture's prefix. Of what is not
# here, the presence of tensors decides.
FIELDS = {"num_layers": "block_count", "num_heads": "attention.head_count"}
FIELDS |= {"num_kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
FIELDS |= {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length"}
FIELDS |= {"vocab_size": "vocab_size", "family": "general.architecture"}

# Settings of other families, with the values at which they change nothing.
NEUTRAL_SETTINGS: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.kv_lora_rank": (0,),
    "attention.temperature_scale": (0,),
    "attention.scale": (0,),  # 0 stands for the usual 1/√head_dim
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
}


def tensor_name(canonical: str) -> str:
    """The GGUF name of one of our weights: `layers.3.q` → `blk.3.attn_q.weight`."""
    if canonical in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[canonical]
    _, layer, name = canonical.split(".")
    return f"blk.{layer}.{LAYER_TENSORS[name]}"


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    arch = _architecture(file)
    settings = _Settings(file, arch)
    settings.refuse_unsupported()
    hidden = settings.integer("embedding_length", *WIDTH)
    num_heads = settings.integer("attention.head_count", *HEADS)
    num_kv_heads = settings.integer("attention.head_count_kv", *HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{file.path}: attention.head_count {num_heads} is not a multiple of "
            f"attention.head_count_kv {num_kv_heads}."
        )
    if "attention.key_length" not in settings and hidden % num_heads:
        raise ModelError(
            f"{file.path}: {arch}.embedding_length {hidden} is not a multiple of "
            f"{arch}.attention.head_count {num_heads} and no {arch}.attention.key_length is given."
        )
    head_dim = settings.integer("attention.key_length", *HEAD_DIM, default=hidden // num_heads)
    value_dim = settings.integer("attention.value_length", *HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{file.path}: values of another size than keys are not supported "
            f"(attention.key_length {head_dim}, attention.value_length {value_dim})."
        )
    rope, max_context = _rope(settings, head_dim)
    least_eps, most_eps = NORM_EPS
    attention = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope,
        scale=head_dim**-0.5,
        qk_norm="head" if arch == "qwen3" else "none",
        qkv_bias=_in_any_layer(file, "q_bias", "k_bias", "v_bias"),
        output_bias=_in_any_layer(file, "o_bias"),
    )
    mlp = MLPSpec(
        settings.integer("feed_forward_length", *WIDTH),
        bias=_in_any_layer(file, "gate_bias", "up_bias", "down_bias"),
    )
    windows = _windows(settings)
    spec = ModelSpec(
        family=arch,
        vocab_size=settings.integer("vocab_size", *VOCABULARY, default=_num_embeddings(file)),
        hidden_size=hidden,
        layers=tuple(LayerSpec(replace(attention, window=window), mlp) for window in windows),
        norm_eps=settings.number("attention.layer_norm_rms_epsilon", low=least_eps, high=most_eps),
        max_context=max_context,
        tie_embeddings=tensor_name("head") not in file.tensors,
    )
    _refuse_unknown_tensors(file, spec)
    return spec


def _architecture(file: GGUFFile) -> str:
    general = Fields(str(file.path), file.metadata)
    kind = general.string("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{file.path}: holds a GGUF {shown(kind)}, not a model (general.type). Give the model "
            "itself."
        )
    arch = general.value("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: the architecture {shown(arch)} is not supported. "
            f"Supported: {', '.join(ARCHITECTURES)} (general.architecture)."
        )
    parts = general.integer("split.count", 0, 1 << 16, default=0)
    if parts > 1:
        raise ModelError(
            f"{file.path}: this is one of {parts} parts of a split model (split.count), which are "
            "not supported. Join the parts into one file, or download the model as one file."
        )
    return arch


class _Settings(Fields):
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        super().__init__(str(file.path), file.metadata, prefix=f"{arch}.")
        self.file = file

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

    def refuse_unsupported(self) -> None:
        for name, neutral in NEUTRAL_SETTINGS.items():
            value = self.value(name)
            if value is not None and value not in neutral:
                raise ModelError(
                    f"{self.where}: {self.prefix}{name} = {shown(value)} is not supported."
                )


def _windows(settings: _Settings) -> tuple[int | None, ...]:
    """The pattern says for each layer whether it has the window; without one they all have it."""
    count = settings.integer("block_count", *LAYERS)
    num_tensors = len(settings.file.tensors)
    if count > num_tensors:
        raise ModelError(
            f"{settings.where}: the metadata announces {count} layers ({settings.prefix}"
            f"block_count), but the file has only {num_tensors} tensors. It is damaged; download "
            "it again."
        )
    window = settings.integer("attention.sliding_window", 0, CONTEXT[1], default=0)
    if not window:
        return (None,) * count
    name = "attention.sliding_window_pattern"
    pattern = settings.items(name, bool, "true or false for each layer")
    if name not in settings:
        pattern = [True] * count
    if len(pattern) != count:
        settings.refuse(name, f"a list that says for each of the {count} layers whether it slides")
    return tuple(window if slides else None for slides in pattern)


def _rope(settings: _Settings, head_dim: int) -> tuple[RopeSpec, int]:
    theta = settings.number("rope.freq_base", above=1.0, high=ROPE_THETA_MAX, default=10000.0)
    dim = settings.integer("rope.dimension_count", *HEAD_DIM, default=head_dim)
    if dim > head_dim or dim % 2:
        raise ModelError(
            f"{settings.where}: {settings.prefix}rope.dimension_count must be even and at most the "
            f"head size {head_dim} (attention.key_length), not {dim}."
        )
    positions = settings.integer("context_length", *CONTEXT)
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
        return RopeSpec(theta, dim, "factors", freq_factors=_factors(settings, dim)), positions
    if plain:
        return RopeSpec(theta, dim), positions
    name = "rope.scaling.original_context_length"
    original = settings.integer(name, *CONTEXT, default=positions)
    max_context = max(positions, int(original * factor))
    if max_context > CONTEXT[1]:
        settings.refuse(
            "rope.scaling.factor" if "rope.scaling.factor" in settings else "rope.scale_linear",
            f"such that the context stays within {CONTEXT[1]} tokens",
        )
    if kind == "linear":
        return RopeSpec(theta, dim, "linear", factor, original), max_context
    sharpened = yarn_attention_factor(factor)
    for key in ("attn_factor", "yarn_attn_factor"):
        sharpened *= settings.number(f"rope.scaling.{key}", above=0.0, high=1e3, default=1.0)
    fast = settings.number("rope.scaling.yarn_beta_fast", above=0.0, high=1e6, default=32.0)
    slow = settings.number("rope.scaling.yarn_beta_slow", above=0.0, high=1e6, default=1.0)
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=sharpened,
    ), max_context


def _factors(settings: _Settings, dim: int) -> tuple[float, ...]:
    """Llama 3.x: what divides each frequency, worked out when the model was converted."""
    info = settings.file.tensors[ROPE_FACTORS]
    factors = dequantize(settings.file.raw(ROPE_FACTORS), info.type, info.shape)
    if factors.shape != (dim // 2,) or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(
            f"{settings.where}: the tensor {ROPE_FACTORS} must hold {dim // 2} numbers above "
            f"0, one for each pair of rotated channels; it has shape {factors.shape}."
        )
    return tuple(float(factor) for factor in factors)


def _num_embeddings(file: GGUFFile) -> Any:
    """The size of the vocabulary where the metadata does not say it."""
    embedding = file.tensors.get(tensor_name("embed"))
    if embedding is not None:
        return embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else REQUIRED


def _in_any_layer(file: GGUFFile, *names: str) -> bool:
    """One is enough to ask for all: those that are missing then show when weights are checked."""
    endings = tuple(f".{LAYER_TENSORS[name]}" for name in names)
    return any(tensor.endswith(endings) for tensor in file.tensors)


def _refuse_unknown_tensors(file: GGUFFile, spec: ModelSpec) -> None:
    known = {tensor_name(name) for name in spec.weight_shapes()} | {ROPE_FACTORS}
    unknown = [name for name in file.tensors if name not in known]
    beyond = {f"blk.{n}" for n in range(spec.num_layers, LAYERS[1])}
    layers = {name for name in unknown if ".".join(name.split(".")[:2]) in beyond}
    if layers:
        raise ModelError(
            f"{file.path}: {spec.family}.block_count is {spec.num_layers}, but the file has "
            f"{len(layers)} tensors of further layers, such as {shown(min(layers))}. It is damaged "
            "or was put together from two models; download it again."
        )
    if unknown:
        raise ModelError(
            f"{file.path}: the tensor {shown(unknown[0])} is not part of a {spec.family} model "
            "(general.architecture) as this version knows it, and to leave it out would change the "
            "results. Use a conversion of the plain model."
        )
