"""Attacks of `hostile.py` through HTTP: bodies, connections, keys and routes. Each attack once hurt
the stream of another client. Also the functions with which all attacks send requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from bench.hostile import ATTACK_S, Attack, AttackTarget, Fire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
MODEL = "SmolLM2-135M-Instruct"  # the default model; some APIs require its name
JSON = {"Content-Type": "application/json"}
RAW_HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
KEYS = ("first-key", "second-key")

# ── asking ────────────────────────────────────────────────────────────────────────────────────────


def ask(
    port: int, method: str, path: str, body: bytes | None = None, key: str | None = None
) -> tuple[int, bytes]:
    """Return status and answer. A server may close the connection before the end of the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ATTACK_S)
    headers = dict(JSON) if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.putrequest(method, path)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def post(port: int, path: str, body: Any, key: str | None = None) -> tuple[int, bytes]:
    return ask(port, "POST", path, json.dumps(body).encode(), key)


def warm_up(target: AttackTarget) -> None:
    """Send one request of each kind, to start everything that starts with a first request."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        for key in (None, KEYS[0]):
            schema = {"type": "json_object"}
            post(target.port, CHAT, {"messages": HELLO, "max_tokens": 2}, key)
            post(target.port, CHAT, {"messages": HELLO, "max_tokens": 4,
                 "response_format": schema}, key)  # fmt: skip
        ask(target.port, "GET", "/metrics")


def told(answers: Iterable[tuple[int, bytes]]) -> str:
    """Return the number of answers by status, and the message of the first refusal."""
    answers = list(answers)
    counts = Counter(status for status, _ in answers)
    text = ", ".join(f"{count}× {status}" for status, count in sorted(counts.items()))
    for status, answer in answers:
        if status >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text += f": {json.loads(answer)['error']['message'][:160]}"
            break
    longest = max(len(answer) for status, answer in answers if status >= 400 or status == 200)
    failed = any(status >= 500 and status not in (501, 503) for status in counts)
    return f"{'FAILED ' if failed else ''}{text} ({longest:,} bytes at most)"


def at_once(port: int, path: str, bodies: list[bytes]) -> list[tuple[int, bytes]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(port, "POST", path, body), bodies))


def sending(path: str, body: Callable[[], Any], times: int = 1) -> Callable[[AttackTarget], Fire]:
    """Return an attack with one body, sent once or several times at once."""

    def prepare(target: AttackTarget) -> Fire:
        made = body()
        data = made if isinstance(made, bytes) else json.dumps(made).encode()
        return lambda: told(at_once(target.port, path, [data] * times))

    return prepare


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "max_tokens": 4, **fields}


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


def nested_metadata() -> bytes:
    inner = b",".join([b"[[[]]]"] * 1_800_000)
    return b'{"messages":[{"role":"user","content":"hi"}],"metadata":{"a":[%b]}}' % inner


def long_name() -> bytes:
    return b'{"messages":[{"role":"user","content":"hi"}],"%b":1}' % (b"temperatur" * 1_400_000)


def many_parts() -> Any:
    return chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}])


def many_messages() -> Any:
    pair = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    return chat(messages=pair * 10_000)


def many_words() -> Any:
    return chat(bad_words=[f"word{n}" for n in range(1_200_000)])


def long_prompt(tokens: int) -> list[int]:
    return [(n * 31) % 40_000 + 100 for n in range(tokens)]


def schema(seed: int, patterns: int = 400) -> dict[str, Any]:
    """Return a JSON schema of some 60 KB, different for each seed, that takes long to compile."""
    properties = {}
    for n in range(patterns):
        words = "|".join(f"[a-z]{{{k},{k + n % 17 + 3}}}{seed}" for k in range(1, 6))
        properties[f"field_{seed}_{n}"] = {"type": "string", "pattern": f"^({words})$"}
    return {"type": "object", "properties": properties, "required": list(properties)}


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


def endless_trailers() -> Iterable[bytes]:
    yield head("GET", "/health", CHUNKED) + b"0\r\n"
    block, until, sent = b"a-trailer: of some length\r\n" * 2500, perf_counter() + TRAILERS_S, 0
    while perf_counter() < until and sent < TRAILER_BYTES:
        yield block
        sent += len(block)


def short_trailers() -> Iterable[bytes]:
    yield head("GET", "/health", CHUNKED) + b"0\r\n"
    yield from [b"a:\r\n" * (1 << 18)] * 20
    yield b"\r\n"


def pipelined_gets() -> Iterable[bytes]:
    yield head("GET", "/health") * 1400


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


# ── keys, logs, values ────────────────────────────────────────────────────────────────────────────


def keys(_: Path) -> list[str]:
    return ["--api-key", *KEYS]


def shared_prefix(target: AttackTarget) -> Fire:
    asked = {"prompt": long_prompt(200), "max_tokens": 1}

    def fire() -> str:
        cached = []
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            _, answer = post(target.port, COMPLETIONS, asked, key)
            details = json.loads(answer)["usage"].get("prompt_tokens_details") or {}
            cached.append(details.get("cached_tokens", 0))
        failed = "FAILED " if cached[2] or not cached[1] else ""
        return f"{failed}cached for the first key {cached[1]}, for the second {cached[2]}"

    return fire


def logged_key(target: AttackTarget) -> Fire:
    def fire() -> str:
        ask(target.port, "GET", "/health?api_key=sk-secret-value&x=1")
        text, until = "", perf_counter() + 10.0
        while "/health" not in text and perf_counter() < until:
            sleep(0.1)
            text = target.log.read_text(errors="replace")
        failed = "FAILED " if "sk-secret-value" in text or "/health" not in text else ""
        return f"{failed}the log says {re.findall(r'.*/health.*', text)[-1:]}"

    return fire


FOREIGN_PAGES = (
    {"Host": "rebound.example"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
)
ACTS = ("/start_profile", "/stop_profile", "/pools")


def foreign_pages(target: AttackTarget) -> Fire:
    """Send requests like a browser on pages of other sites, to a server without an API key."""

    def fire() -> str:
        answers = []
        for headers in FOREIGN_PAGES:
            for path in ACTS:
                connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=ATTACK_S)
                connection.request("POST", path, b"", headers)
                answer = connection.getresponse()
                answers.append((answer.status, answer.read()))
                connection.close()
        failed = "FAILED " if any(status != 403 for status, _ in answers) else ""
        return f"{failed}{told(answers)}"

    return fire


def odd_values(target: AttackTarget) -> Fire:
    bodies = [chat(top_k=0.5), chat(top_k=1e-9), chat(temperature=1e-300), chat(top_p=5e-324)]

    def fire() -> str:
        answers = [post(target.port, CHAT, body) for body in bodies]
        usual, _ = post(target.port, CHAT, chat())
        return f"{'' if usual == 200 else 'FAILED '}{told(answers)}; afterwards {usual}"

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


# ── other APIs ────────────────────────────────────────────────────────────────────────────────────


def many_items() -> Any:
    item = {"type": "function_call_output", "call_id": "c", "output": "x"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [call, item] * 30_000, "max_output_tokens": 4}


def many_blocks() -> Any:
    said = [{"type": "text", "text": "a"}] * 200_000
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": said}]}


def many_tools() -> Any:
    tools = [{"name": f"t{n}", "input_schema": {"type": "object"}} for n in range(100_000)]
    return {"model": MODEL, "max_tokens": 4, "messages": HELLO, "tools": tools}


def ollama_messages() -> Any:
    return {"model": MODEL, "messages": many_messages()["messages"]}


def stored_responses(target: AttackTarget) -> Fire:
    """Store many more answers than the server keeps. Their long inputs share a prefix, so that
    prefill is fast."""
    text = "word " * 4000
    bodies = [
        json.dumps({"input": [{"role": "user", "content": f"{text} {n}"}], "max_output_tokens": 1})
        for n in range(600)
    ]
    data = [body.encode() for body in bodies]

    def fire() -> str:
        with ThreadPoolExecutor(4) as pool:
            asked = pool.map(lambda body: ask(target.port, "POST", "/v1/responses", body), data)
            return told(list(asked))

    return fire


def background_responses(target: AttackTarget) -> Fire:
    """Start many more background answers than may run."""
    body = json.dumps({"input": "hi", "background": True, "max_output_tokens": 64}).encode()
    return lambda: told(at_once(target.port, "/v1/responses", [body] * 200))


def many_records(target: AttackTarget) -> Fire:
    def fire() -> str:
        with ThreadPoolExecutor(16) as pool:
            path = "/records?seconds=600"
            return told(list(pool.map(lambda _: ask(target.port, "GET", path), range(200))))

    return fire


HTTP_ATTACKS = [
    Attack("nested metadata", sending(CHAT, nested_metadata)),
    Attack("nested metadata × 14", sending(CHAT, nested_metadata, 14)),
    Attack("unknown name of 14 MB", sending(CHAT, long_name)),
    Attack("3 M ids detokenized", sending("/detokenize", lambda: {"tokens": [7] * 3_000_000})),
    Attack("200,000 content parts", sending(CHAT, many_parts)),
    Attack("20,000 messages", sending(CHAT, many_messages)),
    Attack(
        "13 MB of allowed ids",
        sending(CHAT, lambda: chat(allowed_token_ids=list(range(100, 40_000)) * 45)),
    ),
    Attack("14 MB of bad words", sending(CHAT, many_words)),
    Attack(
        "1,000 prompts",
        sending(COMPLETIONS, lambda: {"prompt": [f"Text {n}" for n in range(1000)],
                                      "max_tokens": 4}),
    ),
    Attack(
        "n=256 with log-probabilities",
        sending(COMPLETIONS, lambda: {"prompt": "Once", "n": 256, "logprobs": 20,
                                      "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}),
    ),
    Attack(
        "prompt log-probabilities",
        sending(COMPLETIONS, lambda: {"prompt": long_prompt(4000), "prompt_logprobs": 20,
                                      "max_tokens": 1}),
    ),
    Attack(
        "prompt log-probabilities of all tokens",
        sending(COMPLETIONS, lambda: {"prompt": long_prompt(4000), "prompt_logprobs": -1,
                                      "max_tokens": 1}),
    ),
    Attack("60,000 items of /v1/responses", sending("/v1/responses", many_items)),
    Attack("stored responses", stored_responses, max_gap_ms=1e9,  # 600 prompts to compute
           flags=lambda _: ["--max-stored-response-bytes", str(8 << 20)]),
    Attack("200 background responses", background_responses, max_gap_ms=1e9),  # and this 200
    Attack("200,000 blocks of /v1/messages", sending("/v1/messages", many_blocks)),
    Attack("100,000 tools of /v1/messages", sending("/v1/messages", many_tools)),
    Attack("20,000 messages to Ollama", sending("/api/chat", ollama_messages)),
    Attack(
        "a long text to /infill",
        sending("/infill", lambda: {"input_prefix": "a " * 3_000_000, "input_suffix": "b"}),
    ),
    Attack(
        "a long text to /completion",
        sending("/completion", lambda: {"prompt": "word " * 2_500_000, "n_predict": 4}),
    ),
    Attack("/records 200 times", many_records),
    # The event loop accepts and drops these connections before it reads the next client.
    Attack("1,000 abandoned requests", abandoned(1000), max_gap_ms=MAX_WAIT_MS),
    Attack("2,000 abandoned requests", abandoned(2000), max_gap_ms=MAX_WAIT_MS),
    Attack("16 texts that are read", always_read, max_gap_ms=1e9),  # so many streams of one user
    Attack("a reader that does not", never_read, control="16 texts that are read"),
    Attack("slow senders", slow_senders),
    Attack("endless trailers", connections_of(1, endless_trailers)),
    Attack("20 MB of short trailers", connections_of(1, short_trailers)),
    Attack("14,000 pipelined GETs", connections_of(10, pipelined_gets)),
    Attack("pipelined POSTs", connections_of(10, pipelined_posts), max_gap_ms=1e9),  # 90 chats
    Attack("65,000 empty headers × 20", connections_of(20, empty_headers)),
    Attack("one-byte chunks × 20", connections_of(20, one_byte_chunks)),
    Attack("a body after its answer", body_after_answer),
    Attack("34 trickled bodies of a key", trickled_bodies, flags=keys, victim=False),
    Attack("64 open files", many_connections, open_files=64, victim=False),
    Attack("prefix of another key", shared_prefix, flags=keys, victim=False),
    Attack("key in the log", logged_key, victim=False,
           flags=lambda _: ["--uvicorn-log-level", "info", "--enable-log-requests"]),
    Attack("pages of other sites", foreign_pages, victim=False),
    Attack("odd values", odd_values),
]  # fmt: skip
