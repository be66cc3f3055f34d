"""A long run of a server that has too little of everything: memory, places in its queue, patience.

    python -m bench.soak [--minutes 60] [--clients 12] [--seed 0] [--json FILE]

One prefill and one decode engine serve the default model. The KV cache is so small that requests
preempt each other, and the queue so short that requests are refused with 429. Clients in a process
of their own send every kind of request to several APIs, streamed and whole; some leave in the
middle of an answer. Every `AUDIT_S` seconds the engines audit their KV blocks while they work.

A failure is: a status other than 200 or 429 with Retry-After, an answer that breaks off or has
another number of tokens than it was asked for, an answer that takes longer than `HANG_S`, an audit
that finds an error, an engine that dies, a request or stream that is still open after the last
client has gone, or memory that grows by more than `MAX_GROWTH_MIB` a process between the second and
the last tenth of the run. Each is printed. The exit status is 1 if there are any. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from twostroke.config import EngineConfig
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine
from twostroke.serve.server import HttpServer, serve_forever
from twostroke.serve.settings import ServeSettings

HANG_S, SAMPLE_S, AUDIT_S = 600.0, 10.0, 60.0  # a full queue is a long wait on a busy machine
MAX_GROWTH_MIB = 64.0
KV_BLOCKS, MAX_MODEL_LEN, MAX_SEQUENCES, MAX_QUEUE = 80, 1024, 16, 16
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "rain",
    "fell",
    "over",
    "old",
    "stone",
    "roofs",
)


# ── clients ─────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Call:
    path: str
    body: dict[str, Any]
    num_tokens: int | None = None  # that the answer has
    leave_after: int | None = None  # bytes of the answer, of which the client reads no more


@dataclass
class Counts:
    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Requests one after another until `until_s`, drawn at random."""

    def __init__(self, port: int, seed: str, until_s: float, counts: Counts) -> None:
        super().__init__()
        self._port, self._until_s, self._counts = port, until_s, counts
        self._start_s = time.monotonic()
        self._random = random.Random(seed)

    def run(self) -> None:
        while time.monotonic() < self._until_s:
            call, sent_s = self._draw(), time.monotonic()
            try:
                told = self._send(call)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                told = f"failed: {error!r}"
            if told.startswith("failed"):
                sent = f"sent after {sent_s - self._start_s:.0f} s"
                ended = f"ended after {time.monotonic() - sent_s:.0f} s more"
                body = json.dumps(call.body)[:200]
                self._counts.failures.append(f"{call.path} {body}, {sent}, {ended}: {told}")
                told = "failed"
            self._counts.answers[f"{call.path} {told}"] += 1
            if told == "429":
                time.sleep(self._random.uniform(0.05, 0.5))

    def _draw(self) -> Call:
        chance, stream = self._random, self._random.random() < 0.7
        # Some prompts begin alike, so that they find cached blocks.
        prompt = " ".join(chance.choices(WORDS, k=chance.choice((5, 60, 400))))
        prompt = f"Story {chance.randrange(4)}. " * chance.choice((1, 40)) + prompt
        tokens = chance.choice((4, 40, 160, 300))
        messages = [{"role": "user", "content": prompt}]
        common = {"max_tokens": tokens, "ignore_eos": True, "stream": stream, "model": "soak"}
        if stream:
            common["stream_options"] = {"include_usage": True}
        kind = chance.choice(("text", "text", "chat", "chat", "several", "schema", "other"))
        if kind == "text":
            call = Call("/v1/completions", common | {"prompt": prompt}, tokens)
        elif kind == "chat":
            call = Call("/v1/chat/completions", common | {"messages": messages}, tokens)
        elif kind == "several":
            more = {"prompt": prompt, "n": 3, "logprobs": 2}
            call = Call("/v1/completions", common | more, 3 * tokens)
        elif kind == "schema":
            schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
            form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
            body = common | {"messages": messages, "response_format": form, "ignore_eos": False}
            call = Call("/v1/chat/completions", body)
        else:
            body = {"model": "soak", "max_tokens": tokens, "messages": messages, "stream": stream}
            call = Call("/v1/messages", body)
        if chance.random() < 0.25:
            call.leave_after = chance.choice((0, 1, 500, 5000))
        return call

    def _send(self, call: Call) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=HANG_S)
        try:
            body = json.dumps(call.body)
            connection.request("POST", call.path, body, {"Content-Type": "application/json"})
            if call.leave_after == 0:
                return "left"
            answer = connection.getresponse()
            if answer.status == 429:
                answer.read()
                return "429" if answer.headers["Retry-After"] else "failed: 429, no Retry-After"
            if answer.status != 200:
                return f"failed: {answer.status} {answer.read(300)!r}"
            if call.leave_after is not None:
                answer.read(call.leave_after)
                return "left"
            wrong = _wrong(call, answer.read())
            return f"failed: {wrong}" if wrong else "200"
        finally:
            connection.close()


def _wrong(call: Call, content: bytes) -> str:
    """Return what is wrong with an answer, or nothing."""
    if call.body["stream"]:
        events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
        ended = b"message_stop" in events[-1] or events.count(b"[DONE]") == 1
        if not ended or events[-1] == b"" or b'"error"' in content:
            return f"the stream ends with {content[-200:]!r}"
        usage = json.loads(events[-2])["usage"] if call.num_tokens is not None else {}
    else:
        usage = json.loads(content)["usage"]
    if call.num_tokens not in (None, usage.get("completion_tokens")):
        return f"{usage} instead of {call.num_tokens} tokens"
    return ""


def send_all(port: int, clients: int, seed: int, seconds: float, pipe: Connection) -> None:
    counts, until_s = Counts(), time.monotonic() + seconds
    threads = [Client(port, f"{seed} {n}", until_s, counts) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((dict(counts.answers), counts.failures))


# ── the server ──────────────────────────────────────────────────────────────────────────────────


class Server(threading.Thread):
    """The HTTP server in a thread of this process, with its engines in processes of their own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.started = threading.Event()
        self.http: HttpServer
        self.engine: RoutedEngine
        self.port = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        config = EngineConfig(
            num_gpu_blocks_override=KV_BLOCKS,
            max_num_seqs=MAX_SEQUENCES,
            max_model_len=MAX_MODEL_LEN,
        )
        pools = PoolSettings(prefill_engines=1, decode_engines=1)

        @contextlib.asynccontextmanager
        async def engine() -> AsyncIterator[RoutedEngine]:
            async with await RoutedEngine.start(pools.engines(config)) as routed:
                yield routed

        settings = ServeSettings(port=0, max_queue=MAX_QUEUE, served_model_names=("soak",))
        try:
            asyncio.run(serve_forever(engine, settings, self._note))
        except BaseException as error:
            self.error = error
            self.started.set()

    def _note(self, server: HttpServer, engine: RoutedEngine, url: str) -> None:
        self.http, self.engine = server, engine
        self.port = int(url.rpartition(":")[2])
        self._loop = asyncio.get_running_loop()
        self.started.set()

    def audit(self) -> str:
        """Return the error that an audit of all engines finds, or nothing."""
        try:
            asyncio.run_coroutine_threadsafe(self.engine.audit(), self._loop).result(HANG_S)
        except Exception as error:
            return f"audit: {error!r}"
        return ""

    def memory_mib(self) -> dict[str, float]:
        return {
            name: resident_mib(pid) for name, pid in ({"http": os.getpid()} | self.pids).items()
        }

    @property
    def pids(self) -> dict[str, int]:
        return {member.name: member.pid for member in self.engine.members}

    def preemptions(self) -> float:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=HANG_S) as answer:
            lines = answer.read().decode().splitlines()
        name = "vllm:num_preemptions_total{"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def left_open(self) -> str:
        service, until = self.http._app.service, time.monotonic() + HANG_S
        while service.open_streams or service.admission.num_open:
            if time.monotonic() > until:
                return f"{len(service.open_streams)} streams, {service.admission.num_open} requests"
            time.sleep(0.05)
        load = self.engine.load()
        counts = (load.waiting, load.running, load.kv.used, load.kv.fragmented)
        return f"waiting, running, used, fragmented: {counts}" if any(counts) else ""


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"process {pid} has no memory")


def growth_mib(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return what each process has grown by between the second and the last tenth of the run."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    return {
        name: round(
            statistics.median(one[name] for one in late)
            - statistics.median(one[name] for one in early),
            1,
        )
        for name in samples[0]
    }


def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (server.port, args.clients, args.seed, args.minutes * 60, theirs)
    sender = multiprocessing.get_context("spawn").Process(target=send_all, args=arguments)
    pids = server.pids
    sender.start()
    failures: list[str] = []
    samples, audits, next_audit = [], 0, time.monotonic() + AUDIT_S
    while not ours.poll(SAMPLE_S):
        samples.append(server.memory_mib())
        if time.monotonic() > next_audit:
            next_audit += AUDIT_S
            audits += 1
            if wrong := server.audit():
                failures.append(wrong)
                print(wrong, flush=True)
    answers, wrong_answers = ours.recv()
    sender.join()
    failures += wrong_answers + [end for end in (server.left_open(), server.audit()) if end]
    if server.pids != pids:
        failures.append("an engine died, and another was started")
    growth = growth_mib(samples)
    failures += [
        f"{name} grew by {mib} MiB" for name, mib in growth.items() if mib > MAX_GROWTH_MIB
    ]
    return {
        "bench": "soak",
        "machine": platform.machine(),
        "minutes": args.minutes,
        "requests": sum(answers.values()),
        "answers": dict(sorted(answers.items())),
        "preemptions": server.preemptions(),
        "audits": audits + 1,
        "growth_mib": growth,
        "last_mib": {name: round(mib, 1) for name, mib in samples[-1].items()},
        "num_failures": len(failures),
        "failures": failures[:50],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    server = Server()
    server.start()
    server.started.wait()
    if server.error is not None:
        raise server.error
    try:
        result = soak(server, args)
    finally:
        server.http.stop()
        server.join(HANG_S)
    for failure in result["failures"]:
        print(failure)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if result["num_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
