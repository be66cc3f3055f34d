"""`Body`: the base of all request types; the fields that all APIs share; and `decode_body`.

Usually a request body has only fields of its request type, and is decoded once. If a body has other
fields, `decode_body` looks them up in the request type's table of foreign fields (fields of other
servers, `foreign_fields.py`). It translates the fields in the table, and leaves out and reports the
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import msgspec
from msgspec import Meta, Raw

from twostroke.errors import did_you_mean, shown
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import Fields, ForeignTable

_UNKNOWN = "Object contains unknown field"  # the beginning of msgspec's message
_NULL, _BRACE = b"null", ord("{")

Name = Annotated[str, Meta(max_length=1024)]
StopText = Annotated[str, Meta(max_length=4096)]
Stops = Annotated[list[StopText], Meta(max_length=64)]
BadWord = Annotated[str, Meta(max_length=256)]
TokenIds = list[int]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    # Fields that may be large, and are not needed once the prompt and `SamplingParams` have been
    # made. `drop_large_fields` then releases their memory.
    LARGE_FIELDS: ClassVar[tuple[str, ...]] = ()
    # Require the header Content-Type: application/json. False for APIs some of whose clients do not
    # send it.
    REQUIRES_JSON_CONTENT_TYPE: ClassVar[bool] = True
    FOREIGN: ClassVar[ForeignTable] = {}  # the accepted fields of other servers
    # Refuse unknown fields even without `--strict-fields`: for requests that change the server.
    STRICT: ClassVar[bool] = False

    @classmethod
    def type_of(cls, body: bytes | bytearray) -> type[Body]:
        """Return the request type of a body. Override this if the type depends on the body."""
        return cls

    @classmethod
    def decode(cls, body: bytes | bytearray) -> Self:
        # Types are converted, as in vLLM: "0.7" is a number, "true" a boolean and 1.0 an integer.
        return msgspec.json.decode(body, type=cls, strict=False)

    def drop_large_fields(self) -> None:
        for name in self.LARGE_FIELDS:
            setattr(self, name, None)


class StructuredFields(Body, kw_only=True):
    """vLLM's `structured_outputs`. At most one of the first five fields may be set."""

    FOREIGN: ClassVar[ForeignTable] = foreign_fields.STRUCTURED

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # Objects may have only the properties that the JSON schema names.
    disable_additional_properties: bool | None = None


class EngineFields(Body, kw_only=True):
    """vLLM's fields for sampling and scheduling, accepted by all APIs."""

    # The large fields of this class, which subclasses include in their `LARGE_FIELDS`.
    LARGE_ENGINE_FIELDS: ClassVar[tuple[str, ...]] = (
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
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None  # -1: to the longest allowed
    truncation_side: Literal["left", "right"] | None = None  # the end that is cut off; default left
    structured_outputs: StructuredFields | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Name | None = None

    def engine_fields(self) -> dict[str, Any]:
        """Return these fields, without those that are None."""
        return {
            name: value
            for name in EngineFields.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class AccountFields(EngineFields, kw_only=True):
    """OpenAI's fields about accounts, storage and billing, which are accepted and ignored. Only
    `prompt_cache_key` has an effect."""

    user: Name | None = None
    store: bool | None = None
    metadata: Raw = None  # type: ignore[assignment]
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    # The name of a conversation. With several engines, the router prefers the engine that computed
    # the earlier requests of the conversation.
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    prompt_cache_options: Raw = None  # type: ignore[assignment]
    moderation: Raw = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        # A raw value refers to the whole body, and would keep it in memory.
        self.metadata = self.prompt_cache_options = self.moderation = None  # type: ignore[assignment]


def decode_body(
    body: bytes | bytearray, request_type: type[Body], strict: bool = False
) -> tuple[Body, list[str]]:
    """Return the request, and the names of unknown fields, which were left out. `strict`: raise
    `ApiError` for an unknown field."""
    request_type = request_type.type_of(body)
    try:
        return request_type.decode(body), []
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
    unknown: list[str] = []
    fields = _known_fields(body, request_type, "", unknown, strict or request_type.STRICT)
    return request_type.decode(msgspec.json.encode(fields)), unknown


def _known_fields(
    body: bytes | bytearray | Raw,
    request_type: type[Body],
    path: str,
    unknown: list[str],
    strict: bool,
) -> Fields:
    """Return the fields of a JSON object, with foreign fields translated and unknown fields left
    out. Add the names of unknown fields to `unknown`.

    `path`: the prefix of the object's field names in messages: empty for the body, or with a dot at
    the end, such as `structured_outputs.`. `strict`: refuse unknown fields.
    """
    sent = msgspec.json.decode(body, type=dict[str, Raw])
    types = _nested_types(request_type)
    fields: Fields = {}
    for name, value in sent.items():
        if name in types:
            nested = types[name]
            if nested is not None and memoryview(value)[0] == _BRACE:
                fields[name] = _known_fields(value, nested, f"{path}{name}.", unknown, strict)
            elif memoryview(value) != _NULL:
                fields[name] = value
        elif name not in request_type.FOREIGN:
            if strict:
                hint = "" if path else did_you_mean(name, tuple(types))
                raise _unknown_field(f"{path}{name}", hint)
            unknown.append(f"{path}{name}")
    # In the order of the table: if two fields have the same meaning, the first one counts.
    for name, foreign in request_type.FOREIGN.items():
        if name in types or name not in sent or memoryview(sent[name]) == _NULL:
            continue
        try:
            value = msgspec.json.decode(sent[name], type=foreign.type, strict=False)
        except msgspec.ValidationError as error:
            raise ApiError(400, f"{path}{name}: {error}", param=f"{path}{name}") from None
        foreign.translate_into(fields, name, value)
    return fields


@cache
def _nested_types(request_type: type[Body]) -> dict[str, type[Body] | None]:
    """Map the JSON name of each field to the field's type if it is a `Body`, else to None."""
    found: dict[str, type[Body] | None] = {}
    for field in msgspec.structs.fields(request_type):
        field_types = (field.type, *get_args(field.type))
        bodies = [each for each in field_types if isinstance(each, type) and issubclass(each, Body)]
        found[field.encode_name] = bodies[0] if bodies else None
    return found


def with_nested_types(types: Iterable[type[Any]]) -> set[type[Body]]:
    """Return the request types among `types`, and the `Body` types of their fields."""
    found: set[type[Body]] = set()
    queue = [request_type for request_type in types if issubclass(request_type, Body)]
    while queue:
        request_type = queue.pop()
        if request_type not in found:
            found.add(request_type)
            nested = _nested_types(request_type).values()
            queue += [field_type for field_type in nested if field_type is not None]
    return found


def _unknown_field(name: str, hint: str) -> ApiError:
    return ApiError(400, f"unknown field {shown(name)}{hint}", param=name, code="unknown_field")
