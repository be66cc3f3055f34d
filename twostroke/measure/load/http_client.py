"""A small asynchronous HTTP client that records the arrival time of each piece of an answer.

The client takes the time when the event loop reads a piece from the socket, before parsing. So the
parsing of one answer does not delay the arrival time of another.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from twostroke.errors import TwostrokeError, shortened, shown

CONNECT_TIMEOUT_S = 10.0


class ServerError(TwostrokeError):
    """A server cannot be reached or answers with an error. `status`: None without an answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Piece(NamedTuple):
    """Bytes of an answer's body and their arrival time."""

    at_s: float  # `perf_counter` at the read
    data: bytes


class Endpoint:
    """A server's address and API key."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(
                f"{shown(url)} is not an address; give an address like http://localhost:8000"
            )
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        try:
            self.port = parts.port or (443 if self.secure else 80)
        except ValueError:
            raise ServerError(f"{shown(url)}: the port must be a number up to 65535") from None
        # The base_url of OpenAI clients ends in /v1, and the routes of this module begin with /v1.
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self.base}"
        self._headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"{method} {self.base}{path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n{self._headers}"
            f"Accept: */*\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
        ).encode()


class ClientConnection(asyncio.Protocol):
    """An HTTP/1.1 connection that sends one request after the other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport | None = None
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._keep_alive = True
        self._now = 0.0
        self._begin()

    @classmethod
    async def open(cls, endpoint: Endpoint) -> ClientConnection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if endpoint.secure else None
        connecting = loop.create_connection(
            lambda: cls(endpoint), endpoint.host, endpoint.port, ssl=context
        )
        try:
            _, connection = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
            if error.errno is not None and error.errno > 0:  # resolver errors are negative
                reason = os.strerror(error.errno)
            elif error.strerror:
                reason = error.strerror
            raise ServerError(
                f"no server answers at {endpoint.url} ({reason}); start a server there, or give "
                "another address"
            ) from None
        return connection

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def refused(self) -> bool:
        """True if the server closed the connection without an answer, as after a long idle time."""
        return self._closed and not self.status

    @property
    def reusable(self) -> bool:
        return not self._closed and self._complete and self._keep_alive

    async def request(
        self, method: str, path: str, body: bytes = b"", timeout_s: float | None = None
    ) -> AsyncGenerator[Piece]:
        """Yield the answer's body as it arrives. Raise `ServerError` unless the status is 200."""
        self._begin()
        assert self._transport is not None
        self._transport.write(self._endpoint.head(method, path, len(body)) + body)
        while True:
            while not (self._pieces or self._complete or self._closed):
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    # Not `wait_for`, which may lose a cancellation in Python 3.11.
                    async with asyncio.timeout(timeout_s):
                        await self._waiter
                except TimeoutError:
                    self.close()
                    raise ServerError(f"no answer for {timeout_s:.0f} s") from None
            pieces, self._pieces = self._pieces, []
            if self.status == 200:
                for piece in pieces:
                    yield piece
            else:
                self._refusal += b"".join(piece.data for piece in pieces)
            if self._complete and not self._pieces:
                break
            if self._closed and not self._pieces:
                raise ServerError("the server closed the connection before the end of the answer")
        if self.status != 200:
            raise ServerError(_reason(self.status, self._refusal), self.status)

    def _begin(self) -> None:
        """Reset the state for the next answer."""
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._pieces.clear()
        self._refusal = b""
        self._complete = False

    # ── called by asyncio ───────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._closed = True
            self.close()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ── called by the parser ────────────────────────────────────────────────────────────────

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(Piece(self._now, body))

    def on_message_complete(self) -> None:
        self._complete = True


class Connections:
    """A pool of connections to one server."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._free: list[ClientConnection] = []

    async def stream(
        self, method: str, path: str, body: bytes = b"", timeout_s: float | None = None
    ) -> AsyncGenerator[Piece]:
        while True:
            used = self._free.pop() if self._free else None
            if used is not None and not used.reusable:
                continue
            connection = used or await ClientConnection.open(self.endpoint)
            try:
                async for piece in connection.request(method, path, body, timeout_s):
                    yield piece
                return
            except ServerError:
                if used is None or not connection.refused:
                    raise
            finally:
                if connection.reusable:
                    self._free.append(connection)
                else:
                    connection.close()

    async def fetch(self, path: str, body: Any = None, timeout_s: float = 60.0) -> bytes:
        """Return the whole answer to a GET, or to a POST if there is a JSON body."""
        method = "GET" if body is None else "POST"
        sent = b"" if body is None else json.dumps(body).encode()
        pieces = [piece.data async for piece in self.stream(method, path, sent, timeout_s)]
        return b"".join(pieces)

    async def fetch_json(self, path: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        content = await self.fetch(path, body, timeout_s)
        try:
            return json.loads(content)
        except ValueError:
            raise ServerError(f"the answer of {path} is not JSON") from None

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()


def _reason(status: int, body: bytes) -> str:
    """Return the error message of an answer with a status other than 200."""
    text = body.decode(errors="replace").strip()
    try:
        answer = json.loads(text)
        error = answer.get("error", answer) if isinstance(answer, dict) else text
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    hint = ""
    if status in (401, 403):
        hint = "; give the server's key with --api-key or OPENAI_API_KEY"
    return f"the server answered {status}: {shortened(text, 300) or 'without a reason'}{hint}"
