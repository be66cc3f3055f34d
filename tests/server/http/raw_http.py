"""HTTP as bytes on a socket, for requests that no client library sends."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from tests.server.running import PATIENCE_S

KEY = "the-key"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TEXT = {"prompt": "the", "max_tokens": 2, "temperature": 0}


def head(path: str, *lines: bytes, key: str | None = KEY) -> bytes:
    lines = (
        f"POST {path} HTTP/1.1".encode(),
        b"Host: localhost",
        b"Content-Type: application/json",
        *lines,
    )
    if key is not None:
        lines += (f"Authorization: Bearer {key}".encode(),)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunked(body: bytes, size: int, trailers: bytes = b"") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return chunks + b"0\r\n" + trailers + b"\r\n"


def wait_until(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.005)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            received += data
    return received


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]
