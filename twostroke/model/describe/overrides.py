"""`hf_overrides`: settings that replace those in a model's files.

The names are those of config.json. For a GGUF file the settings of the rope and the context are
translated to the metadata's names; a name with a dot is a name of the metadata itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from twostroke.errors import ConfigError, shown

ROPE, OLD_ROPE, THETA = "rope_parameters", "rope_scaling", "rope_theta"
FULL = "full_attention"  # overrides change the rope of this layer type, if each has its own
TOKENIZER = "tokenizer."
# config.json's names → the metadata's, under the architecture's prefix.
IN_GGUF = {
    "max_position_embeddings": "context_length",
    THETA: "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}


def override_config(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's settings with the overrides merged in, object by object. Rope
    settings are written under the key that this config.json uses: if it has both `rope_parameters`
    and `rope_scaling`, only one is read."""
    remaining = dict(overrides)
    rope = _rope_settings(remaining)
    own = config.get(ROPE)
    if rope and isinstance(own, dict):
        base = own.get(FULL)
        by_type = remaining.get(ROPE, {})  # ropes that are given for each layer type
        remaining[ROPE] = _merged(by_type, {FULL: rope} if isinstance(base, dict) else rope)
    elif rope:
        if THETA in rope:
            remaining[THETA] = rope.pop(THETA)
        if rope:
            remaining[OLD_ROPE] = rope
    merged = _merged(config, remaining)
    for place in (merged.get(ROPE), merged.get(OLD_ROPE)):
        if isinstance(place, dict):
            _resolve_type(place.get(FULL, place), rope)
    return merged


def _resolve_type(rope: Any, overrides: Mapping[str, Any]) -> None:
    """Set the type of a rope's scaling once the overrides are merged in. If they give only a factor
    and the model has no scaling of its own, the scaling is linear."""
    if not isinstance(rope, dict):
        return
    if "rope_type" in overrides:
        rope.pop("type", None)
    elif "factor" in overrides and rope.get("rope_type", rope.get("type")) in (None, "default"):
        rope["rope_type"] = "linear"


def override_metadata(
    metadata: Mapping[str, Any], overrides: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return a GGUF file's metadata with the overrides applied."""
    prefix = f"{metadata.get('general.architecture')}."
    merged = dict(metadata)
    for name, value in _flat(overrides):
        if name == "rope_type" and value == "default":
            value = "none"
        if name in IN_GGUF:
            merged[prefix + IN_GGUF[name]] = value
        elif "." in name and not name.startswith(TOKENIZER):
            merged[name] = value
        else:
            raise ConfigError(
                f"hf_overrides: {shown(name)} has no counterpart in the metadata of {where}; for a "
                f"GGUF file give {', '.join(IN_GGUF)} or the full name of an entry of its metadata "
                f"(the tokenizer's entries cannot be changed)"
            )
    return merged


def _rope_settings(overrides: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of one rope, in either spelling, from the overrides and return them.

    Ropes that are given for each layer type stay in the overrides.
    """
    found: dict[str, Any] = {}
    for name in (OLD_ROPE, ROPE):
        value = overrides.get(name)
        if isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values()):
            found |= overrides.pop(name)
    if THETA in overrides:
        found[THETA] = overrides.pop(THETA)
    if "type" in found:
        found["rope_type"] = found.pop("type")
    return found


def _flat(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    remaining = dict(overrides)
    yield from _rope_settings(remaining).items()
    yield from remaining.items()


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for name, value in other.items():
        before = both.get(name)
        nested = isinstance(before, dict) and isinstance(value, dict)
        both[name] = _merged(before, value) if nested else value  # type: ignore[arg-type]
    return both
