"""Server-sent events: how outputs become bytes, and the loop that writes them.

An event whose only news is a text is written from two constant halves, cut once per stream out of
the plain encoding of the same event; only the text is encoded per token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from twostroke.outputs import RequestOutput
from twostroke.serve.errors import ApiError, ClientGone, as_api_error
from twostroke.serve.exchange import Exchange
from twostroke.serve.feed import Feed

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(content: Any, name: str | None = None) -> bytes:
    data = b"data: " + encode_json(content) + b"\n\n"
    return data if name is None else f"event: {name}\n".encode() + data


def error_event(error: ApiError) -> bytes:
    return event({"error": error.content()})


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

    def write(self, prompt_index: int, output: RequestOutput) -> bytes: ...

    def end(self) -> bytes: ...

    def fail(self, error: ApiError) -> bytes: ...


async def write_stream(exchange: Exchange, feed: Feed, writer: EventWriter) -> None:
    """Until the last event is out. Before the first output a failure is still an HTTP status."""
    write, direct = writer.write, exchange.direct

    def tell_now(index: int, output: RequestOutput) -> bool:
        assert direct is not None
        if not direct.ready():
            return False
        if body := write(index, output):
            direct.write(body)
        return True

    try:
        while batch := await feed.batch():
            if not exchange.status:
                await exchange.start_events()
            if body := b"".join([write(index, output) for index, output in batch]):
                await exchange.write(body)
            feed.tell_now = None if direct is None else tell_now
        await exchange.end(writer.end())
    except ClientGone:
        raise
    except Exception as error:
        if not exchange.status:
            raise
        await exchange.end(writer.fail(as_api_error(error)))
