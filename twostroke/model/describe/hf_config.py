"""A Hugging Face `config.json` → `ModelSpec`. Unsupported models are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.errors import ModelError
from twostroke.model.describe.hf_families import FAMILIES, Family
from twostroke.model.describe.hf_packed import PackedConfig, packed_config
from twostroke.model.describe.hf_w8a8 import W8Config, w8_config
from twostroke.model.describe.overrides import override_config
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import SpecVariant, TensorNames
from twostroke.model.fields import Fields, read_json, shown

log = logging.getLogger(__name__)

DTYPES = ("float64", "float32", "float16", "bfloat16")
# A field of the spec → its name in config.json.
FIELDS = {"family": "model_type", "num_layers": "num_hidden_layers", "qk_norm": "model_type"}
FIELDS |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
FIELDS |= {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
FIELDS |= {"tie_embeddings": "tie_word_embeddings", "max_context": "max_position_embeddings"}
FIELDS |= {"nope_dim": "qk_nope_head_dim", "rope_dim": "qk_rope_head_dim"}
FIELDS |= {"value_dim": "v_head_dim"}
FIELDS |= {"num_experts": "num_experts, num_local_experts or n_routed_experts"}
FIELDS |= {"expert_intermediate_size": "moe_intermediate_size or intermediate_size"}
FIELDS |= {
    "shared_intermediate_size": "shared_expert_intermediate_size, shared_intermediate_size or "
    "n_shared_experts"
}


def load_hf_config(
    folder: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec and the settings of config.json, with the overrides applied."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no config.json there. A model folder holds config.json and *.safetensors; "
            "for a GGUF model give the path of the .gguf file itself."
        ) from None
    if not overrides:
        return spec_from_hf(config, where=str(path)), config
    config = override_config(config, overrides)
    return spec_from_hf(config, where=f"{path} with hf_overrides"), config


def spec_from_hf(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    family = _family(config, where)
    fields = Fields(where, config, aliases=family.aliases)
    _refuse_unsupported(fields, family)
    quantized = quantized_in_hf(config, where)
    spec = family.spec(fields)
    if family.images:
        log.warning("%s: images are not supported; only the model's text part is run", where)
    if spec.has_experts and quantized is not None:
        raise ModelError(
            f"{where}: experts in {quantized.name} (quantization_config) are not supported yet. "
            "Use the unquantised model, or a GGUF of it."
        )
    if not spec.has_experts:
        _refuse(fields, family, "num_experts", "num_local_experts", "n_routed_experts")
    return spec


def names_in_hf(config: Mapping[str, Any]) -> TensorNames:
    """Return the tensor names of the model's files."""
    names = _family(config, "config.json").names
    return names if isinstance(names, TensorNames) else names(Fields("config.json", config))


def quantized_in_hf(config: Mapping[str, Any], where: str) -> W8Config | PackedConfig | None:
    """Return the quantisation of the weights, or None. Refuse unsupported ones."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    known = method in _family(config, where).quant_methods
    return None if known else packed_config(config, where) or w8_config(config, where)


def fields_in_hf(config: Mapping[str, Any]) -> dict[str, str]:
    """Return field of the spec → its name in this config.json."""
    aliases = _family(config, "config.json").aliases
    named = {**dict(zip(aliases, aliases, strict=True)), **FIELDS}
    return {field: aliases.get(name, name) for field, name in named.items()}


def spec_variants(config: Mapping[str, Any]) -> Iterator[SpecVariant]:
    """Yield the model with the other value of each boolean field, where that model exists."""
    where, family = "config.json", _family(config, "config.json")
    fields = Fields(where, config, aliases=family.aliases)
    family.spec(fields)
    for path, value in fields.switches.items():
        other = _with_entry(config, path, value)
        try:
            spec = family.spec(Fields(where, other, aliases=family.aliases))
            yield SpecVariant(".".join(path), spec, names_in_hf(other))
        except ModelError:
            continue


def _with_entry(config: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: _with_entry(config.get(first) or {}, rest, value) if rest else value}


def dtype_of(config: Mapping[str, Any], where: str) -> str:
    """Return the dtype of the weights, by torch's name."""
    fields = Fields(where, config)
    if "dtype" not in fields and "torch_dtype" not in fields:
        fields = fields.nested("text_config")
    name = "dtype" if "dtype" in fields else "torch_dtype"
    known = [*DTYPES, *(f"torch.{dtype}" for dtype in DTYPES)]
    return str(fields.choice(name, known, default="bfloat16")).removeprefix("torch.")


def _family(config: Mapping[str, Any], where: str) -> Family:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{where}: the architecture {shown(name)} is not supported. Supported: "
            f"{', '.join(sorted(FAMILIES))} (model_type)."
        )
    return FAMILIES[name]


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Refuse fields that this family does not read."""
    _refuse(fields, family, "kv_lora_rank")


def _refuse(fields: Fields, family: Family, *names: str) -> None:
    for key in names:
        if fields.value(key) and key not in family.reads:
            raise ModelError(
                f"{fields.where}: {key} = {shown(fields.value(key))} is not supported with this "
                "model_type."
            )
