"""`hf_overrides`: settings of a model that take the place of those in its files.

The names are those of config.json. For a GGUF file the settings of the rope and the context are
translated to the metadata's names; a name with a dot is a name of the metadata itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from twostroke.errors import ConfigError, shown

ROPE, OLD_ROPE, THETA = "rope_parameters", "rope_scaling", "rope_theta"
FULL = "full_attention"  # the layers' kind that a scaling is for, where each kind has its own rope
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
    """Return config.json's settings with the overrides merged in, object by object. Settings of the
    rope go where this config.json keeps its own, because a config with both spellings is read by
    one of them."""
    given = dict(overrides)
    rope = _rope_settings(given)
    own = config.get(ROPE)
    if rope and isinstance(own, dict):
        base = own.get(FULL)
        given[ROPE] = {FULL: rope} if isinstance(base, dict) else rope
    elif rope:
        if THETA in rope:
            given[THETA] = rope.pop(THETA)
        if rope:
            given[OLD_ROPE] = rope
    merged = _merged(config, given)
    for place in (merged.get(ROPE), merged.get(OLD_ROPE)):
        if isinstance(place, dict):
            _settle_type(place.get(FULL, place), rope)
    return merged


def _settle_type(rope: Any, given: Mapping[str, Any]) -> None:
    """A type that is given counts in either spelling; a factor alone scales linearly, where the
    model has no scaling of its own."""
    if not isinstance(rope, dict):
        return
    if "rope_type" in given:
        rope.pop("type", None)
    elif "factor" in given and rope.get("rope_type", rope.get("type")) in (None, "default"):
        rope["rope_type"] = "linear"


def override_metadata(
    metadata: Mapping[str, Any], overrides: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return a GGUF file's metadata with the overrides in the place of its own entries."""
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


def _rope_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Take the settings of one rope, in either spelling, out of the overrides. A rope for each
    kind of layer stays where it is."""
    found: dict[str, Any] = {}
    for name in (OLD_ROPE, ROPE):
        value = given.get(name)
        if isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values()):
            found |= given.pop(name)
    if THETA in given:
        found[THETA] = given.pop(THETA)
    if "type" in found:
        found["rope_type"] = found.pop("type")
    return found


def _flat(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    given = dict(overrides)
    yield from _rope_settings(given).items()
    yield from given.items()


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(one)
    for name, value in other.items():
        before = both.get(name)
        nested = isinstance(before, dict) and isinstance(value, dict)
        both[name] = _merged(before, value) if nested else value  # type: ignore[arg-type]
    return both
