"""A connection works the same on every event loop, with TLS, and on a Unix socket."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from tests.server.http.raw_http import GET, TEXT, chunked, head, read_all, statuses, wait_until
from tests.server.running import PATIENCE_S, Running, running
from tests.tiny import tiny_folder, tiny_llm

pytestmark = [
    pytest.mark.core,  # bounds of security
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate"),
]

PATH = "/v1/completions"
LONG = TEXT | {"max_tokens": 400, "ignore_eos": True, "stream": True}
LAST = GET.replace(b"Host: localhost", b"Connection: close")


@dataclass
class Transport:
    server: Running
    connect: Callable[[], socket.socket]

    def is_aborted(self, connection: socket.socket, leave: Callable[[socket.socket], None]) -> bool:
        """Return whether a stream ends early after `leave`."""
        records = self.server.client.records.requests
        before = len(records)
        body = json.dumps(LONG).encode()
        with self.server.steps_await_messages(after=8):
            connection.sendall(head(PATH, b"Content-Length: %d" % len(body)) + body)
            assert connection.recv(9) == b"HTTP/1.1 "
            leave(connection)
            wait_until(lambda: len(records) > before)
        return records[-1].finish_reason == "abort"


@pytest.fixture(scope="module", params=["asyncio", "asyncio tls", "uvloop", "uvloop tls", "uds"])
def transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Transport]:
    folder = tmp_path_factory.mktemp("transport")
    loop_factory = None if "asyncio" in request.param else uvloop.new_event_loop
    settings: dict[str, Any] = {}
    if request.param == "uds":
        settings["uds"] = str(folder / "socket")
    if "tls" in request.param:
        key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=x"]
        command += [
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-days",
            "1",
            "-keyout",
            key,
            "-out",
            certificate,
        ]
        subprocess.run(command, check=True, capture_output=True)
        settings |= {"ssl_keyfile": key, "ssl_certfile": certificate}
    with running(tiny_llm(tiny_folder(folder / "tiny")), loop_factory, **settings) as server:

        def connect() -> socket.socket:
            if request.param == "uds":
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(PATIENCE_S)
                connection.connect(settings["uds"])
                return connection
            connection = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if "tls" not in request.param:
                return connection
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.load_verify_locations(settings["ssl_certfile"])
            return context.wrap_socket(connection)

        yield Transport(server, connect)


def test_any_cuts_of_the_bytes_give_the_same_answers(transport: Transport) -> None:
    body = json.dumps(TEXT).encode()
    whole = head(PATH, b"Transfer-Encoding: chunked") + chunked(body, 5, b"a: b\r\n")
    whole += head(PATH, b"Content-Length: %d" % len(body)) + body + LAST
    cuts = sorted(random.Random(0).sample(range(1, len(whole)), 60))
    with transport.connect() as connection:
        for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            connection.sendall(whole[begin:end])
        assert statuses(read_all(connection)) == [200, 200, 200]


@pytest.mark.parametrize("size", [1_000, 70_000, None], ids=["chunks", "large chunks", "length"])
def test_a_long_body_arrives(transport: Transport, size: int | None) -> None:
    body = json.dumps(TEXT).encode() + b" " * 3_000_000
    line = b"Transfer-Encoding: chunked" if size else b"Content-Length: %d" % len(body)
    with transport.connect() as connection:
        connection.sendall(head(PATH, line, b"Connection: close"))
        connection.sendall(chunked(body, size) if size else body)
        assert statuses(read_all(connection)) == [200]


def test_a_client_is_told_to_continue(transport: Transport) -> None:
    body = json.dumps(TEXT).encode()
    lines = b"Content-Length: %d" % len(body), b"Expect: 100-continue", b"Connection: close"
    with transport.connect() as connection:
        connection.sendall(head(PATH, *lines))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert statuses(read_all(connection)) == [200]


def test_a_head_request_has_no_body(transport: Transport) -> None:
    with transport.connect() as connection:
        connection.sendall(GET.replace(b"GET", b"HEAD") + LAST)
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    bodies = [answer.partition(b"\r\n\r\n")[2] for answer in answers]
    assert bodies == [b"", b'{"status":"ok"}']


def test_a_client_that_disconnects_ends_its_stream(transport: Transport) -> None:
    with transport.connect() as connection:
        assert transport.is_aborted(connection, lambda one: one.close())


def test_a_client_that_half_closes_ends_its_stream(transport: Transport) -> None:
    with transport.connect() as connection:
        assert transport.is_aborted(connection, lambda one: one.shutdown(socket.SHUT_WR))


def test_a_client_that_never_stops_sending_is_cut_off(transport: Transport) -> None:
    with transport.connect() as connection, contextlib.suppress(OSError):
        connection.sendall(GET.replace(b"Host: localhost", b"Content-Length: 999999999"))
        for _ in range(1000):
            connection.sendall(b"x" * 32_768)
        pytest.fail("the server took 32 MB behind a response")
