"""`decode_body`: a JSON body → the request's type, with the fields that other servers have.

Most requests have none of those, and are decoded once. In one that has, the fields of its type's
table (`foreign_fields.py`) are translated, and those that no table has are left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import msgspec
from msgspec import Meta, Raw

from twostroke.errors import nearest, shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import Fields, Table

_UNKNOWN = "Object contains unknown field"  # the beginning of msgspec's message
_NULL, _BRACE = b"null", ord("{")


Name = Annotated[str, Meta(max_length=1024)]


StopText = Annotated[str, Meta(max_length=4096)]


Stops = Annotated[list[StopText], Meta(max_length=64)]


BadWord = Annotated[str, Meta(max_length=256)]


TokenIds = list[int]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    # Fields that are dropped once the prompt and `SamplingParams` are made of them.
    INPUT: ClassVar[tuple[str, ...]] = ()
    # Whether it has to be declared as JSON; clients of some APIs do not.
    DECLARED: ClassVar[bool] = True
    FOREIGN: ClassVar[Table] = {}  # fields of other servers
    # An unknown field is always refused: the request acts on the server, and is to be understood.
    STRICT: ClassVar[bool] = False

    @classmethod
    def kind_of(cls, body: bytes | bytearray) -> type[Body]:
        """The type that this body has."""
        return cls

    @classmethod
    def decode(cls, body: bytes | bytearray) -> Self:
        # Not strict, as vLLM: "0.7" is a number, "true" a boolean and 1.0 a whole number.
        return msgspec.json.decode(body, type=cls, strict=False)

    def drop_input(self) -> None:
        for name in self.INPUT:
            setattr(self, name, None)


class StructuredFields(Body, kw_only=True):
    """vLLM's `structured_outputs`: one of the first five, or none and what `response_format` or a
    forced tool call asks for."""

    FOREIGN: ClassVar[Table] = foreign_fields.STRUCTURED

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None  # of a schema's objects


class EngineFields(Body, kw_only=True):
    """vLLM's fields of sampling and scheduling, which the requests of all APIs may have."""

    ENGINE_INPUT: ClassVar[tuple[str, ...]] = (
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
    )

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=1024)] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # which end is cut off; left
    structured_outputs: StructuredFields | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Name | None = None

    def engine_fields(self) -> dict[str, Any]:
        """These fields, those that are given."""
        return {
            name: value
            for name in EngineFields.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class IgnoredFields(EngineFields, kw_only=True):
    """OpenAI's fields about accounts, storage and billing: read, and (but for one) without effect
    here."""

    user: Name | None = None
    store: bool | None = None
    metadata: Raw = None  # type: ignore[assignment]
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None  # with several engines: the session, see route/router.py
    prompt_cache_retention: Name | None = None
    prompt_cache_options: Raw = None  # type: ignore[assignment]
    moderation: Raw = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # Each would keep the whole body; nothing has been made of them.
        self.metadata = self.prompt_cache_options = self.moderation = None  # type: ignore[assignment]


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
