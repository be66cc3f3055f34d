"""uvicorn's HTTP protocol with a bound on the request's head: its size and the time it may take.

The application sees a request only once its headers are complete, so this cannot be done there.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from twostroke.serve.errors import ApiError
from twostroke.serve.settings import ServeSettings

_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._patience = self.loop.call_later(self.head_timeout_s, self._head_timed_out)

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
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def head_too_large(max_bytes: int) -> ApiError:
    return ApiError(431, f"the request line and headers have more than {max_bytes} bytes")


def bounded_protocol(settings: ServeSettings) -> type[BoundedProtocol]:
    limits: dict[str, Any] = {
        "max_head_bytes": settings.max_header_bytes,
        "head_timeout_s": settings.head_timeout_s,
    }
    return type("BoundedProtocol", (BoundedProtocol,), limits)
