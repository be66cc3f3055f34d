"""Server-sent events: how outputs become bytes, and the loop that writes them.

An event whose only news is a text is written from two constant halves, cut once per stream out of
the plain encoding of the same event; only the text is encoded per token.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, cast

from twostroke.outputs import RequestOutput
from twostroke.serve.errors import ApiError, ClientGone, as_api_error
from twostroke.serve.exchange import Exchange
from twostroke.serve.feed import Feed, Written
from twostroke.serve.pieces import encode_json, json_pieces

DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode_json(content) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def long_event(content: Any, name: str | None = None) -> Iterator[bytes]:
    """`event`, in pieces."""
    begin = b"" if name is None else f"event: {name}\n".encode()
    return json_pieces(content, begin + b"data: ", b"\n\n")


def error_event(error: ApiError) -> bytes:
    return event({"error": error.content()})


def joined(parts: Sequence[Written]) -> Written:
    if all(isinstance(part, bytes) for part in parts):
        return b"".join(cast(Sequence[bytes], parts))
    return chain.from_iterable((part,) if isinstance(part, bytes) else part for part in parts)


class TextEvents:
    """`write(text)` is `plain(text)`, only faster."""

    __slots__ = ("_after", "_before")

    def __init__(self, plain: Callable[[str], bytes]) -> None:
        mark = secrets.token_hex(16)
        self._before, self._after = plain(mark).split(f'"{mark}"'.encode())

    def write(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after


class EventWriter(Protocol):
    """One stream's state: outputs in, bytes of whole events out."""

    def write(self, prompt_index: int, output: RequestOutput) -> Written: ...

    def end(self) -> Written: ...

    def fail(self, error: ApiError) -> bytes: ...


async def write_stream(exchange: Exchange, feed: Feed, writer: EventWriter) -> None:
    """Until the last event is out. Before the first output a failure is still an HTTP status."""
    try:
        while ready := await feed.next():
            if not exchange.status:
                await exchange.start_events()
            await _write(exchange, ready)
            feed.direct = exchange.direct
        last = writer.end()
        if isinstance(last, bytes):
            await exchange.end(last)
        else:
            await _write(exchange, [last])
            await exchange.end()
    except ClientGone:
        raise
    except Exception as error:
        if not exchange.status:
            raise
        await exchange.end(writer.fail(as_api_error(error)))


async def _write(exchange: Exchange, ready: list[Written]) -> None:
    """Small ones together; long ones piece by piece, with the loop's other work in between."""
    small: list[bytes] = []
    for written in ready:
        if isinstance(written, bytes):
            small.append(written)
            continue
        if small:
            await exchange.write(b"".join(small))
            small.clear()
        for piece in written:
            await exchange.write(piece)
            await asyncio.sleep(0)
    if small:
        await exchange.write(b"".join(small))
