"""JSON that is too long to be made at once, made in pieces while others get their turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

import msgspec

PIECE_BYTES = 16 * 1024  # about a millisecond's work


class Each:
    """A JSON list whose items are made when they are written."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


def _listed(value: Any) -> Any:
    if isinstance(value, Each):
        return list(value.items)
    if isinstance(value, GeneratorType):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} is no JSON")


encode_json = msgspec.json.Encoder(enc_hook=_listed).encode


def json_pieces(value: Any, before: bytes = b"", after: bytes = b"") -> Iterator[bytes]:
    """The encoding of a value in pieces of about `PIECE_BYTES`. Objects are written field by field,
    lists of them and generators item by item; what is in an `Each` is small, an item at once."""
    piece = bytearray(before)
    for part in _parts(value):
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece) + after


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        opening = b"{"
        for name, field in value.items():
            yield opening + encode_json(str(name)) + b":"
            yield from _parts(field)
            opening = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, Each):
        yield from _list((encode_json(item),) for item in value.items)
    elif isinstance(value, GeneratorType) or _has_objects(value):
        yield from _list(map(_parts, value))
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
