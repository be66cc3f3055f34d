"""`close_objects`: a JSON schema whose objects have no other names than those it gives.

JSON schema lets an object have any names beside its `properties`, and a small model then writes
names for ever. An object is closed where `properties` are given and nothing is said of others
(`additionalProperties`, `unevaluatedProperties`). All that is said of one object counts together:

    {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": …}}]}

has the names of Base and b. So one of the parts closes the object and lists the names of the others
(with `true`: anything, which the others restrict), and the others stay open. Where an object is
described by alternatives (`anyOf`, `oneOf`), each of them closes it. A `$ref` points to a closed
schema; where it is to stay open, to an open copy of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

# ("properties" or "patternProperties", name), in their order
Names = dict[tuple[str, str], None]

# Schemas of other values than the object itself: one, a list of them, or by name.
NESTED: Final = (
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
)
NESTED_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
ALTERNATIVES: Final = ("anyOf", "oneOf")
# With one of these an object is as its author left it: they say what else it may have, or when.
SAID: Final = {
    "additionalProperties",
    "unevaluatedProperties",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
}


@dataclass(frozen=True)
class Part:
    """Schemas inside another one that are about the same object: a member of `allOf`, the
    alternatives of `anyOf` or `oneOf`, a `$ref`."""

    key: str
    schemas: list[Any]
    index: int = 0  # of the member of `allOf`


@dataclass(frozen=True)
class Known:
    """What parts of a schema say of an object's names. `given`: there are `properties`."""

    names: Names = field(default_factory=dict)
    given: bool = False

    def __or__(self, other: Known) -> Known:
        return Known(self.names | other.names, self.given or other.given)


def close_objects(schema: Any) -> Any:
    """Raises `RecursionError` if the schema is nested too deeply."""
    return _Closer(schema).close()


class _Closer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Known] = {}  # by the schema's id()
        self._said: dict[int, bool] = {}
        self._copies: dict[str, Any] = {}  # open ones, by their names in $defs
        self._copy_names: dict[str, str] = {}  # by what they are copies of

    def close(self) -> Any:
        closed = self._closed(self._root)
        if self._copies:
            closed["$defs"] = closed.get("$defs", {}) | self._copies
        return closed

    def _closed(self, schema: Any) -> Any:
        return self._part(schema, Known())

    def _part(self, schema: Any, others: Known | None) -> Any:
        """A schema, closed. `others`: what is known from schemas of the same object; None if one of
        those closes it."""
        if not isinstance(schema, dict):
            return schema
        new = {key: self._nested(key, value) for key, value in schema.items()}
        parts = [(part, self._known_of(part)) for part in _parts(schema)]
        closer, around = None, others
        if around is not None and self._is_said(schema):
            around = None
        if around is not None:
            around |= self._own(schema)
            closer = _choose_closer(around, parts)
            for part, known in parts:
                if part is not closer:
                    around |= known
            if closer is None and around.given:
                for kind, name in around.names:
                    new.setdefault(kind, {}).setdefault(name, True)
                new["additionalProperties"] = False
        for part, _ in parts:
            inner = around if part is closer else None
            if closer is None and around is not None and not around.given:
                inner = Known()  # no part gives names: each is looked at by itself
            if part.key != "$ref":
                changed = [self._part(one, inner) for one in part.schemas]
                new[part.key] = [*new[part.key], *changed] if part.index else changed
            elif inner is None:
                new["$ref"] = self._open_reference(schema["$ref"])
        return new

    def _nested(self, key: str, value: Any) -> Any:
        if key in NESTED_BY_NAME and isinstance(value, dict):
            return {name: self._closed(one) for name, one in value.items()}
        if key in NESTED:
            if isinstance(value, list):
                return [self._closed(one) for one in value]
            return self._closed(value)
        return value

    # ── what a schema says of an object's names ─────────────────────────────────────────────

    def _own(self, schema: dict[str, Any]) -> Known:
        names: Names = {}
        for kind in ("properties", "patternProperties"):
            names |= {(kind, name): None for name in _strings(schema.get(kind))}
        names |= {("properties", name): None for name in _strings(schema.get("required"))}
        return Known(names, isinstance(schema.get("properties"), dict))

    def _known_of(self, part: Part) -> Known:
        known = Known()
        for one in part.schemas:
            known |= self._all_known(self._target(one) if part.key == "$ref" else one)
        return known

    def _all_known(self, schema: Any) -> Known:
        if not isinstance(schema, dict):
            return Known()
        if id(schema) not in self._known:
            self._known[id(schema)] = Known()  # for a schema that is part of itself
            known = self._own(schema)
            for part in _parts(schema):
                known |= self._known_of(part)
            self._known[id(schema)] = known
        return self._known[id(schema)]

    def _is_said(self, schema: Any) -> bool:
        """Whether the schema, or one that always holds with it, says what else an object has."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._said:
            self._said[id(schema)] = False  # for a schema that is part of itself
            self._said[id(schema)] = bool(SAID & schema.keys()) or self._parts_say(schema)
        return self._said[id(schema)]

    def _parts_say(self, schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            if target is None or self._is_said(target):
                return True
        parts = [part for part in _parts(schema) if part.key == "allOf"]
        return any(self._is_said(part.schemas[0]) for part in parts)

    # ── references ──────────────────────────────────────────────────────────────────────────

    def _target(self, reference: Any) -> Any:
        """The schema that is referred to; None if it is not found in this one."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, dict) and name in found:
                found = found[name]
            else:
                return None
        return found if reference == "#" or reference.startswith("#/") else None

    def _open_reference(self, reference: Any) -> Any:
        target = self._target(reference)
        if not isinstance(target, dict):
            return reference
        if reference not in self._copy_names:
            number = len(self._copies)
            while (name := f"open_{number}") in self._root.get("$defs", {}) | self._copies:
                number += 1
            self._copy_names[reference] = name
            self._copies[name] = {}  # its place, for the copies that its parts need
            self._copies[name] = self._part(target, None)
        return f"#/$defs/{self._copy_names[reference]}"


def _parts(schema: dict[str, Any]) -> Iterator[Part]:
    if isinstance(schema.get("allOf"), list):
        for index, one in enumerate(schema["allOf"]):
            yield Part("allOf", [one], index)
    for key in ALTERNATIVES:
        if isinstance(schema.get(key), list):
            yield Part(key, schema[key])
    if "$ref" in schema:
        yield Part("$ref", [schema["$ref"]])


def _choose_closer(around: Known, parts: list[tuple[Part, Known]]) -> Part | None:
    """The part that closes the object; None for the schema that has these parts."""
    giving = [(part, known) for part, known in parts if known.given]
    for part, _ in giving:
        if part.key in ALTERNATIVES:
            return part
    if len(giving) == 1 and not around.given:
        ((part, known),) = giving
        names = around.names.keys() | {n for _, other in parts for n in other.names}
        if part.key != "$ref" or names <= known.names.keys():
            return part
    return None


def _strings(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | dict) else []
