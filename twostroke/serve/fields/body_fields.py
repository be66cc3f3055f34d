"""`decode_body`: a JSON body → the request's type, with the fields that other servers have.

Most requests have none of those, and are decoded once. In one that has, the fields of its type's
table (`foreign_fields.py`) are translated, and those that no table has are left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, get_args

import msgspec
from msgspec import Raw

from twostroke.errors import nearest, shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.foreign_fields import Fields
from twostroke.serve.fields.protocol import Body

_UNKNOWN = "Object contains unknown field"  # the beginning of msgspec's message
_NULL, _BRACE = b"null", ord("{")


def decode_body(
    body: bytes | bytearray, kind: type[Body], strict: bool = False
) -> tuple[Body, list[str]]:
    """The request, and the names of fields that were left out because they are unknown. `strict`:
    such a field is refused."""
    kind = kind.kind_of(body)
    try:
        return kind.decode(body), []
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
    unknown: list[str] = []
    fields = _known_fields(body, kind, "", unknown, strict or kind.STRICT)
    return kind.decode(msgspec.json.encode(fields)), unknown


def _known_fields(
    body: bytes | bytearray | Raw, kind: type[Body], where: str, unknown: list[str], strict: bool
) -> Fields:
    """An object's fields without the foreign ones, which are translated, and the unknown ones.
    `where`: the path to the object."""
    given = msgspec.json.decode(body, type=dict[str, Raw])
    types = _types(kind)
    fields: Fields = {}
    for name, value in given.items():
        if name in types:
            nested = types[name]
            if nested is not None and memoryview(value)[0] == _BRACE:
                fields[name] = _known_fields(value, nested, f"{where}{name}.", unknown, strict)
            elif memoryview(value) != _NULL:
                fields[name] = value
        elif name not in kind.FOREIGN:
            if strict:
                raise _refusal(f"{where}{name}", "" if where else nearest(name, tuple(types)))
            unknown.append(f"{where}{name}")
    for name, foreign in kind.FOREIGN.items():  # in the table's order
        if name in types or name not in given or memoryview(given[name]) == _NULL:
            continue
        try:
            value = msgspec.json.decode(given[name], type=foreign.type, strict=False)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{where}{name}: {error}", param=f"{where}{name}") from None
        foreign.read(fields, name, value)
    return fields


@cache
def _types(kind: type[Body]) -> dict[str, type[Body] | None]:
    """A type's fields as they are called in JSON, with the type of those that are objects with
    such fields themselves."""
    found: dict[str, type[Body] | None] = {}
    for field in msgspec.structs.fields(kind):
        kinds = (field.type, *get_args(field.type))
        bodies = [one for one in kinds if isinstance(one, type) and issubclass(one, Body)]
        found[field.encode_name] = bodies[0] if bodies else None
    return found


def with_nested(kinds: Iterable[type[Any]]) -> set[type[Body]]:
    """The types of bodies, and those of the objects in them that have such fields themselves."""
    found: set[type[Body]] = set()
    queue = [kind for kind in kinds if issubclass(kind, Body)]
    while queue:
        kind = queue.pop()
        if kind not in found:
            found.add(kind)
            queue += [one for one in _types(kind).values() if one is not None]
    return found


def _refusal(name: str, hint: str) -> ApiError:
    return ApiError(400, f"unknown field {shown(name)}{hint}", param=name, code="unknown_field")
