"""Many concurrent requests against a real server: none lost, nothing left, bounded memory.

The server and its engine are separate processes. `Server.look` reads the server's state over a
socket that only the tests have.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.instant import BUILDER, STEP_DELAY, expected_tokens
from twostroke.engine.spawn import DEFAULT_BUILDER

pytestmark = pytest.mark.core  # bounds of security

PATIENCE_S = 240  # what hangs fails its test; nothing else depends on it
REPOSITORY = Path(__file__).parents[2]
MIB = 1024**2
MAX_LEN = 32768
TEXT = "/v1/completions"
SCRIPT = """
import asyncio, json, os, socket, sys
from contextlib import asynccontextmanager
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.serve.server import serve
from twostroke.serve.settings import ServeSettings

given = json.loads(sys.argv[1])
control = socket.socket(fileno=given["control"])
control.setblocking(False)
keep = []
settings = ServeSettings(port=0, **given["settings"])

@asynccontextmanager
async def engine():
    config = EngineConfig(**given["engine"])
    limits = settings.engine_hang_timeout_s, settings.engine_restart_limit
    async with await RemoteEngine.start(config, given["builder"], None, *limits) as remote:
        yield remote

def seen(server, client):
    service, outputs, load = server._app.service, client._outputs, client.load()
    return {
        "pid": client.pid if client.healthy else 0,
        "open_streams": len(service.open_streams),
        "open": service.admission.num_open,
        "states": len(outputs) + len(outputs._running),
        "handles": len(client._handles) + len(client._names),
        "waiting": load.waiting,
        "running": load.running,
        "kv": load.kv.used + load.kv.fragmented,
        "unread": service.unread.num_bytes,
        "connections": len(server.server_state.connections),
        "tasks": len(asyncio.all_tasks()),
        "preempted": service.metrics.totals.preemptions,
        "prefilled": sum(step.prefill.tokens for step in client.records.steps),
        "files": len(os.listdir("/proc/self/fd")),
    }

async def answer(server, client, url):
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(control, json.dumps(url).encode() + b"\\n")
    while asked := await loop.sock_recv(control, 1):
        problem = ""
        if asked == b"a":
            try:
                await client.audit()
            except Exception as error:
                problem = repr(error)
        said = {**seen(server, client), "problem": problem}
        await loop.sock_sendall(control, json.dumps(said).encode() + b"\\n")

def started(server, client, url):
    keep.append(asyncio.get_running_loop().create_task(answer(server, client, url)))

serve(engine, settings, started)
"""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    control: socket.socket

    def look(self, audit: bool = False) -> dict[str, Any]:
        self.control.sendall(b"a" if audit else b"l")
        said = read_line(self.control)
        assert isinstance(said, dict)
        return said

    def until(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while not condition(seen := self.look()):
            assert time.monotonic() < end, f"it did not come to that: {seen}"
            time.sleep(0.01)
        return seen

    @contextmanager
    def engine_held(self) -> Iterator[None]:
        """Stop the engine, so that a test can inspect the waiting requests.

        A test may also kill it there.
        """
        pid = self.look()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def memory(self, name: str = "VmRSS") -> int:
        """Bytes of the HTTP process: VmRSS now, VmHWM at most until now."""
        with open(f"/proc/{self.process.pid}/status") as status:
            (line,) = (line for line in status if line.startswith(name + ":"))
        return int(line.split()[1]) * 1024

    def assert_nothing_left(self) -> dict[str, Any]:
        """Check that neither process has anything left of any request after the running ones have
        ended."""
        self.until(lambda seen: not (seen["open_streams"] or seen["connections"] or seen["states"]))
        seen = self.look(audit=True)
        assert seen["problem"] == ""
        names = ("open_streams", "open", "unread", "states", "handles")
        names += ("waiting", "running", "kv")
        assert {name: seen[name] for name in names} == dict.fromkeys(names, 0)
        return seen


@contextmanager
def served(
    model: Path | None,
    builder: str = BUILDER,
    step_s: float = 0.0,
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    output: int | None = None,
    **engine: Any,
) -> Iterator[Server]:
    """A server in its own process. `output` is where its stdout and stderr go."""
    mine, its = socket.socketpair()
    mine.settimeout(PATIENCE_S)
    given = {
        "control": its.fileno(),
        "engine": {"model": None if model is None else str(model), **engine},
        "builder": builder,
        "settings": {"max_choices": 128} | (settings or {}),  # whatever this machine's cores are
    }
    python_path = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    more = {"PYTHONPATH": python_path, STEP_DELAY: str(step_s), **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(given)],
        pass_fds=(its.fileno(),),
        env=os.environ | more,
        stdout=output,
        stderr=output,
    )
    its.close()
    try:
        url = read_line(mine)
        yield Server(process, int(url.rpartition(":")[2]), mine)
    finally:
        process.kill()  # its engine ends with it
        process.wait()
        mine.close()


def read_line(control: socket.socket) -> Any:
    line = b""
    while not line.endswith(b"\n"):
        part = control.recv(65536)
        assert part, "the server has ended"
        line += part
    return json.loads(line)


@pytest.fixture(autouse=True, scope="module")
def room_for_connections() -> Iterator[None]:
    """Raise the limit of open files in this process and in the servers, which inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ── a client ────────────────────────────────────────────────────────────────────────────────


@dataclass
class Answer:
    """The result of a request: its status, and the events of a stream."""

    status: int = 0
    content: bytes = b""
    ids: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False


class Asking:
    """One connection with one request on it."""

    def __init__(self, port: int, body: Any, receive_bytes: int | None = None) -> None:
        self.port, self.body = port, json.dumps(body).encode()
        self.answer = Answer()
        self._receive_bytes = receive_bytes

    async def connect(self) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        if self._receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        limit = 2**16 if self._receive_bytes is None else self._receive_bytes
        self.reader, self.writer = await asyncio.open_connection(sock=connection, limit=limit)

    @property
    def request(self) -> bytes:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return f"{head}Connection: close\r\nContent-Length: {len(self.body)}\r\n\r\n".encode() + (
            self.body
        )

    async def send(self) -> None:
        await self.connect()
        self.writer.write(self.request)
        await self.writer.drain()

    async def event(self) -> bytes | None:
        """The next event's data; None at the end. An answer that is no stream is its content."""
        answer = self.answer
        while line := await self.reader.readline():
            if not answer.status:
                answer.status = int(line.split()[1])
            elif line.startswith(b"data: "):
                data = line[6:].strip()
                self._take(data)
                return data
            elif line.startswith(b"{"):
                answer.content += line + await self.reader.read()
        return None

    def _take(self, data: bytes) -> None:
        answer = self.answer
        assert not answer.done, "something came after [DONE]"
        if data == b"[DONE]":
            answer.done = True
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = event["error"]
            return
        for choice in event["choices"]:
            answer.ids += choice["token_ids"]

    async def finish(self) -> Answer:
        while await self.event() is not None:
            pass
        self.writer.close()
        return self.answer

    def leave(self, reset: bool) -> None:
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection: socket.socket = self.writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()


async def ask(port: int, body: Any) -> Answer:
    asking = Asking(port, body)
    await asking.send()
    return await asking.finish()


def get(port: int, path: str) -> int:
    """The status of a GET."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        return int(connection.recv(65536).split()[1])


def stream_of(prompt: Sequence[int], count: int, **more: Any) -> dict[str, Any]:
    always = {"stream": True, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    return {"prompt": list(prompt), "max_tokens": count, **always, **more}


def prompt_of(n: int) -> list[int]:
    """A prompt that is unique for its number."""
    return [50 + n % 200, 50 + n // 200 % 200, *(50 + (7 * n + k) % 200 for k in range(n % 11))]


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, PATIENCE_S))


def assert_exact(answer: Answer, prompt: Sequence[int], count: int, written: list[int]) -> None:
    assert (answer.status, answer.error, answer.done) == (200, None, True), answer
    assert answer.ids == expected_tokens(prompt, count, written)


# ── load ────────────────────────────────────────────────────────────────────────────────────


def test_1000_streams_at_once_lose_nothing_in_bounded_memory(
    folder: Path, written: list[int]
) -> None:
    streams, tokens = 1000, 40
    limits: dict[str, Any] = {
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 32768,
        "max_model_len": 4096,
    }
    with served(folder, step_s=0.02, **limits) as server:
        idle = server.memory()

        async def all_of_them() -> list[Answer]:
            asked = [Asking(server.port, stream_of(prompt_of(n), tokens)) for n in range(streams)]
            with server.engine_held():
                for asking in asked:
                    await asking.send()
                await asyncio.to_thread(server.until, lambda seen: seen["open_streams"] == streams)
            return await asyncio.gather(*(asking.finish() for asking in asked))

        answers = run(all_of_them())
        for n, answer in enumerate(answers):
            assert_exact(answer, prompt_of(n), tokens, written)
        server.assert_nothing_left()
        grown = server.memory("VmHWM") - idle
        print(f"{grown / MIB:.1f} MiB more")
        assert grown < 150 * MIB


def test_64_streams_on_the_default_model_lose_nothing() -> None:
    with served(None, DEFAULT_BUILDER, max_num_seqs=64, max_model_len=512) as server:

        async def all_of_them() -> list[Answer]:
            bodies = [stream_of([504 + n, 260, 321], 4) for n in range(64)]
            return await asyncio.gather(*(ask(server.port, body) for body in bodies))

        for answer in run(all_of_them()):
            assert (answer.status, answer.error, answer.done) == (200, None, True), answer
            assert len(answer.ids) == 4
        server.assert_nothing_left()


def test_slow_readers_hold_up_nobody_and_cost_little(folder: Path, written: list[int]) -> None:
    tokens, settings = 24_000, {"max_unread_bytes": 32 * MIB}
    with served(folder, settings=settings, max_num_seqs=64, max_model_len=MAX_LEN) as server:

        async def beside_them() -> None:
            await ask(server.port, stream_of([60], 100))
            before = server.memory()
            prompts = [61, 62], [61, 63]
            slow = [Asking(server.port, stream_of(p, tokens), receive_bytes=4096) for p in prompts]
            for asking in slow:
                await asking.send()
                await asking.event()  # and no more
            others = [ask(server.port, stream_of(prompt_of(n), 200)) for n in range(32)]
            for n, answer in enumerate(await asyncio.gather(*others)):
                assert_exact(answer, prompt_of(n), 200, written)
            await asyncio.to_thread(server.until, lambda seen: not seen["states"])
            assert server.look()["open_streams"] == 2, (
                "the kernel's buffers took all of it; ask for more"
            )
            grown = server.memory() - before
            print(f"{grown / MIB:.1f} MiB more")
            assert grown < 96 * MIB
            slow[0].leave(reset=True)
            assert_exact(await slow[1].finish(), prompts[1], tokens, written)

        run(beside_them())
        server.assert_nothing_left()


@pytest.mark.full  # more rounds
def test_2000_random_disconnects_leave_nothing(folder: Path, written: list[int]) -> None:
    rng = random.Random(0)
    kept = 0

    async def leave_at_random(port: int, n: int) -> None:
        nonlocal kept
        count = rng.choice([1, 3, 20, 60])
        prompt = prompt_of(n)
        more: dict[str, Any] = rng.choice(
            [{}, {}, {"n": 2}, {"stream": False}, {"stop": ["a", "e"]}]
        )
        asking = Asking(port, stream_of(prompt, count, **more))
        way = rng.choice(["silent", "head", "unread", "soon", "first", "middle", "end", "stay"])
        reset = rng.random() < 0.5
        await asking.connect()
        if way == "head":
            asking.writer.write(asking.request[: rng.randrange(1, len(asking.request))])
            await asking.writer.drain()
        elif way != "silent":
            asking.writer.write(asking.request)
            await asking.writer.drain()
        if way == "soon":
            await asyncio.sleep(rng.random() * 0.05)
        read = {"first": 1, "middle": rng.randrange(1, count + 1), "end": count}.get(way, 0)
        for _ in range(read):
            if await asking.event() is None:
                break
        if way != "stay":
            asking.leave(reset)
            return
        answer = await asking.finish()
        if not more:
            assert_exact(answer, prompt, count, written)
        assert answer.status == 200
        kept += 1

    async def all_of_them(port: int) -> None:
        places = asyncio.Semaphore(100)

        async def one(n: int) -> None:
            async with places:
                await leave_at_random(port, n)

        await asyncio.gather(*(one(n) for n in range(2000)))

    limits: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
    }
    with served(folder, step_s=0.001, num_gpu_blocks_override=200, **limits) as server:
        run(ask(server.port, stream_of([60], 3)))
        before = server.assert_nothing_left()
        run(all_of_them(server.port))
        after = server.assert_nothing_left()
        assert kept > 100
        assert after["files"] <= before["files"]
        assert after["tasks"] <= before["tasks"]
        assert get(server.port, "/health") == 200
        assert_exact(run(ask(server.port, stream_of([60], 50))), [60], 50, written)
