"""uvicorn's HTTP protocol with what an application cannot do from above it.

A bound on the connections, so that files can still be opened for other things. One on the
request's head, its size and the time it may take: the application sees a request only once its
headers are complete. And a way to write more of a started answer at once, without
the turn of the event loop that `await send(…)` costs a task: `scope[DIRECT]`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from twostroke.serve.errors import ApiError, unavailable
from twostroke.serve.exchange import DIRECT
from twostroke.serve.settings import ServeSettings

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
MAX_CONNECTIONS = 65536  # where the system allows so many
SPARE_FILES = 16  # of those a process may open, besides what it has open at its start


class BoundedProtocol(HttpToolsProtocol):
    max_connections: ClassVar[int]
    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._patience = self.loop.call_later(self.head_timeout_s, self._head_timed_out)
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable(f"{self.max_connections} connections are open already"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._patience.cancel()
        self._head_bytes = 0
        self._in_head = True
        self._patience = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._patience.cancel()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[DIRECT] = DirectWriter(self.cycle)  # type: ignore[literal-required]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self._refuse(head_too_large(self.max_head_bytes))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not an HTTP request"))

    def _head_timed_out(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self._refuse(ApiError(408, f"no headers arrived within {self.head_timeout_s:g} s"))

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        head %= error.status, _REASONS[error.status], len(body)
        head += b"".join([b"%b: %b\r\n" % one for one in error.headers])
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()


class DirectWriter:
    """More of a started answer, now."""

    __slots__ = ("_cycle", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._write = cycle, cycle.transport.write

    def ready(self) -> bool:
        """Not if the client reads too slowly, or has gone."""
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, body: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(body), body))  # uvicorn has announced it as chunked

    def close(self) -> None:
        self._cycle.transport.abort()


def head_too_large(max_bytes: int) -> ApiError:
    return ApiError(431, f"the request line and headers have more than {max_bytes} bytes")


def bounded_protocol(settings: ServeSettings) -> type[BoundedProtocol]:
    limits: dict[str, Any] = {
        "max_connections": settings.max_connections or _files_left(),
        "max_head_bytes": settings.max_header_bytes,
        "head_timeout_s": settings.head_timeout_s,
    }
    return type("BoundedProtocol", (BoundedProtocol,), limits)


def _files_left() -> int:
    """How many connections this process can hold open."""
    try:
        import resource  # which not every system has

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        left = most - len(os.listdir("/dev/fd")) - SPARE_FILES
    except (ImportError, OSError):
        return MAX_CONNECTIONS
    return MAX_CONNECTIONS if most < 0 else min(MAX_CONNECTIONS, max(1, left))
