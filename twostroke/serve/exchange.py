"""`Exchange`: one HTTP request and its answer, straight on ASGI.

A body is read in pieces (`bodies.py`); an answer goes out as one body or as a stream of writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

import msgspec

from twostroke.serve.errors import ApiError, ClientGone

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

# Of a body that is not wanted:
DISCARD_BYTES = 1024**2  # so much is read to keep the connection
LINGER_BYTES, LINGER_S = 64 * 1024**2, 1.0  # and so much to have the answer read
DISCARD_PAUSE_S = 0.01  # between pieces of some 100 KB: others need the processor more


class Direct(Protocol):
    """Writes more of a started stream at once, if it is ready to."""

    def ready(self) -> bool: ...

    def write(self, body: bytes) -> None: ...


class Exchange:
    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status = 0  # what was answered; 0: nothing yet
        self.key_number: int | None = None  # which of the server's keys was shown
        self._receive = receive
        self._send = send
        self._body_read = False

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
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer_json(self, content: Any, headers: Headers = JSON) -> None:
        await self.answer(200, msgspec.json.encode(content), headers)

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
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    @property
    def direct(self) -> Direct | None:
        """The way around `write`, while no `write` is under way; None where the server has none."""
        return self.scope.get(DIRECT)

    async def end(self, body: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
