"""One HTTP connection: uvicorn's protocol, with limits that the ASGI application cannot enforce.

    bytes ──▶ `HttpConnection` cuts pieces of at most one message
          ──▶ `ParseScheduler` gives each connection a piece in turn
          ──▶ `LimitedProtocol` counts and parses a piece ──▶ uvicorn starts the application

A piece never crosses the end of a message (a request with its body), and no piece is parsed while a
response is being written. So the server works on one request of a connection at a time, even if the
client pipelines requests.

Reading continues while a response is being written, because only a read shows that the client has
disconnected. A client that closes its sending side counts as disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twostroke.log_lines import WORK, RateLimitedLog
from twostroke.serve.error_responses import ApiError, unavailable
from twostroke.serve.http.http_request import DIRECT, DISCARD_BYTES, LINGER_S, DirectWriter
from twostroke.serve.settings import ServeSettings

READ_BYTES = 16 * 1024  # the largest read from a connection
PIECE_BYTES = 4 * 1024  # the largest piece of a head or a chunked body: up to about 1,000 lines
TURN_S = 0.004  # the maximum time for parsing in one iteration of the event loop
MAX_HEADER_LINES = 256
CHUNK_OVERHEAD_BYTES = 16 * 1024  # chunk headers and trailers may exceed the data by this
MAX_PIPELINED = 8  # consecutive requests that a client may send before it reads a response
UNREAD_BODY_BYTES = 32 * 1024  # body bytes that wait for the application, before parsing pauses
END_OF_HEAD = b"\r\n\r\n"  # also ends a chunked body

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
MAX_CONNECTIONS = 65536  # if the limit of open files allows so many
SPARE_FILES = 16  # file descriptors kept free for other files


class ParseScheduler:
    """Parses one piece of each connection in turn.

    New bytes wait for one iteration of the event loop, in which all sockets are read again. So a
    request whose client closes the connection at once is dropped before it is parsed."""

    def __init__(self) -> None:
        self._new: list[HttpConnection] = []
        self._waiting: deque[HttpConnection] = deque()
        self._scheduled = False

    def add(self, connection: HttpConnection) -> None:
        self._new.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if (self._new or self._waiting) and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        until = monotonic() + TURN_S
        try:
            for _ in range(len(self._waiting)):
                connection = self._waiting.popleft()
                if connection.parse_piece():
                    self._waiting.append(connection)
                if monotonic() > until:
                    break
        finally:  # an error of one connection must not stop the others
            self._waiting += self._new
            self._new.clear()
            self._schedule()


class HttpConnection(asyncio.BufferedProtocol):
    """A connection: collects bytes and cuts them into pieces for the parser."""

    protocol: ClassVar[type[LimitedProtocol]]
    parse_scheduler: ClassVar[ParseScheduler]
    buffer: ClassVar[memoryview]  # shared: in use only between `get_buffer` and `buffer_updated`

    def __init__(self, **arguments: Any) -> None:
        self._http = self.protocol(**arguments)
        self._unparsed = bytearray()
        self._tail = b""  # the end of the last piece, which may be the beginning of `END_OF_HEAD`
        self._queued = self._paused = False
        self._ignoring = False  # drop all further bytes
        self._ignored_bytes = 0
        self._pipelined = 0  # consecutive messages followed by bytes of the next message
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._http.connection_made(transport)
        self._http.flow = Flow(transport, self._resume)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._ignoring:
            self._ignored_bytes += nbytes
            if self._ignored_bytes > DISCARD_BYTES:
                self._transport.abort()
            return
        self._unparsed += self.buffer[:nbytes]
        if self._http.responding():
            if len(self._unparsed) > self._http.max_head_bytes:
                self._close_after_response()
            return
        if len(self._unparsed) > READ_BYTES:
            self._pause()
        self._enqueue()

    def parse_piece(self) -> bool:
        """Parse the next piece, if the parser is free. Return whether there is more to parse."""
        http = self._http
        if self._transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed and not http.busy():
            size = self._next_size()
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            num_messages = http.num_messages
            http.data_received(piece)
            if http.num_messages > num_messages:
                self._pipelined = self._pipelined + 1 if self._unparsed else 0
                if self._pipelined > MAX_PIPELINED:
                    self._close_after_response()
        self._queued = bool(self._unparsed) and not http.busy()
        if http.responding() or not (self._unparsed or http.flow.read_paused):
            self._unpause()
        return self._queued

    def _next_size(self) -> int:
        """Return the size of the next piece, which must not cross the end of a message."""
        if self._http.body_left:
            return min(len(self._unparsed), self._http.body_left)
        seen = self._tail + self._unparsed[:PIECE_BYTES]
        end = seen.find(END_OF_HEAD)
        if end < 0:
            size = min(len(self._unparsed), PIECE_BYTES)
            self._tail = bytes(seen[-3:])
            return size
        size, self._tail = end + len(END_OF_HEAD) - len(self._tail), b""
        return size

    def _close_after_response(self) -> None:
        """Drop the unparsed requests, and close the connection after the current response."""
        self._ignoring = True
        self._unparsed.clear()
        if self._http.responding():
            self._http.cycle.keep_alive = False
        else:
            self._http.close()

    def _resume(self) -> None:
        """Continue parsing: the application has read body bytes, or has responded."""
        if self._unparsed:
            self._enqueue()
        else:
            self._unpause()

    def _enqueue(self) -> None:
        if not self._queued:
            self._queued = True
            self.parse_scheduler.add(self)

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _unpause(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()


class Flow(FlowControl):
    """uvicorn's flow control, which here pauses parsing. `HttpConnection` pauses reading."""

    def __init__(self, transport: asyncio.Transport, resume: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resume = resume

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        self.read_paused = False
        self._resume()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on

    - the number of connections, so that file descriptors are left for other files,
    - the size, the lines and the time of a head,
    - the chunk headers and trailers of a body. (Trailers are dropped.)

    The application gets only requests with a complete head."""

    max_connections: ClassVar[int]
    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]
    write_timeout_s: ClassVar[float]
    log: ClassVar[RateLimitedLog]

    num_messages = 0  # complete requests so far
    body_left = 0  # unparsed bytes of a body with Content-Length
    _refused = False
    _head_timer: asyncio.TimerHandle | None = None
    _abort_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        self._start_head_timer()
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable(f"{self.max_connections} connections are open already"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def responding(self) -> bool:
        """Return whether the request is complete and its response is not."""
        cycle = self.cycle
        return cycle is not None and not (cycle.more_body or cycle.response_complete)

    def busy(self) -> bool:
        """Return whether parsing must wait."""
        return self.flow.read_paused or self.responding()

    def data_received(self, data: bytes) -> None:
        """Parse a piece. It does not cross the end of a head or of a message."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._start_head_timer()
            if self._head_bytes > self.max_head_bytes:
                self._refuse(head_too_large(self.max_head_bytes))
                return
        else:
            self._wire_bytes += len(data)
            self.body_left -= min(self.body_left, len(data))
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._header_lines > MAX_HEADER_LINES:
                self._refuse(too_many_headers())
            return
        overhead = self._wire_bytes - self._body_bytes
        if overhead > CHUNK_OVERHEAD_BYTES + self._body_bytes:
            self._refuse(
                ApiError(400, "the body has more bytes of chunk headers and trailers than of data")
            )
        elif self.cycle.response_complete and self._wire_bytes > DISCARD_BYTES:
            self.transport.abort()

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the server supports only HTTP/1.1 and ignores the upgrade
        except httptools.HttpParserError:
            if not self._refused:
                self._refuse(ApiError(400, "this is not an HTTP request"))

    # ── callbacks of the parser ─────────────────────────────────────────────────────────────────

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer
        self._header_lines += 1
        if self._header_lines <= MAX_HEADER_LINES:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timers()
        if self._header_lines > MAX_HEADER_LINES:
            self._refuse(too_many_headers())
            return
        super().on_headers_complete()
        self.scope[DIRECT] = DirectWriter(self.cycle)  # type: ignore[literal-required]
        names = dict(self.headers)
        if b"transfer-encoding" not in names:
            self.body_left = int(names.get(b"content-length", b"0"))

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        super().on_body(body)
        if len(self.cycle.body) > UNREAD_BODY_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._refused:
            return
        super().on_message_complete()
        self.num_messages += 1
        self._cancel_timers()
        self._expect_head()
        if self.cycle.response_complete:
            self._start_keep_alive_timer()  # the bytes of the body have cancelled the timer

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later(self.write_timeout_s)
        elif not self._in_head:
            # The rest of the body is dropped. The client has some time to read the response.
            self._abort_later(LINGER_S)

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later(self.write_timeout_s)

    # ── limits ──────────────────────────────────────────────────────────────────────────────────

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = self._header_lines = self._wire_bytes = self._body_bytes = 0

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def _start_keep_alive_timer(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._abort_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._abort_timer = None

    def close(self) -> None:
        """Close when the client has read the written bytes, or after `write_timeout_s`."""
        if not self.transport.is_closing():
            self.transport.close()
            self._abort_later(self.write_timeout_s)

    def _abort_later(self, seconds: float) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        self._abort_timer = self.loop.call_later(seconds, self.transport.abort)

    def _head_timed_out(self) -> None:
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"no headers arrived within {self.head_timeout_s:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Send an error response and close. If a response has begun, abort the connection."""
        self._refused = True
        self.log.log(logging.INFO, "%d before a route was found: %s", error.status, error.message)
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not self._in_head:
            self.transport.abort()
            return
        body = error.body()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        head %= error.status, _REASONS[error.status], len(body)
        head += b"".join([b"%b: %b\r\n" % header for header in error.headers])
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.close()


def head_too_large(max_bytes: int) -> ApiError:
    return ApiError(431, f"the request line and headers have more than {max_bytes} bytes")


def too_many_headers() -> ApiError:
    return ApiError(431, f"the request has more than {MAX_HEADER_LINES} headers")


def connection_type(settings: ServeSettings) -> type[HttpConnection]:
    """Return the protocol class that uvicorn instantiates for each connection."""
    limits: dict[str, Any] = {
        "max_connections": settings.max_connections or _files_left(),
        "max_head_bytes": settings.max_header_bytes,
        "head_timeout_s": settings.head_timeout_s,
        "write_timeout_s": settings.write_timeout_s,
        "log": RateLimitedLog(WORK),
    }
    shared: dict[str, Any] = {
        "protocol": type("LimitedProtocol", (LimitedProtocol,), limits),
        "parse_scheduler": ParseScheduler(),
        "buffer": memoryview(bytearray(READ_BYTES)),
    }
    return type("Connection", (HttpConnection,), shared)


def _files_left() -> int:
    """Return the number of connections that this process can hold open."""
    with contextlib.suppress(ImportError, OSError):
        import resource  # not available on every system

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit >= 0:
            left = limit - len(os.listdir("/dev/fd")) - SPARE_FILES
            return min(MAX_CONNECTIONS, max(1, left))
    return MAX_CONNECTIONS
