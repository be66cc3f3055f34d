"""Converts the arguments of tool calls to JSON, for formats whose values are texts without a type.
The types are those in the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

JsonTypes = frozenset[str]  # types of JSON schema; empty: any type
MAX_PARTS: Final = 32  # references and alternatives followed for one argument
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}


def argument_types(schema: Mapping[str, Any]) -> dict[str, JsonTypes]:
    """Return the types that a tool's schema allows for each argument."""
    found: dict[str, JsonTypes] = {}
    for part in _resolved(schema, schema):
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            for key, described in properties.items():
                found[str(key)] = frozenset(_types_of(described, schema))
    return found


def _types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    types: set[str] = set()
    for part in _resolved(schema, root):
        kind = part.get("type")
        types |= {name for name in (kind if isinstance(kind, list) else [kind]) if name}
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if not kind and isinstance(values, list):
            types |= {_type_of(value) for value in values}
    return {kind for kind in types if isinstance(kind, str)}


def _resolved(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schema, its alternatives, and its references within the same document."""
    parts: list[Mapping[str, Any]] = []
    queue = [schema]
    while queue and len(parts) < MAX_PARTS:
        part = queue.pop(0)
        if not isinstance(part, Mapping):
            continue
        parts.append(part)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for step in reference[2:].split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            queue.append(target)
        for key in ("anyOf", "oneOf", "allOf"):
            several = part.get(key)
            queue += several[:MAX_PARTS] if isinstance(several, list) else []
    return parts


def _type_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")


def as_json(text: str, types: JsonTypes) -> str:
    """Return a text as JSON: a string if `types` allows strings or the text is no other value."""
    stripped = text.strip()
    stripped = _PYTHON.get(stripped, stripped)
    if stripped == "null" and "null" in types:
        return stripped
    if types and "string" not in types:
        if stripped.lower() in ("true", "false") and "boolean" in types:
            return stripped.lower()
        if _is_json(stripped):
            return stripped
        if (value := python_as_json(stripped)) is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def python_as_json(source: str) -> str | None:
    """Return a Python literal as JSON; None if the text is no literal."""
    try:
        return json.dumps(ast.literal_eval(source), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
