"""Limits of bodies: size, number of values, speed, and memory. Streams of other clients continue
meanwhile."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import JSON, PATIENCE_S, Running, running
from tests.tiny import tiny_llm
from twostroke.engine.input_processor import COUNTED_CHARS
from twostroke.engine.rendering import TemplateRenderer
from twostroke.serve.error_responses import ApiError
from twostroke.serve.http import bodies
from twostroke.serve.http.bodies import MAX_WAITING, BodyReader, ByteBudget, Reservation, Sender
from twostroke.serve.settings import ServeSettings

pytestmark = pytest.mark.core  # bounds of security

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "a"}]
MIB = 1024**2
LONGEST_ANSWER = 1500  # bytes of an error, whatever was sent


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def refusal(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    got, _, body = answer
    assert got == status, body[:500]
    assert len(body) <= LONGEST_ANSWER
    return json.loads(body)["error"]


@contextmanager
def watched(server: Running) -> Iterator[Callable[[], int]]:
    """Run streams one after the other during the block; yields their numbers of tokens."""
    tokens, end, begun = [0], threading.Event(), threading.Event()

    def read() -> None:
        body = {"prompt": [4, 5], "max_tokens": 100, "ignore_eos": True, "stream": True}
        while not end.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            connection.request("POST", TEXT, json.dumps(body), JSON)
            answer = connection.getresponse()
            assert answer.status == 200
            while not end.is_set() and (line := answer.readline()):
                tokens[0] += line.startswith(b"data: {")
                begun.set()
            connection.close()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(PATIENCE_S)
    try:
        yield lambda: tokens[0]
    finally:
        end.set()
        reader.join(PATIENCE_S)


# ── how much ────────────────────────────────────────────────────────────────────────────────


def nested(num_bytes: int) -> bytes:
    inside = b"[[[]]]," * (num_bytes // 7)
    return b'{"prompt": "a", "max_tokens": 2, "metadata": {"a": [' + inside + b"1]}}"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (TEXT, nested(9_000_000), "--max-body-bytes"),
        (TEXT, nested(1_000_000), "--max-body-weight"),
        (TEXT, {"prompt": [4] * 600_000}, "--max-body-weight"),
        (TEXT, {"prompt": [[4]] * 110_000}, "--max-body-weight"),
        (TEXT, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(70_000)}}, "body-weight"),
        (CHAT, {"messages": MESSAGES * 40_000}, "--max-body-weight"),
        (RESPONSES, {"input": MESSAGES * 40_000}, "--max-body-weight"),
        (CHAT, {"messages": MESSAGES, "documents": [{"a": 1}] * 60_000}, "--max-body-weight"),
        ("/detokenize", {"tokens": [4] * 600_000}, "--max-body-weight"),
    ],
    ids=str,
)
def test_a_body_of_too_much_is_refused_before_it_is_decoded(
    server: Running, path: str, body: Any, says: str
) -> None:
    with watched(server) as tokens:
        before = tokens()
        error = refusal(server.ask("POST", path, body), 413)
        assert says in error["message"]
        assert error["code"] == "body_too_large"
        until = time.monotonic() + PATIENCE_S
        while tokens() < before + 5:
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (TEXT, {"prompt": "a", "stop": ["x" * 5000]}, "stop"),
        (TEXT, {"prompt": "a", "stop": "x" * 5000}, "stop"),
        (TEXT, {"prompt": "a", "bad_words": ["x" * 300]}, "bad_words"),
        (TEXT, {"prompt": "a", "bad_words": ["x"] * 2000}, "bad_words"),
        (TEXT, {"prompt": "a", "stop_token_ids": [4] * 2000}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [4] * 5000}, "allowed_token_ids"),
        (TEXT, {"prompt": "a", "user": "x" * 5_000_000}, "user"),
        (TEXT, {"prompt": "a", "cache_salt": "x" * 5_000_000}, "cache_salt"),
        (TEXT, {"prompt": "a", "model": "x" * 5_000_000}, "model"),
        (TEXT, {"prompt": ["a"] * 129}, "n"),
        (TEXT, {"prompt": ["a"] * 65, "n": 2}, "n"),
        (CHAT, {"messages": MESSAGES, "n": 129}, "n"),
        (TEXT, {"prompt": "a", "priority": 2**70}, "priority"),
        (TEXT, {"prompt": "a", "priority": 1001}, "priority"),
        ("/detokenize", {"tokens": [4] * 5000}, "tokens"),
        (RESPONSES, {"input": "a", "metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        (RESPONSES, {"input": "a", "metadata": {"a": "x" * 600}}, "metadata"),
    ],
    ids=lambda one: None if isinstance(one, dict) else one,
)
def test_what_grows_has_a_limit_that_names_its_field(
    server: Running, path: str, body: Any, names: str
) -> None:
    error = refusal(server.ask("POST", path, body), 400)
    assert names in (error["param"] or "") or error["message"].startswith(names)


@pytest.mark.parametrize(
    "body",
    [
        b'{"' + b"x" * 5_000_000 + b'": 1}',
        b'{"stream_options": {"' + b"x" * 5_000_000 + b'": 1}}',
        b'{"response_format": {"type": "' + b"x" * 5_000_000 + b'"}}',
        b'{"messages": [{"role": "' + b"x" * 5_000_000 + b'", "content": 5}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "' + b"x" * 5_000_000 + b'"}]}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "' + b"x" * MIB + b'"}',
        b"x" * 5_000_000,
    ],
    ids=("name", "inner name", "enum", "role", "part", "choice", "no json"),
)
def test_an_error_repeats_little_of_what_was_sent(server: Running, body: bytes) -> None:
    refusal(server.ask("POST", CHAT, body), 400)


def test_a_text_far_too_long_is_not_tokenised_to_its_end(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = server.app.service.tokenizer
    assert tokenizer is not None
    read: list[int] = []
    encode = tokenizer.encode

    def noting(text: str, *given: Any, **more: Any) -> list[int]:
        read.append(len(text))
        return encode(text, *given, **more)

    monkeypatch.setattr(tokenizer, "encode", noting)
    most = server.app.service.prompts.max_tokens
    assert most < COUNTED_CHARS // 4
    error = refusal(server.ask("POST", TEXT, {"prompt": "aZ" * 30_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert read == [COUNTED_CHARS]


@pytest.mark.parametrize(
    "messages", [MESSAGES * 15_000, [{"role": "user", "content": "a" * 2 * MIB}]]
)
def test_a_chat_far_too_long_is_refused_before_it_is_rendered(
    server: Running, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    monkeypatch.setattr(TemplateRenderer, "render", None)
    error = refusal(server.ask("POST", CHAT, {"messages": messages}), 400)
    assert error["code"] == "context_length_exceeded"


# ── what stays ──────────────────────────────────────────────────────────────────────────────

BIG_TOOLS = [{"name": "f", "input_schema": {"a": [[]] * 50_000}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [4, 5], "metadata": {"a": [[]] * 100_000}}),
        (TEXT, {"prompt": [4, 5], "metadata": {"a": "x" * 3 * MIB}}),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"a": [[]] * 100_000}}),
        (CHAT, {"messages": MESSAGES, "documents": [{"a": "x" * MIB}]}),
        (CHAT, {"messages": [{**MESSAGES[0], "other": "x" * MIB}]}),
        (RESPONSES, {"input": "a", "chat_template_kwargs": {"a": [[]] * 100_000}}),
        ("/v1/messages", {"messages": MESSAGES, "metadata": {"a": [[]] * 100_000}}),
        ("/v1/messages", {"messages": [{**MESSAGES[0], "other": "x" * MIB}], "tools": BIG_TOOLS}),
        ("/api/chat", {"messages": [{**MESSAGES[0], "thinking": "x" * MIB}]}),
        ("/api/generate", {"prompt": "a", "keep_alive": "x" * MIB}),
        ("/completion", {"prompt": [4, 5], "dry_sequence_breakers": ["x" * MIB]}),
    ],
    ids=(
        "values",
        "text",
        "variables",
        "documents",
        "messages",
        "responses",
        "metadata",
        "tools",
        "thoughts",
        "keep_alive",
        "breakers",
    ),
)
def test_nothing_of_a_body_stays_while_its_answer_is_written(
    folder: Path, path: str, body: dict[str, Any]
) -> None:
    limits: dict[str, Any] = {
        RESPONSES: {"max_output_tokens": 100, "ignore_eos": True},
        "/v1/messages": {"max_tokens": 100, "temperature": 0},
        "/api/chat": {"options": {"num_predict": 100, "temperature": 0}},
        "/api/generate": {"options": {"num_predict": 100, "temperature": 0}},
        "/completion": {"n_predict": 100, "ignore_eos": True},
    }
    limit = limits.get(path, {"max_tokens": 100, "ignore_eos": True})
    sent = json.dumps({**body, **limit, "stream": True}).encode()
    with running(tiny_llm(folder)) as server:
        step = server.client.engine.core.step

        def slow() -> Any:
            time.sleep(0.05)
            return step()

        server.client.engine.core.step = slow  # type: ignore[method-assign]
        server.post(TEXT, {"prompt": [4], "max_tokens": 1})
        gc.collect()
        tracemalloc.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            connection.request("POST", path, sent, JSON)
            answer = connection.getresponse()
            assert answer.status == 200
            answer.readline()
            gc.collect()
            assert len(server.app.service.open_streams) == 1
            assert tracemalloc.get_traced_memory()[0] < MIB * 3 // 4
            connection.close()
        finally:
            tracemalloc.stop()


def test_bodies_together_hold_no_more_than_there_is_room_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 256 * 1024
    with running(tiny_llm(folder), max_body_bytes=largest) as server:
        room = server.app.service.bodies._arrived
        body = json.dumps({"prompt": [4], "max_tokens": 1, "metadata": {"a": "x" * 250_000}})
        left: list[int] = []
        statuses: list[int] = []
        add = room.add

        def add_and_note(holder: bodies.Reservation, amount: int) -> None:
            add(holder, amount)
            left.append(room.left)

        monkeypatch.setattr(room, "add", add_and_note)

        def send() -> None:
            statuses.append(server.ask("POST", TEXT, body.encode())[0])

        senders = [threading.Thread(target=send) for _ in range(12)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(PATIENCE_S)
        assert set(statuses) <= {200, 429}
        assert 200 in statuses
        assert 0 <= min(left) < room.total
        assert room.left == room.total == largest * 3 // 2


def test_bodies_that_hold_a_part_and_wait_for_more_do_not_all_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four bodies hold a quarter each and need another quarter: refusing one body is enough."""
    monkeypatch.setattr(bodies, "MAX_WAIT_S", 0.2)

    async def main() -> list[bool]:
        budget = ByteBudget(100)
        all_hold = asyncio.Barrier(4)

        async def read() -> bool:
            held = Reservation(budget)
            await held.grow(25)
            await all_hold.wait()
            try:
                await held.grow(50)
                return True
            except ApiError:
                return False
            finally:
                held.give_back()

        done = await asyncio.gather(*(read() for _ in range(4)))
        assert budget.left == budget.total
        return done

    assert sum(asyncio.run(main())) == 3


# ── whose ───────────────────────────────────────────────────────────────────────────────────


async def receive(body: Reservation) -> int:
    """Wait for more of a body that never comes; return the status of its refusal."""
    try:
        async with asyncio.timeout(PATIENCE_S) as body.receiving:
            await asyncio.Event().wait()
    except TimeoutError:
        assert body.refused is not None
        return body.refused.status
    finally:
        body.give_back()
    raise AssertionError


def refused(
    budget: ByteBudget, held: list[tuple[Sender, int]], asking: Sender, amount: int
) -> list[int | None]:
    """The bodies that lose their memory to the asking one, with the status they get."""

    async def main() -> list[int | None]:
        holders = [Reservation(budget, sender) for sender, _ in held]
        for holder, (_, size) in zip(holders, held, strict=True):
            await holder.grow(size)
        receiving = [asyncio.create_task(receive(holder)) for holder in holders]
        await asyncio.sleep(0)
        asker = Reservation(budget, asking)
        try:
            await asker.grow(amount)
        finally:
            asker.give_back()
            ended = [task.result() if task.done() else None for task in receiving]
            for task in receiving:
                task.cancel()
            await asyncio.wait(receiving)
        assert budget.left == budget.total
        return ended

    return asyncio.run(main())


A, B = Sender(0, "10.0.0.1"), Sender(1, "10.0.0.1")
A_ELSEWHERE = Sender(0, "10.0.0.2")


@pytest.mark.parametrize(
    ("held", "asking", "amount", "ends"),
    [
        ([(A, 50), (A, 50)], B, 30, [429, None]),
        ([(A, 50), (A, 50)], B, 60, [429, 429]),
        ([(A, 60), (B, 40)], B, 30, None),  # B would have more than A
        ([(A, 20), (A, 60), (B, 20)], B, 30, [429, 429, None]),
        ([(A, 70), (A_ELSEWHERE, 30)], A_ELSEWHERE, 30, [429, None]),
        ([(A, 40), (A_ELSEWHERE, 20), (B, 40)], A_ELSEWHERE, 15, [429, None, None]),
        ([(A, 100)], A, 30, None),
    ],
)
def test_the_share_that_holds_most_makes_room(
    monkeypatch: pytest.MonkeyPatch,
    held: list[tuple[Sender, int]],
    asking: Sender,
    amount: int,
    ends: list[int | None] | None,
) -> None:
    monkeypatch.setattr(bodies, "MAX_WAIT_S", 0.1)
    if ends is None:
        with pytest.raises(ApiError, match="too many large requests"):
            refused(ByteBudget(100), held, asking, amount)
    else:
        assert refused(ByteBudget(100), held, asking, amount) == ends


def test_slow_senders_lose_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow bodies lose memory even to a body of their own client, the slowest body first."""
    monkeypatch.setattr(bodies, "SLOW_AFTER_S", -1.0)
    slow = ByteBudget(100, slow_rate=1e9)
    assert refused(slow, [(A, 60), (A, 15), (A, 25)], A, 30) == [None, 408, 408]


def test_a_client_that_waits_often_takes_no_turns_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_WAIT_S", 0.2)

    async def main() -> tuple[list[Any], Any]:
        budget = ByteBudget(100)
        full = Reservation(budget, A)
        await full.grow(100)
        greedy = [asyncio.create_task(Reservation(budget, A).grow(50)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        other = asyncio.create_task(Reservation(budget, B).grow(50))
        await asyncio.sleep(0)
        full.give_back()
        return await asyncio.gather(*greedy, return_exceptions=True), await other

    answers, _ = asyncio.run(main())
    assert [str(one) for one in answers].count("None") == 1  # there was room for one of them


def test_another_key_sends_large_bodies_beside_many_that_trickle(folder: Path) -> None:
    keys = ("first", "second")
    large = {"prompt": [4], "max_tokens": 1, "metadata": {"a": "x" * 200_000}}
    with running(tiny_llm(folder), max_body_bytes=256 * 1024, api_keys=keys) as server:
        room = server.app.service.bodies._arrived
        part = b"{" + b" " * 60_000
        senders = [announce(server, 250_000, part, key=keys[0]) for _ in range(8)]
        until = time.monotonic() + PATIENCE_S
        while room.left > 60_000:
            assert time.monotonic() < until
            time.sleep(0.005)
        for _ in range(10):
            headers = {**JSON, "Authorization": f"Bearer {keys[1]}"}
            assert server.ask("POST", TEXT, large, headers)[0] == 200
        for sender in senders:
            sender.close()


# ── how slowly ──────────────────────────────────────────────────────────────────────────────


def announce(server: Running, num_bytes: int, sent: bytes, key: str = "any") -> socket.socket:
    sender = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n"
    sender.sendall(f"{head}Content-Length: {num_bytes}\r\n\r\n".encode() + sent)
    return sender


def test_what_is_only_announced_takes_no_room(server: Running) -> None:
    senders = [announce(server, 8 * MIB, b"{") for _ in range(40)]
    long = {"prompt": [4], "max_tokens": 1, "metadata": {"a": "x" * 7 * MIB}}
    server.post(TEXT, long)
    for sender in senders:
        sender.close()


def test_a_sender_that_is_too_slow_is_told_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "RATE_WINDOW_S", 0.5)
    with running(tiny_llm(folder), min_body_bytes_per_s=1000) as server:
        slow = announce(server, 8 * MIB, b"{" * 200)
        started = time.monotonic()
        answer = b""
        while piece := slow.recv(4096):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"--min-body-bytes-per-s" in answer
        assert time.monotonic() - started < 10  # body_timeout_s is 60
        slow.close()
        # One that keeps the rate may take longer than the window.
        body = json.dumps({"prompt": [4], "max_tokens": 1, "metadata": {"a": "x" * 4000}}).encode()
        steady = announce(server, len(body), b"")
        for at in range(0, len(body), 800):
            steady.sendall(body[at : at + 800])
            time.sleep(0.2)
        assert steady.recv(4096).startswith(b"HTTP/1.1 200")
        steady.close()


# ── how many ────────────────────────────────────────────────────────────────────────────────


def test_connections_beyond_the_limit_are_told_so_and_streams_go_on(folder: Path) -> None:
    with running(tiny_llm(folder), max_connections=8) as server, watched(server) as tokens:
        idle = [socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) for _ in range(7)]
        until = time.monotonic() + PATIENCE_S
        while len(server.server.server_state.connections) < 8:
            assert time.monotonic() < until
            time.sleep(0.005)
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as refused:
            answer = refused.recv(4096)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        assert b"8 connections are open already" in answer
        before = tokens()
        while tokens() < before + 5:
            assert time.monotonic() < until
            time.sleep(0.005)
        for connection in idle:
            connection.close()


# ── the limits ──────────────────────────────────────────────────────────────────────────────


def test_limits_follow_the_context_and_can_be_set() -> None:
    plain = ServeSettings()
    assert BodyReader(plain, 8192).max_bytes == 8 * MIB
    assert BodyReader(plain, 1_000_000).max_bytes == 64_000_000
    assert BodyReader(plain, 8192).max_weight == 512 * 1024
    assert BodyReader(plain, 1_000_000).max_weight == 8_000_000
    own = BodyReader(ServeSettings(max_body_bytes=2048, max_body_weight=4096), 8192)
    assert (own.max_bytes, own.max_weight) == (2048, 4096)


def test_what_agents_and_evaluations_send_is_well_within_the_limits(server: Running) -> None:
    """The request is refused for its length, by a model with a short context, not for its shape."""
    ids = {"prompt": list(range(100, 600)) * 256, "max_tokens": 1}  # 128,000 of them
    error = refusal(server.ask("POST", TEXT, ids), 400)
    assert error["code"] == "context_length_exceeded"
    turns = [{"role": r, "content": 'He said: {"a": [1, 2]}, so. ' * 20} for r in ("user", "tool")]
    error = refusal(server.ask("POST", CHAT, {"messages": turns * 250}), 400)
    assert error["code"] == "context_length_exceeded"
    batch = {"prompt": [[4, 5, 6] * 10] * 128, "max_tokens": 1}
    assert len(server.post(TEXT, batch)["choices"]) == 128
