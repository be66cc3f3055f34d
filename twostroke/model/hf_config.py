"""A Hugging Face `config.json` → `ModelSpec`. What we cannot run is refused here, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.spec import LayerSpec, ModelSpec, RopeSpec, yarn_attention_factor

# model_type → (biases on q, k, v; norms on q and k) that the family has without saying so.
FAMILIES = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
ROPE_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic"}
ROPE_KINDS |= {"llama3": "llama3", "yarn": "yarn"}


def load_hf_config(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no config.json there. A model folder holds config.json and *.safetensors; "
            "for a GGUF model give the path of the .gguf file itself."
        ) from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error}).") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: expected a JSON object with the model's settings.")
    return spec_from_hf(config, where=str(path)), config


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    family = config.get("model_type")
    if family not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"{where}: the architecture {family!r} is not supported. Supported: {names}."
        )
    _refuse_unsupported(config, where)
    biased, qk_norm = FAMILIES[family]
    hidden = _positive_int(config, "hidden_size", where)
    num_heads = _positive_int(config, "num_attention_heads", where)
    num_kv_heads = _positive_int(config, "num_key_value_heads", where, default=num_heads)
    if config.get("head_dim") is None and hidden % num_heads:
        raise ModelError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads} "
            "and no head_dim is given."
        )
    head_dim = _positive_int(config, "head_dim", where, default=hidden // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}."
        )
    positions = _positive_int(config, "max_position_embeddings", where)
    rope, max_context = _rope(config, head_dim, positions, where)
    return ModelSpec(
        family=family,
        vocab_size=_positive_int(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_positive_int(config, "intermediate_size", where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=_layers(config, family, where),
        rope=rope,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_context=max_context,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or bool(config.get("attention_bias", False)),
        output_bias=family != "qwen2" and bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=qk_norm,
    )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{where}: the activation {activation!r} is not supported, only 'silu'.")
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{where}: weights quantised by {method!r} are not supported. Use the unquantised "
            "model, or a GGUF of it."
        )
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"):
        if config.get(key):
            raise ModelError(f"{where}: {key} = {config[key]} is not supported (dense models are).")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"{where}: {key} = {config[key]} is not supported.")


def _layers(config: Mapping[str, Any], family: str, where: str) -> tuple[LayerSpec, ...]:
    """As each family's own code reads its config, absent keys included."""
    count = _positive_int(config, "num_hidden_layers", where)
    if family == "llama":
        return (LayerSpec(),) * count
    window = config.get("sliding_window", 4096)
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (LayerSpec(),) * count
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"{where}: sliding_window must be a positive whole number, not {window!r}")
    if family == "mistral":
        return (LayerSpec(window),) * count
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if n >= first else "full_attention" for n in range(count)]
    if len(kinds) != count:
        raise ModelError(f"{where}: layer_types has {len(kinds)} entries for {count} layers.")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"{where}: the layer type {unknown[0]!r} is not supported.")
    return tuple(LayerSpec(window if kind == "sliding_attention" else None) for kind in kinds)


def _rope(
    config: Mapping[str, Any], head_dim: int, positions: int, where: str
) -> tuple[RopeSpec, int]:
    """Rope from either spelling (`rope_parameters`, or `rope_theta` + `rope_scaling`)."""
    given: dict[str, Any] = dict(config.get("rope_scaling") or {})
    given |= config.get("rope_parameters") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    name = given.get("rope_type") or given.get("type") or "default"
    if name not in ROPE_KINDS:
        names = ", ".join(sorted(ROPE_KINDS))
        raise ModelError(f"{where}: rope type {name!r} is not supported. Supported: {names}.")
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dim = int(head_dim * float(partial))
    if name == "default":
        return RopeSpec(theta, dim), positions
    original = int(
        given.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or positions
    )
    factor = float(given.get("factor") or positions / original)
    if factor <= 0:
        raise ModelError(f"{where}: the rope scaling factor must be above 0, not {factor}.")
    if name in ("linear", "dynamic"):
        kind = "linear" if name == "linear" else "dynamic"
        rope = RopeSpec(theta, dim, kind, factor, original_context=positions)  # type: ignore[arg-type]
        return rope, int(positions * factor)
    if name == "llama3":
        low = float(given.get("low_freq_factor", 1.0))
        high = float(given.get("high_freq_factor", 4.0))
        return RopeSpec(theta, dim, "llama3", factor, original, low, high), positions
    return _yarn(given, theta, dim, factor, original), max(positions, int(original * factor))


def _yarn(
    given: Mapping[str, Any], theta: float, dim: int, factor: float, original: int
) -> RopeSpec:
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = yarn_attention_factor(factor)
        if mscale and all_dim:
            numerator = yarn_attention_factor(factor, float(mscale))
            attention_factor = numerator / yarn_attention_factor(factor, float(all_dim))
    return RopeSpec(
        theta,
        dim,
        "yarn",
        factor,
        original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        attention_factor=float(attention_factor),
    )


def _positive_int(
    config: Mapping[str, Any], key: str, where: str, default: int | None = None
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive whole number, not {value!r}.")
    return value
