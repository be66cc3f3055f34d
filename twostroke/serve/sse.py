"""JSON and server-sent events as bytes: small values at once, long ones in chunks, so that the
event loop's other work gets its turn in between."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from types import GeneratorType
from typing import Any, cast

import msgspec

from twostroke.serve.error_responses import ApiError

CHUNK_BYTES = 16 * 1024  # about a millisecond's work
DONE = b"data: [DONE]\n\n"

Encoded = bytes | Iterator[bytes]  # an iterator: too long to be encoded at once


class LazyList:
    """A JSON list whose items are made when they are encoded."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def _listed(value: Any) -> Any:
    if isinstance(value, LazyList):
        return list(value.items)
    if isinstance(value, GeneratorType):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is no JSON")


encode_json = msgspec.json.Encoder(enc_hook=_listed).encode


def iter_json(value: Any, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """The encoding of a value in chunks of about `CHUNK_BYTES`. Objects are encoded field by field,
    lists of them and generators item by item; an item of a `LazyList` is small: at once."""
    chunk = bytearray(before)
    for token in _tokens(value):
        chunk += token
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
    yield bytes(chunk) + after


def _tokens(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        opening = b"{"
        for name, field in value.items():
            yield opening + encode_json(str(name)) + b":"
            yield from _tokens(field)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, LazyList):
        yield from _list((encode_json(item),) for item in value.items)
    elif isinstance(value, GeneratorType) or _has_objects(value):
        yield from _list(map(_tokens, value))
    else:
        yield encode_json(value)


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _list(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    opening = b"["
    for item in items:
        yield opening
        yield from item
        opening = b","
    yield b"]" if opening == b"," else b"[]"


# ── events ──────────────────────────────────────────────────────────────────────────────────────


def event(content: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode_json(content) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def long_event(content: Any, name: str | None = None) -> Iterator[bytes]:
    """`event`, in chunks."""
    begin = b"" if name is None else f"event: {name}\n".encode()
    return iter_json(content, begin + b"data: ", b"\n\n")


def error_event(error: ApiError) -> bytes:
    return event({"error": error.content()})


def concat(events: Sequence[Encoded]) -> Encoded:
    if all(isinstance(one, bytes) for one in events):
        return b"".join(cast(Sequence[bytes], events))
    return chain.from_iterable((one,) if isinstance(one, bytes) else one for one in events)


class TextEventTemplate:
    """`encode(text)` is `plain(text)`, only faster: the bytes before and after the text are cut
    out of the plain encoding once per stream, and only the text is encoded per token."""

    __slots__ = ("_after", "_before")

    def __init__(self, plain: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        self._before, self._after = plain(mark).split(f'"{mark}"'.encode())

    def encode(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after
