"""`HttpRequest`: one HTTP request and its response, written directly on ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import parse_qsl

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from twostroke.observe.record import RequestRecord
from twostroke.serve.error_responses import ApiError, ClientGone
from twostroke.serve.fields.response_json import CHUNK_BYTES, iter_json

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]

DIRECT = "twostroke.direct"  # in the scope, under uvicorn: `DirectWriter`

JSON: Headers = ((b"content-type", b"application/json"),)
SSE: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer the stream
)
NDJSON: Headers = ((b"content-type", b"application/x-ndjson"), *SSE[1:])
WARNING = b"x-twostroke-warning"
MAX_NAMES, MAX_NAME_CHARS = 8, 64  # in one warning
CLOSE: Headers = ((b"connection", b"close"),)

WRITE_BYTES = 64 * 1024  # the largest single write of a response
WHOLE_BYTES = 1024**2  # a longer response is sent while it is encoded, without Content-Length

# Limits for reading a body that the server does not need (`respond_error`):
DISCARD_BYTES = 1024**2  # up to this size the connection stays open for the next request
LINGER_BYTES, LINGER_S = 64 * 1024**2, 2.0  # then the connection is closed
DISCARD_STEP_BYTES, DISCARD_PAUSE_S = 256 * 1024, 0.01  # pauses let other requests run


@dataclass(frozen=True, slots=True)
class IgnoredParts:
    """A warning: parts of a request that have no effect, with the names that the client used."""

    message: str
    names: Sequence[str]

    def __str__(self) -> str:
        """The text of the header: ASCII of a limited length."""
        names = [
            ascii(name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…")
            for name in self.names[:MAX_NAMES]
        ]
        more = len(self.names) - len(names)
        return f"{self.message}: {', '.join(names)}" + (f" and {more} more" if more else "")


class HttpRequest:
    """One HTTP request. Its response is one body or a stream of writes. `bodies.py` reads the body
    of the request.

    `write_timeout_s`: the time that the client has to read written bytes."""

    def __init__(
        self, scope: Message, receive: Receive, send: Send, write_timeout_s: float = 60.0
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.path_params: dict[str, str] = {}  # the values of {name} in the route's path
        self.status = 0  # of the response; 0: no response has begun
        self.late_error: ApiError | None = None  # an error after the response had begun
        self.response_id = ""  # the id in the JSON of the response, when it is known
        self.key_number: int | None = None  # the number of the client's API key
        self.is_admin = False  # the client may change the server and see requests of every key
        self.more_headers: Headers = ()  # headers of every response to this request
        self.warnings: list[str] = []
        self._receive = receive
        self._send = send
        self._body_read = False
        self._write_timeout_s = write_timeout_s

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    def may_see(self, record: RequestRecord) -> bool:
        """Return whether the client may see the request of this record."""
        return self.is_admin or record.owner == self.key_number

    @property
    def address(self) -> str:
        """The IP address of the client; empty for a Unix socket."""
        client = self.scope.get("client")
        return client[0] if client else ""

    def query(self) -> dict[str, str]:
        """Return the query parameters. If a name is repeated, the last value counts."""
        try:
            pairs = parse_qsl(
                self.scope.get("query_string", b"").decode("ascii"), max_num_fields=64
            )
        except ValueError as error:
            raise ApiError(400, f"the query cannot be read: {error}") from None
        return dict(pairs)

    def warn(self, warning: IgnoredParts) -> None:
        """Add a response header with the names of the ignored parts."""
        self.warnings.append(warning.message)
        self.more_headers += ((WARNING, str(warning).encode()),)

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    async def receive_body(self) -> tuple[bytes, bool]:
        """Return the next chunk of the body, and whether more chunks follow."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_read = not message["more_body"]
        return message["body"], message["more_body"]

    @contextlib.contextmanager
    def watch_disconnect(self, on_gone: Callable[[Exception], None]) -> Iterator[None]:
        """Call `on_gone` as soon as the client disconnects. The body must have been read."""
        watch = asyncio.get_running_loop().create_task(self._watch(on_gone))
        try:
            yield
        finally:
            watch.cancel()

    @contextlib.contextmanager
    def ended_by_disconnect(self) -> Iterator[None]:
        """Raise `ClientGone` inside the `with` block as soon as the client disconnects."""
        task, gone = asyncio.current_task(), False
        assert task is not None

        def cancel(_: Exception) -> None:
            nonlocal gone
            gone = True
            task.cancel()

        try:
            with self.watch_disconnect(cancel):
                yield
        except asyncio.CancelledError:
            if gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        self.check_connected()

    def check_connected(self) -> None:
        """Raise `ClientGone` if the client is known to have disconnected."""
        if self.direct is not None and self.direct.disconnected:
            raise ClientGone

    async def _watch(self, on_gone: Callable[[Exception], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_gone(ClientGone())

    # ── responding ───────────────────────────────────────────────────────────────────────────

    async def respond(self, status: int, body: bytes, headers: Headers = JSON) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, (*headers, length))
        last = max(0, len(body) - 1) // WRITE_BYTES * WRITE_BYTES
        for at in range(0, last, WRITE_BYTES):
            await self.write(body[at : at + WRITE_BYTES])
        await self.finish(body[last:])

    async def respond_json(self, content: Any, headers: Headers = JSON) -> None:
        """Encode and send the content in chunks, so that other tasks run in between."""
        chunks, begin, size = iter_json(content), [], 0
        for chunk in chunks:
            begin.append(chunk)
            size += len(chunk)
            if size > WHOLE_BYTES:
                break
            if size > CHUNK_BYTES:
                await asyncio.sleep(0)
        else:
            await self.respond(200, b"".join(begin), headers)
            return
        await self._start(200, headers)
        for chunk in chain(begin, chunks):
            await self.write(chunk)
            await asyncio.sleep(0)
        await self.finish()

    async def respond_error(self, error: ApiError, body: bytes) -> None:
        """Send an error response. `body`: the error in the JSON format of the route's API.

        A client that is still sending when the connection closes loses the response. So the rest of
        the request's body is read before the response. If the body is very long, some of it is read
        after the response instead."""
        length = self.header(b"content-length") or b"0"
        chunked = self.header(b"transfer-encoding") is not None
        short = not chunked and length.isdigit() and int(length) <= DISCARD_BYTES
        done = self._body_read or (short and await self._discard())
        if done:
            await self.respond(error.status, body, (*JSON, *error.headers))
            return
        headers = (*JSON, *error.headers, *CLOSE, (b"content-length", str(len(body)).encode()))
        await self._start(error.status, headers)
        await self.write(body)
        await self._discard()
        await self.finish()

    async def _discard(self) -> bool:
        """Read and drop the body. Return whether the whole body has been read."""
        num_bytes, pause_at = 0, DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < LINGER_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message["more_body"]:
                        return True
                    num_bytes += len(message["body"])
                    if num_bytes > pause_at:
                        pause_at = num_bytes + DISCARD_STEP_BYTES
                        await asyncio.sleep(DISCARD_PAUSE_S)
        return False

    async def start_stream(self, headers: Headers = SSE) -> None:
        await self._start(200, headers)

    async def write(self, body: bytes) -> None:
        """Send the next bytes of a stream. Wait while the client reads too slowly."""
        await self._put(body, True)

    @property
    def direct(self) -> DirectWriter | None:
        """The direct writer; None without uvicorn. Use it only while no `write` is in progress."""
        return self.scope.get(DIRECT)

    async def finish(self, body: bytes = b"") -> None:
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
        headers = (*headers, *self.more_headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class DirectWriter:
    """Writes the next bytes of a response at once, without the task switch of `await send()`."""

    __slots__ = ("_cycle", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._write = cycle, cycle.transport.write

    @property
    def disconnected(self) -> bool:
        return self._cycle.disconnected

    def ready(self) -> bool:
        """Return False if the client reads too slowly or has disconnected."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, body: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(body), body))  # uvicorn has begun a chunked body

    def close(self) -> None:
        """Abort the connection; unread bytes are lost."""
        self._cycle.transport.abort()
