"""Limits of a connection, applied before route and key are checked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.http.raw_http import GET, KEY, TEXT, chunked, head, read_all, statuses, wait_until
from tests.server.running import PATIENCE_S, Running, running
from tests.tiny import tiny_llm
from twostroke.serve.http import connection
from twostroke.serve.http.connection import (
    MAX_HEADER_LINES,
    MAX_PIPELINED,
    TURN_S,
    ParseScheduler,
    connection_type,
)
from twostroke.serve.settings import ServeSettings

pytestmark = pytest.mark.core  # bounds of security

ENDLESS_BYTES = 32 * 1024**2  # more than any limit and the kernel's buffers together


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder), api_keys=(KEY,), enable_request_id_headers=True) as server:
        yield server


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def exchange(server: Running, *pieces: bytes) -> bytes:
    with connect(server) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_all(connection)


def is_cut_off(server: Running, begin: bytes, endless: bytes) -> bool:
    """Return whether the server closes a connection whose client never stops sending."""
    with connect(server) as connection:
        reader = threading.Thread(target=read_all, args=(connection,))
        reader.start()
        try:
            connection.sendall(begin)
            for _ in range(ENDLESS_BYTES // len(endless)):
                connection.sendall(endless)
        except ConnectionError:
            return True
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            reader.join(PATIENCE_S)
    return False


# ── trailers ────────────────────────────────────────────────────────────────────────────────


def test_a_trailer_is_no_header(server: Running) -> None:
    body = json.dumps(TEXT).encode()
    sent = chunked(body, 8, b"X-Request-Id: of-a-trailer\r\n")
    lines = b"Transfer-Encoding: chunked", b"Connection: close"
    received = exchange(server, head("/v1/completions", *lines), sent)
    assert statuses(received) == [200]
    assert b"x-request-id: " in received
    assert b"of-a-trailer" not in received


def test_a_trailer_is_no_key(server: Running) -> None:
    sent = chunked(json.dumps(TEXT).encode(), 8, f"Authorization: Bearer {KEY}\r\n".encode())
    lines = b"Transfer-Encoding: chunked", b"Connection: close"
    assert statuses(exchange(server, head("/v1/completions", *lines, key=None), sent)) == [401]


@pytest.mark.parametrize("endless", [b"a:b\r\n" * 1000, b"x" * 5000], ids=["lines", "one line"])
@pytest.mark.parametrize("method", [b"GET /health", b"POST /v1/completions", b"GET /nothing"])
def test_endless_trailers_are_cut_off(server: Running, method: bytes, endless: bytes) -> None:
    begin = b"%b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: " % method
    assert is_cut_off(server, begin, endless)


def test_an_endless_body_is_cut_off_after_its_response(server: Running) -> None:
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    assert is_cut_off(server, begin, b"x" * 5000)


def test_a_body_that_stops_after_its_response_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    begin = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nhello"
    assert statuses(exchange(server, begin)) == [200]


def test_the_body_of_an_answered_request_may_arrive_late(server: Running) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
        assert connection.recv(9) == b"HTTP/1.1 "
        connection.sendall(b"hello" + GET.replace(b"Host: localhost", b"Connection: close"))
        assert statuses(b"HTTP/1.1 " + read_all(connection)) == [200, 200]


# ── chunks and headers ──────────────────────────────────────────────────────────────────────


def test_chunks_of_one_byte_are_refused(server: Running) -> None:
    body = json.dumps(TEXT).encode() + b" " * 100_000
    lines = b"Transfer-Encoding: chunked", b"Connection: close"
    received = exchange(server, head("/v1/completions", *lines), chunked(body, 64))
    assert statuses(received) == [200]
    assert is_cut_off(server, head("/v1/completions", *lines), b"1\r\nx\r\n" * 1000)


@pytest.mark.parametrize("lines", [MAX_HEADER_LINES - 4, MAX_HEADER_LINES + 1, 16_000])
def test_header_lines_are_limited(server: Running, lines: int) -> None:
    few = [b"Connection: close", b"Content-Length: 0", *[b"a:" for _ in range(lines - 3)]]
    received = exchange(server, head("/ping", *few, key=None))
    assert statuses(received) == [200 if lines <= MAX_HEADER_LINES else 431]


UPGRADE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


def test_an_upgrade_is_answered_as_http(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """The connection stays open: clients that offer HTTP/2 continue with HTTP/1.1."""
    last = GET.replace(b"Host: localhost", b"Connection: close")
    assert statuses(exchange(server, UPGRADE + UPGRADE + last)) == [200, 200, 200]
    assert not caplog.records
    assert statuses(exchange(server, UPGRADE + b"\x81\x05hello")) == [200, 400]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (UPGRADE.replace(b"\r\n\r\n", b"\r\n" + b"a:\r\n" * 300 + b"\r\n"), 431),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ],
    ids=["upgrade with many headers", "connect", "path", "two framings", "two lengths"],
)
def test_a_head_that_is_refused_harms_no_other_connection(
    server: Running, caplog: pytest.LogCaptureFixture, sent: bytes, status: int
) -> None:
    assert statuses(exchange(server, sent)) == [status]
    assert statuses(exchange(server, GET.replace(b"Host: localhost", b"Connection: close"))) == [
        200
    ]
    assert not [record for record in caplog.records if record.levelname != "INFO"]


# ── pipelines ───────────────────────────────────────────────────────────────────────────────


def test_a_short_pipeline_is_answered_in_order(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["the", "the fox", "the quick brown fox"]
    bodies = [json.dumps(TEXT | {"prompt": prompt}).encode() for prompt in prompts]
    sent = [head("/v1/completions", b"Content-Length: %d" % len(body)) + body for body in bodies]
    received = exchange(
        server, b"".join(sent) + GET.replace(b"Host: localhost", b"Connection: close")
    )
    assert statuses(received) == [200, 200, 200, 200]
    answers = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 ")[1:4]]
    lengths = [json.loads(answer)["usage"]["prompt_tokens"] for answer in answers]
    assert lengths == sorted(set(lengths))
    assert len(lengths) == len(prompts)
    assert not caplog.records


@pytest.mark.parametrize("request_", [GET, head("/ping", b"Content-Length: 2") + b"{}"])
def test_a_long_pipeline_is_closed(
    server: Running, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request_ * 14_000)
        answers = statuses(read_all(connection))
    assert set(answers) <= {200}
    assert len(answers) <= 2 * MAX_PIPELINED
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.mark.parametrize("seed", range(6))
def test_any_cuts_of_the_bytes_give_the_same_answers(server: Running, seed: int) -> None:
    """Blank lines inside of a chunk and a cut inside of a blank line end no message."""
    body = b"\r\n\r\n" + json.dumps(TEXT).encode() + b"\r\n\r\n"
    lines = b"Transfer-Encoding: chunked", b"Expect: nothing"
    whole = head("/v1/completions", *lines) + chunked(body, 3 + seed, b"a: b\r\n")
    whole += head("/v1/completions", b"Content-Length: %d" % len(body)) + body
    whole += GET.replace(b"Host: localhost", b"Connection: close")
    cuts = sorted(random.Random(seed).sample(range(1, len(whole)), 60))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        assert statuses(read_all(connection)) == [200, 200, 200]


def test_a_client_that_leaves_is_noticed_beside_what_it_has_pipelined(server: Running) -> None:
    body = json.dumps(TEXT | {"max_tokens": 400, "ignore_eos": True}).encode()
    records = server.client.records.requests
    before = len(records)
    with connect(server) as connection:
        connection.sendall(head("/v1/completions", b"Content-Length: %d" % len(body)) + body)
        connection.sendall(GET * 1000)  # more than is read ahead of the parser
        wait_until(lambda: bool(server.app.service.open_streams))
    wait_until(lambda: len(records) > before)
    assert records[-1].finish_reason == "abort"


# ── ends ────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_is_idle_after_a_body_that_came_late(folder: Path) -> None:
    with running(tiny_llm(folder), keep_alive_s=1.0) as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
        assert connection.recv(9) == b"HTTP/1.1 "
        connection.sendall(b"hello")
        assert read_all(connection)  # the rest of the answer; then the server closes


@pytest.mark.parametrize("line", [b"Connection: close", b"Host: localhost"])
def test_an_answer_that_is_not_read_holds_no_connection(folder: Path, line: bytes) -> None:
    """The page fits into the server's buffer, so that its response is complete at once."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of each connection, too
    listener.bind(("127.0.0.1", 0))
    settings = {"write_timeout_s": 0.2, "keep_alive_s": 1.0}
    with (
        running(tiny_llm(folder), listener=listener, **settings) as server,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        client.sendall(b"GET /dash HTTP/1.1\r\n%b\r\n\r\n" % line)
        connections = server.server.server_state.connections
        wait_until(lambda: bool(connections))
        wait_until(lambda: not connections)


def test_bytes_that_are_ignored_are_bounded(server: Running) -> None:
    """A client that keeps sending during its first response is disconnected."""
    body = json.dumps(TEXT | {"max_tokens": 400, "ignore_eos": True}).encode()
    begin = head("/v1/completions", b"Content-Length: %d" % len(body)) + body
    assert is_cut_off(server, begin, GET * 1000)
    server.assert_idle()


def test_servers_of_one_process_share_no_buffer() -> None:
    """Each server has a thread of its own."""
    one, other = (connection_type(ServeSettings()) for _ in range(2))
    assert one.buffer.obj is not other.buffer.obj


# ── turns ───────────────────────────────────────────────────────────────────────────────────


def test_connections_share_the_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends after its time, and the next turn continues with the next connection."""
    now, order = [0.0], []

    class Endless:
        def __init__(self, name: str, pieces: int, cost_s: float) -> None:
            self.name, self.pieces, self.cost_s = name, pieces, cost_s

        def parse_piece(self) -> bool:
            now[0] += self.cost_s
            order.append(self.name)
            self.pieces -= 1
            return self.pieces > 0

    monkeypatch.setattr(connection, "monotonic", lambda: now[0])

    async def run() -> list[int]:
        turns, per_turn = ParseScheduler(), []
        slow = 0.6 * TURN_S
        for one in (Endless("a", 4, slow), Endless("b", 4, slow), Endless("c", 1, 0.0)):
            turns.add(one)  # type: ignore[arg-type]
        while sum(per_turn) < 9:
            before = len(order)
            await asyncio.sleep(0)
            per_turn.append(len(order) - before)
        return per_turn

    assert asyncio.run(run())[:4] == [0, 2, 3, 2]  # new bytes wait for a turn
    assert order[:5] == ["a", "b", "c", "a", "b"]
