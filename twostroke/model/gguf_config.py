"""GGUF metadata → `ModelSpec`. What we cannot run is refused here, by name. No torch.

Where the metadata says nothing (biases, tied embeddings, Llama 3's rope factors), the presence of
the tensors decides. In the other direction every tensor must have its place in the spec: one that
is left over belongs to mathematics we would silently leave out.
"""

from __future__ import annotations

import math
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.dequant import dequantize
from twostroke.model.gguf import GGUFFile
from twostroke.model.spec import LayerSpec, ModelSpec, RopeSpec, yarn_attention_factor

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
    hidden = settings.positive_int("embedding_length")
    num_heads = settings.positive_int("attention.head_count")
    num_kv_heads = settings.positive_int("attention.head_count_kv", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{file.path}: attention.head_count {num_heads} is not a multiple of "
            f"attention.head_count_kv {num_kv_heads}."
        )
    head_dim = settings.positive_int("attention.key_length", default=hidden // num_heads)
    value_dim = settings.positive_int("attention.value_length", default=head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{file.path}: values of another size than keys are not supported "
            f"(attention.key_length {head_dim}, attention.value_length {value_dim})."
        )
    rope, max_context = _rope(settings, head_dim)
    spec = ModelSpec(
        family=arch,
        vocab_size=settings.positive_int("vocab_size", default=_num_embeddings(file)),
        hidden_size=hidden,
        intermediate_size=settings.positive_int("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(settings),
        rope=rope,
        norm_eps=settings.positive_float("attention.layer_norm_rms_epsilon"),
        max_context=max_context,
        tie_embeddings=tensor_name("head") not in file.tensors,
        qkv_bias=_in_any_layer(file, "q_bias", "k_bias", "v_bias"),
        output_bias=_in_any_layer(file, "o_bias"),
        mlp_bias=_in_any_layer(file, "gate_bias", "up_bias", "down_bias"),
        qk_norm=arch == "qwen3",
    )
    _refuse_unknown_tensors(file, spec)
    return spec


def _architecture(file: GGUFFile) -> str:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.path}: holds a GGUF {kind!r}, not a model. Give the model itself.")
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: the architecture {arch!r} is not supported. "
            f"Supported: {', '.join(ARCHITECTURES)}."
        )
    parts = file.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{file.path}: this is one of {parts} parts of a split model, which are not supported. "
            "Join the parts into one file, or download the model as one file."
        )
    return str(arch)


class _Settings:
    """The metadata under the architecture's own prefix."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list):
            value = self._same_in_all_layers(key, value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, "a positive whole number", value)
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(key, "a number above 0", value)
        return float(value)

    def refuse_unsupported(self) -> None:
        for key, neutral in NEUTRAL_SETTINGS.items():
            value = self.get(key, neutral[0])
            if value not in neutral:
                raise ModelError(f"{self.file.path}: {self.arch}.{key} = {value} is not supported.")

    def _same_in_all_layers(self, key: str, values: list[Any]) -> Any:
        if not values or any(value != values[0] for value in values):
            raise ModelError(
                f"{self.file.path}: {self.arch}.{key} differs from layer to layer, "
                "which is not supported."
            )
        return values[0]

    def _wrong(self, key: str, expected: str, value: Any) -> ModelError:
        name = f"{self.arch}.{key}"
        if value is None:
            return ModelError(
                f"{self.file.path}: the metadata has no {name}. The conversion of the model is "
                "incomplete; use another one."
            )
        return ModelError(f"{self.file.path}: {name} must be {expected}, not {value!r}.")


def _layers(settings: _Settings) -> tuple[LayerSpec, ...]:
    """The pattern says for each layer whether it has the window; without one they all have it."""
    count = settings.positive_int("block_count")
    num_tensors = len(settings.file.tensors)
    if count > num_tensors:
        raise ModelError(
            f"{settings.file.path}: the metadata announces {count} layers, but the file has only "
            f"{num_tensors} tensors. It is damaged; download it again."
        )
    if not settings.get("attention.sliding_window"):
        return (LayerSpec(),) * count
    window = settings.positive_int("attention.sliding_window")
    pattern = settings.get("attention.sliding_window_pattern", [True] * count)
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ModelError(
            f"{settings.file.path}: attention.sliding_window_pattern must say for each of the "
            f"{count} layers whether it has the window, not {pattern!r}."
        )
    return tuple(LayerSpec(window if slides else None) for slides in pattern)


def _rope(settings: _Settings, head_dim: int) -> tuple[RopeSpec, int]:
    theta = settings.positive_float("rope.freq_base", default=10000.0)
    dim = settings.positive_int("rope.dimension_count", default=head_dim)
    if dim > head_dim or dim % 2:
        raise ModelError(
            f"{settings.file.path}: rope.dimension_count must be even and at most the head size "
            f"{head_dim}, not {dim}."
        )
    positions = settings.positive_int("context_length")
    # Older conversions have only the factor of a linear scaling.
    factor = settings.positive_float(
        "rope.scaling.factor", default=settings.positive_float("rope.scale_linear", default=1.0)
    )
    kind = settings.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{settings.file.path}: rope scaling {kind!r} is not supported. "
            "Supported: none, linear, yarn."
        )
    plain = kind == "none" or factor == 1.0
    if ROPE_FACTORS in settings.file.tensors:
        if not plain:
            raise ModelError(
                f"{settings.file.path}: rope scaling {kind!r} together with the factors of "
                f"{ROPE_FACTORS} is not supported."
            )
        return RopeSpec(theta, dim, "factors", freq_factors=_factors(settings, dim)), positions
    if plain:
        return RopeSpec(theta, dim), positions
    original = settings.positive_int("rope.scaling.original_context_length", default=positions)
    max_context = max(positions, int(original * factor))
    if kind == "linear":
        return RopeSpec(theta, dim, "linear", factor, original), max_context
    sharpened = yarn_attention_factor(factor)
    for key in ("attn_factor", "yarn_attn_factor"):
        sharpened *= settings.positive_float(f"rope.scaling.{key}", default=1.0)
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=settings.positive_float("rope.scaling.yarn_beta_fast", default=32.0),
        beta_slow=settings.positive_float("rope.scaling.yarn_beta_slow", default=1.0),
        attention_factor=sharpened,
    ), max_context


def _factors(settings: _Settings, dim: int) -> tuple[float, ...]:
    """Llama 3.x: what divides each frequency, worked out when the model was converted."""
    info = settings.file.tensors[ROPE_FACTORS]
    factors = dequantize(settings.file.raw(ROPE_FACTORS), info.type, info.shape)
    if factors.shape != (dim // 2,) or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(
            f"{settings.file.path}: the tensor {ROPE_FACTORS} must hold {dim // 2} numbers above "
            f"0, one for each pair of rotated channels; it has shape {factors.shape}."
        )
    return tuple(float(factor) for factor in factors)


def _num_embeddings(file: GGUFFile) -> int | None:
    embedding = file.tensors.get(tensor_name("embed"))
    if embedding is not None:
        return embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _in_any_layer(file: GGUFFile, *names: str) -> bool:
    """One is enough to ask for all: those that are missing then show when weights are checked."""
    endings = tuple(f".{LAYER_TENSORS[name]}" for name in names)
    return any(tensor.endswith(endings) for tensor in file.tensors)


def _refuse_unknown_tensors(file: GGUFFile, spec: ModelSpec) -> None:
    known = {tensor_name(name) for name in spec.weight_shapes()} | {ROPE_FACTORS}
    unknown = [name for name in file.tensors if name not in known]
    if unknown:
        raise ModelError(
            f"{file.path}: the tensor {unknown[0]!r} is not part of a {spec.family} model as this "
            "version knows it, and to leave it out would change the results. Use a conversion of "
            "the plain model."
        )
