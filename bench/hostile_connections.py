"""Attacks of `hostile.py` on connections: slow and silent clients, bytes that are parsed before a
key is checked, abandoned requests, and the log. Each attack once hurt another client's stream."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter, sleep
from typing import Any

from bench.hostile import Attack, AttackTarget, Fire
from bench.hostile_http import (
    CHAT,
    COMPLETIONS,
    KEYS,
    RAW_HEADERS,
    ask,
    chat,
    keys,
    post,
    schema,
    told,
)
from bench.hostile_watch import ATTACK_S
from twostroke.log_lines import MAX_LINES_PER_S

# ── connections ───────────────────────────────────────────────────────────────────────────────────


SIXTEEN_TEXTS = {"prompt": "Once", "max_tokens": 4000, "n": 16, "logprobs": 20, "stream": True,
                 "ignore_eos": True, "temperature": 1.0}  # fmt: skip


def ask_for_texts(target: AttackTarget) -> socket.socket:
    body = json.dumps(SIXTEEN_TEXTS).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + RAW_HEADERS
    connection = socket.create_connection(("127.0.0.1", target.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def always_read(target: AttackTarget) -> Fire:
    def fire() -> str:
        size, until = 0, perf_counter() + 25.0
        with ask_for_texts(target) as connection:
            while perf_counter() < until:
                size += len(connection.recv(1 << 16))
        return f"25 s read, then closed; {size:,} bytes"

    return fire


def never_read(target: AttackTarget) -> Fire:
    def fire() -> str:
        with ask_for_texts(target) as connection:
            sleep(25.0)
            first = connection.recv(12)
        return f"25 s unread, then closed; it began {first!r}"

    return fire


def slow_senders(target: AttackTarget) -> Fire:
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + RAW_HEADERS

    def fire() -> str:
        open_ones = []
        for _ in range(16):
            connection = socket.create_connection(("127.0.0.1", target.port))
            connection.sendall(head + b"Content-Length: %d\r\n\r\n{" % (16 * 1024**2))
            open_ones.append(connection)
        usual = chat(messages=[{"role": "user", "content": "hi " * 100_000}], max_tokens=1)
        answers = [post(target.port, COMPLETIONS, {"prompt": "hi " * 4_000, "max_tokens": 1})]
        answers.append(post(target.port, CHAT, usual))  # 300 KB; too long for the model, but read
        closed, until = 0, perf_counter() + 90.0
        for connection in open_ones:
            connection.settimeout(max(0.1, until - perf_counter()))
            with contextlib.suppress(TimeoutError, ConnectionError):
                closed += connection.recv(16) != b"x"
            connection.close()
        blocked = any(status == 429 for status, _ in answers)
        failed = "FAILED " if blocked or closed < 16 else ""
        return f"{failed}beside them {told(answers)}; {closed} of 16 were closed"

    return fire


def many_connections(target: AttackTarget) -> Fire:
    """Attack a server with a limit of 64 open files."""

    def fire() -> str:
        held = []
        for _ in range(100):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", target.port), timeout=1))
        sleep(1.0)
        for connection in held:
            connection.close()
        sleep(0.5)
        answers = [post(target.port, CHAT, chat(response_format={"type": "json_schema",
                   "json_schema": {"name": "x", "schema": schema(1, 2)}}))
                   for _ in range(3)]  # fmt: skip
        answers.append(post(target.port, CHAT, chat(logprobs=True, top_logprobs=3)))
        good = all(status == 200 for status, _ in answers)
        return f"{'' if good else 'FAILED '}afterwards {told(answers)}"

    return fire


# ── bytes of a connection, before a key is looked at ──────────────────────────────────────────────


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


CHUNKED = "Transfer-Encoding: chunked"
TRAILERS_S, TRAILER_BYTES = 15.0, 512 * 1024**2  # limits after which an attack ends by itself


def send_bytes(target: AttackTarget, pieces: Iterable[bytes]) -> tuple[int, bytes, bool]:
    """Return the bytes sent, the answer, and True if the server closed the connection."""
    sent, received = 0, b""
    with socket.create_connection(("127.0.0.1", target.port)) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
            connection.settimeout(5.0)
            while data := connection.recv(1 << 16):
                received += data
        except TimeoutError:
            return sent, received, False
        except ConnectionError:
            pass
    return sent, received, True


def statuses_of(received: bytes) -> Counter[str]:
    return Counter(part[:3].decode() for part in received.split(b"HTTP/1.1 ")[1:])


def without_traceback(target: AttackTarget, outcome: str) -> str:
    count = target.log.read_text(errors="replace").count("Traceback")
    return f"FAILED {count} tracebacks in the log; {outcome}" if count else outcome


def connections_of(
    number: int, pieces: Callable[[], Iterable[bytes]], must_close: bool = True
) -> Callable[[AttackTarget], Fire]:
    """Return an attack with `number` connections at once that send the same bytes."""

    def prepare(target: AttackTarget) -> Fire:
        def fire() -> str:
            with ThreadPoolExecutor(number) as pool:
                jobs = [pool.submit(send_bytes, target, pieces()) for _ in range(number)]
                done = [job.result() for job in jobs]
            statuses = sum((statuses_of(received) for _, received, _ in done), Counter())
            open_ones = sum(not closed for _, _, closed in done)
            outcome = (
                f"sent {sum(sent for sent, _, _ in done):,} bytes on {number} connections, "
                f"{open_ones} stayed open, answers {dict(statuses)}"
            )
            failed = "FAILED " if must_close and open_ones else ""
            return without_traceback(target, failed + outcome)

        return fire

    return prepare


OPEN_ROUTES = ("/health", "/ping", "/")  # they need no API key


def endless_trailers(path: str) -> Iterable[bytes]:
    yield head("GET", path, CHUNKED) + b"0\r\n"
    block, until, sent = b"a-trailer: of some length\r\n" * 2500, perf_counter() + TRAILERS_S, 0
    while perf_counter() < until and sent < TRAILER_BYTES:
        yield block
        sent += len(block)


def short_trailers() -> Iterable[bytes]:
    yield head("GET", "/health", CHUNKED) + b"0\r\n"
    yield from [b"a:\r\n" * (1 << 18)] * 20
    yield b"\r\n"


def pipelined_gets(path: str) -> Callable[[], Iterable[bytes]]:
    return lambda: [head("GET", path) * 1400]


def pipelined_posts() -> Iterable[bytes]:
    body = json.dumps(chat(max_tokens=1)).encode()
    lines = "Content-Type: application/json", f"Content-Length: {len(body)}"
    yield (head("POST", CHAT, *lines) + body) * 200


def empty_headers() -> Iterable[bytes]:
    yield head("GET", "/health", *["a:"] * 65_000)


def one_byte_chunks() -> Iterable[bytes]:
    yield head("POST", CHAT, "Content-Type: application/json", CHUNKED)
    yield from [b"1\r\n \r\n" * 10_000] * 20
    yield b"0\r\n\r\n"


def body_after_answer(target: AttackTarget) -> Fire:
    """Send endless bodies after the answer, which must not keep connections open."""

    def endless() -> Iterable[bytes]:
        yield head("GET", "/health", f"Content-Length: {1 << 40}")
        until = perf_counter() + TRAILERS_S
        while perf_counter() < until:
            yield b"x" * 100
            sleep(0.05)

    return connections_of(50, endless)(target)


def trickled_bodies(target: AttackTarget) -> Fire:
    """Hold parts of large bodies with one API key, and send whole bodies with another key."""
    lines = "Content-Type: application/json", f"Content-Length: {8 << 20}"
    begin = head("POST", CHAT, *lines, f"Authorization: Bearer {KEYS[0]}") + b"{" + b" " * 380_000
    usual: Any = {"prompt": "a", "max_tokens": 1, "metadata": {"a": "x" * 2_000_000}}
    sent = json.dumps(usual).encode()

    def fire() -> str:
        open_ones = [socket.create_connection(("127.0.0.1", target.port)) for _ in range(34)]
        for connection in open_ones:
            connection.settimeout(5.0)
            with contextlib.suppress(OSError):
                connection.sendall(begin)
        answers = []
        for _ in range(21):
            for connection in open_ones:
                with contextlib.suppress(OSError):
                    connection.sendall(b" " * 2_000)
            answers.append(ask(target.port, "POST", COMPLETIONS, sent, KEYS[1]))
        for connection in open_ones:
            connection.close()
        refused = sum(status == 429 for status, _ in answers)
        return f"{'FAILED ' if refused else ''}beside them {told(answers)}"

    return fire


# ── the log ───────────────────────────────────────────────────────────────────────────────────────

FLOOD_S, FLOOD_CONNECTIONS = 10.0, 10
LOG_BYTES_PER_S = 3 * MAX_LINES_PER_S * 400  # failures of requests, of connections, and uvicorn's


def log_flood(target: AttackTarget) -> Fire:
    """Send requests without an API key whose failures are logged, as fast as they are answered."""
    wrong = (
        head("GET", "/v1/models"),
        head("POST", "/" + "x" * 8_000, "Content-Length: 0", "Authorization: Bearer wrong"),
        head("GET", "/health", "X-Request-Id: " + "y" * 8_000, "Host: second.example"),
        b"no HTTP\r\n\r\n",
        head("GET", "/health", *["a:"] * 300),
    )

    def flood(number: int, until: float) -> int:
        count = 0
        while perf_counter() < until:
            count += 1
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", target.port), timeout=5.0) as connection,
            ):
                connection.sendall(wrong[(number + count) % len(wrong)])
                connection.recv(1 << 16)
        return count

    def fire() -> str:
        before, start = target.log.stat().st_size, perf_counter()
        with ThreadPoolExecutor(FLOOD_CONNECTIONS) as pool:
            jobs = [pool.submit(flood, n, start + FLOOD_S) for n in range(FLOOD_CONNECTIONS)]
            count = sum(job.result() for job in jobs)
        grown = target.log.stat().st_size - before
        failed = "FAILED " if grown > LOG_BYTES_PER_S * (FLOOD_S + 2) or not grown else ""
        return without_traceback(target, f"{failed}{count} requests, {grown:,} bytes in the log")

    return fire


# ── abandoned requests ────────────────────────────────────────────────────────────────────────────

MAX_WAIT_MS = 200.0  # that they may add to another client's time to first token


def abandoned(count: int) -> Callable[[AttackTarget], Fire]:
    """Return an attack that sends completions of 300 words and closes the connections at once."""

    def prepare(target: AttackTarget) -> Fire:
        asked = []
        for n in range(count):
            text = " ".join(f"word{(n * 7 + k * k) % 997}" for k in range(300))
            body = json.dumps({"prompt": f"{n} {text}", "max_tokens": 64}).encode()
            asked.append(request_of(COMPLETIONS, body))

        def fire() -> str:
            usual_ms = statistics.median(first_token_ms(target, n) for n in range(9))
            for data in asked:
                with socket.create_connection(("127.0.0.1", target.port)) as connection:
                    connection.sendall(data)
            next_ms = first_token_ms(target, 9)
            failed = "FAILED " if next_ms - usual_ms > MAX_WAIT_MS else ""
            return f"{failed}first token of the next request {usual_ms:.0f} → {next_ms:.0f} ms"

        return fire

    return prepare


def request_of(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def first_token_ms(target: AttackTarget, n: int) -> float:
    body = json.dumps({"prompt": f"Hello {n}", "max_tokens": 2, "stream": True}).encode()
    start = perf_counter()
    with socket.create_connection(("127.0.0.1", target.port), timeout=ATTACK_S) as connection:
        connection.sendall(request_of(COMPLETIONS, body))
        received = b""
        while b"data: " not in received:
            part = connection.recv(1 << 16)
            if not part:
                raise ConnectionError("the server closed the connection")
            received += part
        took_ms = 1e3 * (perf_counter() - start)
        while b"[DONE]" not in received and (part := connection.recv(1 << 16)):
            received += part
    return took_ms


CONNECTION_ATTACKS = [
    # The event loop accepts and drops these connections before it reads the next client.
    Attack("1,000 abandoned requests", abandoned(1000), max_gap_ms=MAX_WAIT_MS),
    Attack("2,000 abandoned requests", abandoned(2000), max_gap_ms=MAX_WAIT_MS),
    Attack("16 texts that are read", always_read, max_gap_ms=1e9),  # so many streams of one user
    Attack("a reader that does not", never_read, control="16 texts that are read"),
    Attack("slow senders", slow_senders),
    *(
        Attack(
            f"endless trailers of {path}",
            connections_of(1, partial(endless_trailers, path)),
            flags=keys,
            victim_key=KEYS[0],
        )
        for path in OPEN_ROUTES
    ),
    Attack("20 MB of short trailers", connections_of(1, short_trailers)),
    Attack("14,000 pipelined GETs", connections_of(10, pipelined_gets("/health"))),
    Attack("14,000 pipelined pages", connections_of(10, pipelined_gets("/"))),
    Attack("pipelined POSTs", connections_of(10, pipelined_posts), max_gap_ms=1e9),  # 90 chats
    Attack("65,000 empty headers × 20", connections_of(20, empty_headers)),
    Attack("one-byte chunks × 20", connections_of(20, one_byte_chunks)),
    Attack("a body after its answer", body_after_answer),
    Attack("34 trickled bodies of a key", trickled_bodies, flags=keys, victim_key=KEYS[1]),
    Attack("log lines without a key", log_flood, flags=keys, victim_key=KEYS[0]),
    Attack("64 open files", many_connections, open_files=64, victim=False),
]
