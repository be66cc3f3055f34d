"""`Exchange`: one HTTP request and its answer, straight on ASGI.

A body is read in pieces (`bodies.py`); an answer goes out as one body or as a stream of writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from itertools import chain
from typing import Any, Protocol

from twostroke.serve.errors import ApiError, ClientGone
from twostroke.serve.pieces import PIECE_BYTES, json_pieces

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

DIRECT = "twostroke.direct"  # in the scope, where the server has it: `Direct`

JSON: Headers = ((b"content-type", b"application/json"),)
EVENTS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect tokens
)
CLOSE: Headers = ((b"connection", b"close"),)

WRITE_BYTES = 64 * 1024  # of an answer that are given to the connection at once
WHOLE_BYTES = 1024**2  # a longer answer is sent while it is made, its length not announced

# Of a body that is not wanted:
DISCARD_BYTES = 1024**2  # so much is read to keep the connection
LINGER_BYTES, LINGER_S = 64 * 1024**2, 1.0  # and so much to have the answer read
DISCARD_PAUSE_S = 0.01  # between pieces of some 100 KB: others need the processor more


class Direct(Protocol):
    """Writes more of a started stream at once, if it is ready to."""

    def ready(self) -> bool: ...

    def write(self, body: bytes) -> None: ...

    def close(self) -> None:
        """End the connection; what has not been read is lost."""


class Exchange:
    """`write_timeout_s`: how long a client may leave what is written to it unread."""

    def __init__(
        self, scope: Message, receive: Receive, send: Send, write_timeout_s: float = 60.0
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status = 0  # what was answered; 0: nothing yet
        self.key_number: int | None = None  # which of the server's keys was shown
        self._receive = receive
        self._send = send
        self._body_read = False
        self._write_timeout_s = write_timeout_s

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    async def receive_body(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether there is more."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_read = not message["more_body"]
        return message["body"], message["more_body"]

    @contextlib.contextmanager
    def watched(self, on_gone: Callable[[Exception], None]) -> Iterator[None]:
        """Tell at once if the client leaves meanwhile. The body must have been read."""
        watch = asyncio.get_running_loop().create_task(self._watch(on_gone))
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self, on_gone: Callable[[Exception], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone(ClientGone())

    # ── answering ───────────────────────────────────────────────────────────────────────────

    async def answer(self, status: int, body: bytes, headers: Headers = JSON) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, (*headers, length))
        last = max(0, len(body) - 1) // WRITE_BYTES * WRITE_BYTES
        for at in range(0, last, WRITE_BYTES):
            await self.write(body[at : at + WRITE_BYTES])
        await self.end(body[last:])

    async def answer_json(self, content: Any, headers: Headers = JSON) -> None:
        """Made in pieces, with the loop's other work in between."""
        pieces, begin, size = json_pieces(content), [], 0
        for piece in pieces:
            begin.append(piece)
            size += len(piece)
            if size > WHOLE_BYTES:
                break
            if size > PIECE_BYTES:
                await asyncio.sleep(0)
        else:
            await self.answer(200, b"".join(begin), headers)
            return
        await self._start(200, headers)
        for piece in chain(begin, pieces):
            await self.write(piece)
            await asyncio.sleep(0)
        await self.end()

    async def refuse(self, error: ApiError) -> None:
        """A client that is still sending when the connection is closed loses the answer with it:
        so what it sends is read first, and if that is too much, for a moment after."""
        length = self.header(b"content-length") or b"0"
        chunked = self.header(b"transfer-encoding") is not None
        short = not chunked and length.isdigit() and int(length) <= DISCARD_BYTES
        done = self._body_read or (short and await self._discard())
        if done:
            await self.answer(error.status, error.body(), (*JSON, *error.headers))
            return
        body = error.body()
        headers = (*JSON, *error.headers, *CLOSE, (b"content-length", str(len(body)).encode()))
        await self._start(error.status, headers)
        await self.write(body)
        await self._discard()
        await self.end()

    async def _discard(self) -> bool:
        """Whether the whole body has been read, and thrown away."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message["more_body"]:
                        return True
                    num_bytes += len(message["body"])
                    if num_bytes > DISCARD_BYTES:
                        await asyncio.sleep(DISCARD_PAUSE_S)
        return False

    async def start_events(self) -> None:
        await self._start(200, EVENTS)

    async def write(self, body: bytes) -> None:
        """More of a started stream. Waits while the client reads too slowly."""
        await self._put(body, True)

    @property
    def direct(self) -> Direct | None:
        """The way around `write`, while no `write` is under way; None where the server has none."""
        return self.scope.get(DIRECT)

    async def end(self, body: bytes = b"") -> None:
        await self._put(body, False)

    async def _put(self, body: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            if self.direct is not None:
                self.direct.close()
            raise ClientGone from None

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
