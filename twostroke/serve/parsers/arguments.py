"""Arguments that a format writes without types, as JSON: by what the tool's schema says of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

Kinds = frozenset[str]  # JSON schema's types; none: anything
MAX_PARTS: Final = 32  # references and alternatives that are looked at for one argument
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}


def argument_kinds(schema: Mapping[str, Any]) -> dict[str, Kinds]:
    """By argument: the types that a tool's schema gives it."""
    found: dict[str, Kinds] = {}
    for part in _resolved(schema, schema):
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            for key, described in properties.items():
                found[str(key)] = frozenset(_kinds(described, schema))
    return found


def _kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    kinds: set[str] = set()
    for part in _resolved(schema, root):
        kind = part.get("type")
        kinds |= {one for one in (kind if isinstance(kind, list) else [kind]) if one}
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if not kind and isinstance(values, list):
            kinds |= {_kind_of(value) for value in values}
    return {kind for kind in kinds if isinstance(kind, str)}


def _resolved(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema and those it refers to or chooses from, if they are in the same document."""
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


def _kind_of(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "array" if isinstance(value, list) else "object")


def as_json(text: str, kinds: Kinds) -> str:
    """A value that is written bare, as JSON: of the types that it may have; as a string if it may
    be one, or fits none of them."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    if bare == "null" and "null" in kinds:
        return bare
    if kinds and "string" not in kinds:
        if bare.lower() in ("true", "false") and "boolean" in kinds:
            return bare.lower()
        if _is_json(bare):
            return bare
        if (value := python_as_json(bare)) is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def python_as_json(source: str) -> str | None:
    """A Python literal as JSON; None if it is none."""
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
