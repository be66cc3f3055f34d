"""Requests whose clients leave at once: they cost other clients next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import PATIENCE_S, Running, running
from tests.server.test_load import Asking, ask, assert_exact, prompt_of, run, served, stream_of
from tests.tiny import tiny_llm
from twostroke.serve.generation.prompts import TEXT_THREADS, ThreadPool
from twostroke.serve.monitor.metrics import CLIENT_GONE

pytestmark = pytest.mark.core  # bounds of security

TEXT = "/v1/completions"
MANY = 300


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with running(tiny_llm(folder)) as server:
        yield server


def send(server: Running, prompt: str) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Answered:
    """The statuses of the responses of /v1/completions, from the metrics."""

    def __init__(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses: list[int] = []
        metrics = server.app.service.metrics

        def note(route: str, status: int) -> None:
            self.statuses.append(status)

        monkeypatch.setattr(metrics, "answered", note)


@contextlib.contextmanager
def loop_held(server: Running) -> Iterator[None]:
    """Block the server's event loop."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait(PATIENCE_S)

    assert server.server._loop is not None
    server.server._loop.call_soon_threadsafe(hold)
    assert held.wait(PATIENCE_S)
    try:
        yield
    finally:
        go.set()


def test_a_request_whose_client_closed_at_once_is_not_even_parsed(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Answered(server, monkeypatch)
    with loop_held(server):
        for n in range(MANY):
            send(server, f"left {n}").close()
    server.post(TEXT, {"prompt": "the fox", "max_tokens": 2})
    until(lambda: 200 in answered.statuses)
    assert answered.statuses == [200]


def test_2000_requests_that_were_left_are_never_tokenized_and_cost_no_step(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests lie whole in the kernel's buffers, with the ends of their connections."""
    engine = server.client.engine
    steps, tokenizer, texts = engine.core.records.steps, engine.input_processor.tokenizer, []
    assert tokenizer is not None
    encode = tokenizer.encode

    def counted(text: str, *rest: Any) -> list[int]:
        texts.append(text)
        return encode(text, *rest)

    monkeypatch.setattr(tokenizer, "encode", counted)
    server.post(TEXT, {"prompt": "the fox", "max_tokens": 2})
    steps_of_one = len(steps)
    with loop_held(server):
        for n in range(2000):
            send(server, f"left {n}").close()
    server.post(TEXT, {"prompt": "the dog", "max_tokens": 2})
    assert texts == ["the fox", "the dog"]
    assert len(steps) == 2 * steps_of_one
    until(lambda: server.app.service.admission.num_open == 0)


def test_a_request_that_was_left_in_the_queue_of_prompts_is_never_prepared(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = Answered(server, monkeypatch)
    prompts, prepared, gate = server.app.service.prompts, [], threading.Event()
    plain = prompts.prepare

    def prepare(prompt: Any, *rest: Any) -> Any:
        prepared.append(prompt)
        if prompt == "hold":
            gate.wait(PATIENCE_S)
        return plain(prompt, *rest)

    monkeypatch.setattr(prompts, "prepare", prepare)
    holding = [send(server, "hold") for _ in range(TEXT_THREADS)]
    until(lambda: len(prepared) == TEXT_THREADS)
    left = [send(server, f"left {n}") for n in range(20)]
    until(lambda: prompts._text._num_open == TEXT_THREADS + 20)
    for connection in left:
        connection.close()
    # The server notices while the threads are still busy with other requests.
    until(lambda: answered.statuses == [CLIENT_GONE] * 20)
    gate.set()
    assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in holding)
    server.post(TEXT, {"prompt": "the fox", "max_tokens": 2})
    assert prepared == ["hold"] * TEXT_THREADS + ["the fox"]


def test_a_job_that_was_left_keeps_nothing_of_its_request() -> None:
    async def leave() -> None:
        pool, gate, kept = ThreadPool("jobs", 1, 10), threading.Event(), set[int]()

        class Request:
            def __init__(self) -> None:
                kept.add(id(self))

            def __del__(self) -> None:
                kept.discard(id(self))

        def job(request: Request) -> Callable[[], int]:
            return lambda: id(request)

        busy = asyncio.create_task(pool.run(gate.wait))
        jobs = [asyncio.create_task(pool.run(job(Request()))) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(kept) == 5
        for one in jobs:
            one.cancel()
        await asyncio.wait(jobs)
        jobs.clear()
        del one
        assert not kept
        gate.set()
        await busy
        pool.close()

    run(leave())


def test_no_step_computes_requests_that_were_left_before_it(
    folder: Path, written: list[int]
) -> None:
    """An engine finds `MANY` requests and their aborts in its inbox, and then another's request.
    For the first few requests, the abort may arrive after the beginning of their step."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 4096}
    with served(folder, settings={"max_queue": 2 * MANY}, **limits) as server:

        async def leave() -> None:
            with server.engine_held():
                prompts = [[60 + n % 190, 60 + n // 190] * 25 for n in range(MANY)]
                left = [Asking(server.port, stream_of(prompt, 5)) for prompt in prompts]
                for asking in left:
                    await asking.send()
                await asyncio.to_thread(server.until, lambda seen: seen["open_streams"] == MANY)
                for asking in left:
                    asking.leave(reset=False)
                await asyncio.to_thread(server.until, lambda seen: seen["open_streams"] == 0)
                other = Asking(server.port, stream_of(prompt_of(7), 20))
                await other.send()
                await asyncio.to_thread(server.until, lambda seen: seen["open_streams"] == 1)
            assert_exact(await other.finish(), prompt_of(7), 20, written)
            assert_exact(await ask(server.port, stream_of([70], 5)), [70], 5, written)

        run(leave())
        assert server.look()["prefilled"] < MANY * 50 / 10
        server.assert_nothing_left()
