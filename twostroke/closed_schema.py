"""`close_objects`: makes a JSON schema reject properties that it does not name.

JSON schema allows properties that `properties` does not list, and a small model then generates
properties without end. `close_objects` therefore adds `additionalProperties: false` to each object
schema that has `properties` and says nothing about additional properties itself. This is called
closing the object. Several schemas may describe one object:

    {"allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": …}}]}

allows the properties of Base and b. Only one of these subschemas closes the object. The closing
subschema also lists the properties of the other subschemas, with the schema `true`, because the
other subschemas restrict the values of these properties. The other subschemas stay open. If
alternatives (`anyOf`, `oneOf`) describe an object, each alternative closes the object. The target
of a `$ref` is closed; if another subschema closes the object of the `$ref`, the `$ref` gets an open
copy of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

# The keys are pairs ("properties" or "patternProperties", name), in order of appearance. The values
# are unused: the dict serves as an ordered set.
Names = dict[tuple[str, str], None]

# Keys whose schemas describe values inside the object. A value is a schema or a list of schemas in
# `NESTED`, and a dict of schemas in `NESTED_BY_NAME`.
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
# A schema with one of these keys has its own rule for additional properties, so it is not closed.
ADDITIONAL_PROPERTY_KEYS: Final = {
    "additionalProperties",
    "unevaluatedProperties",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
}


@dataclass(frozen=True)
class Applicator:
    """A part of a schema that describes the same object as the schema: one member of `allOf`, all
    alternatives of `anyOf` or of `oneOf`, or a `$ref`."""

    key: str
    schemas: list[Any]  # the one member, the alternatives, or the reference
    index: int = 0  # the position of a member in `allOf`


@dataclass(frozen=True)
class Properties:
    """The names of an object's properties. `declared`: a schema has `properties`."""

    names: Names = field(default_factory=dict)
    declared: bool = False

    def __or__(self, other: Properties) -> Properties:
        return Properties(self.names | other.names, self.declared or other.declared)


def close_objects(schema: Any) -> Any:
    """Return the closed schema. Raises `RecursionError` if the schema is nested too deeply."""
    return _Closer(schema).close_root()


class _Closer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._properties: dict[int, Properties] = {}  # by the schema's id()
        self._rules_on_additional: dict[int, bool] = {}  # by the schema's id()
        self._copies: dict[str, Any] = {}  # open copies, by name in $defs
        self._copy_names: dict[str, str] = {}  # by the reference to the original

    def close_root(self) -> Any:
        closed = self._close(self._root, Properties())
        if self._copies:
            closed["$defs"] = closed.get("$defs", {}) | self._copies
        return closed

    def _close(self, schema: Any, others: Properties | None) -> Any:
        """Return the schema with closed objects.

        `others`: the properties that other schemas of the same object name. None if another schema
        closes this object; then only the objects inside it are closed.
        """
        if not isinstance(schema, dict):
            return schema
        new = {key: self._close_values(key, value) for key, value in schema.items()}
        applicators = [
            (applicator, self._properties_of(applicator)) for applicator in _applicators(schema)
        ]
        closer = None
        allowed = None if self._has_additional_rule(schema) else others
        if allowed is not None:
            allowed |= self._named_properties(schema)
            closer = _choose_closer(allowed, applicators)
            for applicator, properties in applicators:
                if applicator is not closer:
                    allowed |= properties
            if closer is None and allowed.declared:
                for key, name in allowed.names:
                    new.setdefault(key, {}).setdefault(name, True)
                new["additionalProperties"] = False
        for applicator, _ in applicators:
            inner = allowed if applicator is closer else None
            if closer is None and allowed is not None and not allowed.declared:
                # No schema of this object has `properties`, so this object is not closed. The
                # schemas inside the applicator are closed independently.
                inner = Properties()
            if applicator.key != "$ref":
                closed = [self._close(member, inner) for member in applicator.schemas]
                # Members of `allOf` are separate applicators: the first replaces the list.
                new[applicator.key] = (
                    [*new[applicator.key], *closed] if applicator.index else closed
                )
            elif inner is None:
                new["$ref"] = self._open_reference(schema["$ref"])
        return new

    def _close_values(self, key: str, value: Any) -> Any:
        """Close the schemas under a key that describes values inside the object."""
        if key in NESTED_BY_NAME and isinstance(value, dict):
            return {name: self._close(nested, Properties()) for name, nested in value.items()}
        if key in NESTED:
            if isinstance(value, list):
                return [self._close(nested, Properties()) for nested in value]
            return self._close(value, Properties())
        return value

    # ── the properties that a schema names ──────────────────────────────────────────────────

    def _named_properties(self, schema: dict[str, Any]) -> Properties:
        """Return the properties that a schema names, without those of its applicators."""
        names: Names = {}
        for key in ("properties", "patternProperties"):
            names |= {(key, name): None for name in _strings(schema.get(key))}
        names |= {("properties", name): None for name in _strings(schema.get("required"))}
        return Properties(names, isinstance(schema.get("properties"), dict))

    def _properties_of(self, applicator: Applicator) -> Properties:
        properties = Properties()
        for member in applicator.schemas:
            schema = self._target(member) if applicator.key == "$ref" else member
            properties |= self._all_properties(schema)
        return properties

    def _all_properties(self, schema: Any) -> Properties:
        """Return the properties that a schema and its applicators name."""
        if not isinstance(schema, dict):
            return Properties()
        if id(schema) not in self._properties:
            self._properties[id(schema)] = Properties()  # ends the recursion of a recursive schema
            properties = self._named_properties(schema)
            for applicator in _applicators(schema):
                properties |= self._properties_of(applicator)
            self._properties[id(schema)] = properties
        return self._properties[id(schema)]

    def _has_additional_rule(self, schema: Any) -> bool:
        """Return whether a schema, or an applicator that always applies, has a rule for additional
        properties."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._rules_on_additional:
            # This entry ends the recursion of a recursive schema.
            self._rules_on_additional[id(schema)] = False
            has_key = bool(ADDITIONAL_PROPERTY_KEYS & schema.keys())
            self._rules_on_additional[id(schema)] = has_key or self._inherits_rule(schema)
        return self._rules_on_additional[id(schema)]

    def _inherits_rule(self, schema: dict[str, Any]) -> bool:
        """Return whether the target of `$ref` or a member of `allOf` has such a rule. A target
        outside of the root schema counts as having one."""
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            if target is None or self._has_additional_rule(target):
                return True
        members = [found.schemas[0] for found in _applicators(schema) if found.key == "allOf"]
        return any(self._has_additional_rule(member) for member in members)

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
        """Return a reference to an open copy of the reference's target, in `$defs`."""
        target = self._target(reference)
        if not isinstance(target, dict):
            return reference
        if reference not in self._copy_names:
            number = len(self._copies)
            while (name := f"open_{number}") in self._root.get("$defs", {}) | self._copies:
                number += 1
            self._copy_names[reference] = name
            self._copies[name] = {}  # reserves the name during the recursion
            self._copies[name] = self._close(target, None)
        return f"#/$defs/{self._copy_names[reference]}"


def _applicators(schema: dict[str, Any]) -> Iterator[Applicator]:
    if isinstance(schema.get("allOf"), list):
        for index, member in enumerate(schema["allOf"]):
            yield Applicator("allOf", [member], index)
    for key in ALTERNATIVES:
        if isinstance(schema.get(key), list):
            yield Applicator(key, schema[key])
    if "$ref" in schema:
        yield Applicator("$ref", [schema["$ref"]])


def _choose_closer(
    allowed: Properties, applicators: list[tuple[Applicator, Properties]]
) -> Applicator | None:
    """Return the applicator that closes the object; None if the schema itself closes it.

    `allowed`: the properties that are named outside of the applicators.
    """
    declaring = [found for found in applicators if found[1].declared]
    for applicator, _ in declaring:
        if applicator.key in ALTERNATIVES:
            return applicator
    if len(declaring) == 1 and not allowed.declared:
        ((applicator, properties),) = declaring
        names = allowed.names.keys() | {name for _, other in applicators for name in other.names}
        # The target of a `$ref` may have other users, so it closes the object only if nothing has
        # to be added to its properties.
        if applicator.key != "$ref" or names <= properties.names.keys():
            return applicator
    return None


def _strings(value: Any) -> list[str]:
    """Return the strings of a list, or the string keys of a dict."""
    if not isinstance(value, list | dict):
        return []
    return [member for member in value if isinstance(member, str)]
