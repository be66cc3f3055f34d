"""`close_objects`: closes the objects of a JSON schema, so that they have only the named
properties.

JSON schema allows any properties beside `properties`, and a small model then generates properties
without end. An object is closed if it has `properties` and does not mention other properties
(`additionalProperties`, `unevaluatedProperties`). Several schemas may describe one object:

    {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": …}}]}

has the properties of Base and b. One of these subschemas closes the object. It lists the properties
of the other subschemas with the schema `true`, because the others restrict them, and the others
stay open. If alternatives (`anyOf`, `oneOf`) describe an object, each alternative closes it. A
`$ref` points to a closed schema, or to an open copy where the schema must stay open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

# ("properties" or "patternProperties", name), in order of appearance
Names = dict[tuple[str, str], None]

# Keys whose schemas describe values inside the object: one schema, a list, or schemas by name.
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
# Keys with which a schema decides about other properties itself. The object is not closed then.
DECIDES_ITSELF: Final = {
    "additionalProperties",
    "unevaluatedProperties",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
}


@dataclass(frozen=True)
class Subschema:
    """Schemas inside a schema that describe the same object: a member of `allOf`, the alternatives
    of `anyOf` or `oneOf`, or a `$ref`."""

    key: str
    schemas: list[Any]
    index: int = 0  # of the member of `allOf`


@dataclass(frozen=True)
class Properties:
    """The names of an object's properties. `declared`: a schema has `properties`."""

    names: Names = field(default_factory=dict)
    declared: bool = False

    def __or__(self, other: Properties) -> Properties:
        return Properties(self.names | other.names, self.declared or other.declared)


def close_objects(schema: Any) -> Any:
    """Return the closed schema. Raises `RecursionError` if the schema is nested too deeply."""
    return _Closer(schema).close()


class _Closer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._properties: dict[int, Properties] = {}  # by the schema's id()
        self._decides: dict[int, bool] = {}  # by the schema's id()
        self._copies: dict[str, Any] = {}  # open copies, by name in $defs
        self._copy_names: dict[str, str] = {}  # by the reference to the original

    def close(self) -> Any:
        closed = self._closed(self._root)
        if self._copies:
            closed["$defs"] = closed.get("$defs", {}) | self._copies
        return closed

    def _closed(self, schema: Any) -> Any:
        return self._process(schema, Properties())

    def _process(self, schema: Any, outer: Properties | None) -> Any:
        """Return a schema with closed objects. `outer` has the properties from other schemas of the
        same object; it is None if another schema closes the object."""
        if not isinstance(schema, dict):
            return schema
        new = {key: self._nested(key, value) for key, value in schema.items()}
        parts = [(part, self._properties_of(part)) for part in _subschemas(schema)]
        closer = None
        if outer is not None and self._decides_itself(schema):
            outer = None
        if outer is not None:
            outer |= self._own(schema)
            closer = _choose_closer(outer, parts)
            for part, properties in parts:
                if part is not closer:
                    outer |= properties
            if closer is None and outer.declared:
                for key, name in outer.names:
                    new.setdefault(key, {}).setdefault(name, True)
                new["additionalProperties"] = False
        for part, _ in parts:
            inner = outer if part is closer else None
            if closer is None and outer is not None and not outer.declared:
                inner = Properties()  # no subschema declares properties: each one is separate
            if part.key != "$ref":
                changed = [self._process(one, inner) for one in part.schemas]
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

    # ── the properties that a schema names ──────────────────────────────────────────────────

    def _own(self, schema: dict[str, Any]) -> Properties:
        names: Names = {}
        for key in ("properties", "patternProperties"):
            names |= {(key, name): None for name in _strings(schema.get(key))}
        names |= {("properties", name): None for name in _strings(schema.get("required"))}
        return Properties(names, isinstance(schema.get("properties"), dict))

    def _properties_of(self, part: Subschema) -> Properties:
        properties = Properties()
        for one in part.schemas:
            properties |= self._all_properties(self._target(one) if part.key == "$ref" else one)
        return properties

    def _all_properties(self, schema: Any) -> Properties:
        """Return the properties that a schema and its subschemas name."""
        if not isinstance(schema, dict):
            return Properties()
        if id(schema) not in self._properties:
            self._properties[id(schema)] = Properties()  # for a recursive schema
            properties = self._own(schema)
            for part in _subschemas(schema):
                properties |= self._properties_of(part)
            self._properties[id(schema)] = properties
        return self._properties[id(schema)]

    def _decides_itself(self, schema: Any) -> bool:
        """Return whether a schema, or a subschema that always applies, decides about other
        properties."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._decides:
            self._decides[id(schema)] = False  # for a recursive schema
            decides = bool(DECIDES_ITSELF & schema.keys()) or self._subschemas_decide(schema)
            self._decides[id(schema)] = decides
        return self._decides[id(schema)]

    def _subschemas_decide(self, schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            if target is None or self._decides_itself(target):
                return True
        parts = [part for part in _subschemas(schema) if part.key == "allOf"]
        return any(self._decides_itself(part.schemas[0]) for part in parts)

    # ── references ──────────────────────────────────────────────────────────────────────────

    def _target(self, reference: Any) -> Any:
        """Return the schema of a reference; None if the root schema does not contain it."""
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
            self._copies[name] = {}  # reserves the name while further copies are made
            self._copies[name] = self._process(target, None)
        return f"#/$defs/{self._copy_names[reference]}"


def _subschemas(schema: dict[str, Any]) -> Iterator[Subschema]:
    if isinstance(schema.get("allOf"), list):
        for index, one in enumerate(schema["allOf"]):
            yield Subschema("allOf", [one], index)
    for key in ALTERNATIVES:
        if isinstance(schema.get(key), list):
            yield Subschema(key, schema[key])
    if "$ref" in schema:
        yield Subschema("$ref", [schema["$ref"]])


def _choose_closer(
    outer: Properties, parts: list[tuple[Subschema, Properties]]
) -> Subschema | None:
    """Return the subschema that closes the object; None if the schema itself closes it."""
    declaring = [(part, properties) for part, properties in parts if properties.declared]
    for part, _ in declaring:
        if part.key in ALTERNATIVES:
            return part
    if len(declaring) == 1 and not outer.declared:
        ((part, properties),) = declaring
        names = outer.names.keys() | {name for _, other in parts for name in other.names}
        if part.key != "$ref" or names <= properties.names.keys():
            return part
    return None


def _strings(value: Any) -> list[str]:
    """Return the texts of a list or the keys of a dict."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | dict) else []
