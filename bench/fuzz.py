"""A fuzzer of the HTTP API: no call may break, block or slow down the server.

    python -m bench.fuzz [--calls 5000] [--seed 0] [--engine instant|tiny] [--json FILE]
        [--first 0] [--patience-s 30]
    python -m bench.fuzz --seed 0 --only 1234            # repeat and print one call

A real server runs on real sockets with its engine in a separate process: an engine that computes
nothing (`instant`) or a tiny random model (`tiny`, which also follows grammars). Every route of
`/openapi.json` is called with valid bodies, mutated bodies, hostile values of the right type, bytes
that are not JSON, and bytes that are not HTTP, with and without streaming; some clients disconnect
early. A call follows from (seed, index) alone. Several calls run at once, to find effects of one
call on another.

Failures: a 5xx (except a documented 501, and 503 with Retry-After, which are counted), another
server error inside a stream, an engine that dies, a missing answer or no answer in time, an error
that is not in its API's format, a path or a traceback in an answer, an engine that is not idle or
whose KV audit fails at the end. Each failure is printed with the bytes that caused it. Exit
code 1 if there are any. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fuzz_calls import BODY_BYTES, Call, Maker, request
from bench.output import write_result
from tests.instant import BUILDER
from tests.tiny import tiny_folder
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.serve.server import HttpServer, serve_forever
from twostroke.serve.settings import ServeSettings

HANG_S = 30.0  # `--patience-s`
PAGES = (b" / ", b" /?", b" /#", b"/dash", b"/docs", b"/learn ", b"/learn?")  # for people
WORKERS = 6
LIMITS: dict[str, Any] = {
    "port": 0,
    "drain_s": 5.0,
    "max_body_bytes": BODY_BYTES,
    "max_queue": 512,
    "max_choices": 128,
    "head_timeout_s": 2.0,
    "body_timeout_s": 2.0,
    "trust_request_chat_template": True,
}

# ── answers ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class HttpAnswer:
    status: int = 0  # 0: none came
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False
    hung: bool = False


def send(port: int, call: Call, patience_s: float = HANG_S) -> HttpAnswer:
    until = time.monotonic() + patience_s
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as connection:
        with contextlib.suppress(OSError):  # the server may refuse before the end of the body
            connection.sendall(call.data)
        got = b""
        answer = HttpAnswer()
        while not answer.whole and (call.leave_after is None or len(got) < call.leave_after):
            connection.settimeout(max(0.001, until - time.monotonic()))
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                answer.hung = True
                break
            except OSError:
                data = b""
            got += data
            answer = parse(got, not data, call.data.startswith(b"HEAD "))
            if not data:
                break
        return answer


def parse(got: bytes, closed: bool, no_body: bool) -> HttpAnswer:
    head, found, rest = got.partition(b"\r\n\r\n")
    if found and head.startswith(b"HTTP/1.1 100"):
        head, found, rest = rest.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    match = re.match(r"HTTP/1\.[01] (\d{3})", line)
    if not found or match is None:
        return HttpAnswer(body=got)
    pairs = (one.partition(":") for one in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    answer = HttpAnswer(int(match[1]), headers, rest)
    if no_body:
        answer.body, answer.whole = b"", True
    elif "content-length" in headers:
        answer.whole = len(rest) >= int(headers["content-length"])
        answer.body = rest[: int(headers["content-length"])]
    elif headers.get("transfer-encoding") == "chunked":
        answer.body, answer.whole = _unchunked(rest)
    else:
        answer.whole = closed
    return answer


def _unchunked(rest: bytes) -> tuple[bytes, bool]:
    body: list[bytes] = []
    at = 0
    while (end := rest.find(b"\r\n", at)) >= 0:
        size = int(rest[at:end], 16)
        if not size:
            return b"".join(body), True
        body.append(rest[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(body), False


# ── checks of answers ─────────────────────────────────────────────────────────────────────────────

INSIDES = re.compile(
    rb"Traceback|File \\?\"|/(?:work|opt|usr|home|tmp|root|var|proc)/[\w./-]+|site-packages"
    rb"|\b[\w/]+\.(?:py|rs)\b(?::\d+)?|0x[0-9a-f]{8,}|panicked at"
)


def problem_of(call: Call, answer: HttpAnswer) -> str:
    """Return the problem of an answer, or an empty text."""
    if answer.hung:
        return "no answer in time"
    if call.leave_after is not None and not answer.whole:
        return ""
    if not answer.status:
        return "no answer" if call.due else ""
    if answer.status >= 500 and not _documented(call, answer):
        return f"status {answer.status}"
    if not answer.whole:
        return "the answer breaks off"
    for found in INSIDES.finditer(answer.body):
        if found.group() not in call.data and b"openapi" not in call.data[:40]:
            return f"the answer tells of our insides: {found.group()!r}"
    if call.data.startswith(b"HEAD "):
        return ""
    try:
        return _wrong_shape(call, answer)
    except (ValueError, KeyError, TypeError) as error:
        return f"the answer cannot be read: {error!r}"


NOT_DONE = (
    b"/learn/attention",  # of a server that does not know the files of its model
    b"/v1/embeddings",
    *(b"/api/" + name for name in (b"pull", b"push", b"create", b"copy", b"delete", b"embed")),
)


def _documented(call: Call, answer: HttpAnswer) -> bool:
    if answer.status == 503:
        return "retry-after" in answer.headers
    return answer.status == 501 and call.data[:40].split(b" ")[1].startswith(NOT_DONE)


def _wrong_shape(call: Call, answer: HttpAnswer) -> str:
    kind = answer.headers.get("content-type", "")
    if answer.status >= 400:
        if not kind.startswith("application/json"):
            return f"an error as {kind!r}"
        return _wrong_error(_json(answer.body))
    if kind.startswith("text/event-stream"):
        return _wrong_stream(call, answer.body)
    if kind.startswith("application/x-ndjson"):
        return _wrong_lines(answer.body)
    if kind.startswith("application/json"):
        _json(answer.body)
        return ""
    texts = {b"/metrics": "text/plain"} | dict.fromkeys(PAGES, "text/html")
    fits = any(route in call.data[:40] and kind.startswith(text) for route, text in texts.items())
    return "" if fits else f"an answer as {kind!r}"


def _wrong_error(content: Any) -> str:
    """Return the problem of an error that is not in OpenAI's, Anthropic's or Ollama's format."""
    error = content["error"]
    if isinstance(error, str):
        return "" if set(content) == {"error"} and error else f"no error: {str(content)[:300]}"
    texts = isinstance(error["message"], str) and isinstance(error["type"], str)
    if content.get("type") == "error":
        right = set(content) == {"type", "error"} and set(error) - {"details"} == {
            "type",
            "message",
        }
    else:
        names = isinstance(error["param"], str | None)
        names = names and isinstance(error["code"], str | int | None)
        right = set(content) == {"error"} and names
    if right and texts and error["message"]:
        return ""
    return f"not an error in its API's shape: {str(content)[:300]}"


ENDS = (b"completed", b"incomplete", b"failed")


def _wrong_stream(call: Call, body: bytes) -> str:
    """Return the problem of a stream: an event that is not JSON, a server error, or no end."""
    data = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    last = b""
    event: Any = {}
    for last in data:
        if last == b"[DONE]":
            continue
        event = _json(last)
        if event.get("error") and (wrong := _wrong_event_error(event)):
            return wrong
        if event.get("type") == "response.failed":
            message = event["response"]["error"]["message"]
            if not message.startswith("the engine failed"):  # as a 503 would say
                return f"an error in the stream: {message}"
    ends = (b"[DONE]", *(b'{"type":"response.%b"' % end for end in ENDS))
    # Anthropic's and llama-server's last events; of the latter some fields may have been asked for.
    ended = event.get("type") in ("message_stop", "error") or event.get("stop") is True
    ended = ended or last.startswith(ends) or "error" in event or b"response_fields" in call.data
    return "" if ended else f"the stream ends with {last[:100]!r}"


def _wrong_event_error(event: Any) -> str:
    error = event["error"]
    message = error if isinstance(error, str) else error["message"]
    told = message.startswith("the engine failed")  # as a 503 would say
    shape = event if event.get("type") == "error" else {"error": error}
    return _wrong_error(shape) or ("" if told else f"an error in the stream: {message}")


def _wrong_lines(body: bytes) -> str:
    """Return the problem of Ollama's stream: lines of JSON, the last of which ends the stream."""
    lines = [_json(line) for line in body.splitlines()]
    for line in lines:
        if "error" in line and (wrong := _wrong_event_error(line)):
            return wrong
    if body[-1:] == b"\n" and (lines[-1].get("done") or "error" in lines[-1]):
        return ""
    return f"the stream ends with {body[-100:]!r}"


def _json(body: bytes) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} in JSON")

    return json.loads(body, parse_constant=refuse)


# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class FuzzServer:
    port: int
    http: HttpServer
    engine: RemoteEngine
    loop: asyncio.AbstractEventLoop
    first_pid: int

    def described(self) -> dict[str, Any]:
        call = Call(-1, "", "", request("GET", "/openapi.json", b""))
        return _json(send(self.port, call).body)

    def leftovers(self) -> str:
        """Return what is left on the idle server, or an empty text."""
        service, until = self.http._app.service, time.monotonic() + HANG_S
        while service.open_streams or service.admission.num_open or len(self.engine._outputs):
            if time.monotonic() > until:
                streams, sequences = len(service.open_streams), service.admission.num_open
                return f"{streams} streams, {sequences} sequences open"
            time.sleep(0.01)
        try:
            asyncio.run_coroutine_threadsafe(self.engine.audit(), self.loop).result(HANG_S)
        except Exception as error:
            return f"audit: {error!r}"
        if self.engine.pid != self.first_pid:
            return "the engine died, and another was started"
        load = self.engine.load()
        counts = (load.waiting, load.running, load.kv.used, load.kv.fragmented)
        if any(counts):
            return f"waiting, running, KV used and fragmented: {counts}"
        status = send(self.port, Call(-1, "", "", request("GET", "/health", b""))).status
        return "" if status == 200 else f"/health says {status}"


@contextlib.contextmanager
def serving(folder: Path, engine: str) -> Iterator[FuzzServer]:
    builder = BUILDER if engine == "instant" else DEFAULT_BUILDER
    config = EngineConfig(
        model=str(tiny_folder(folder)), max_num_seqs=64, num_gpu_blocks_override=1024
    )
    started = threading.Event()
    found: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def client() -> AsyncIterator[RemoteEngine]:
        async with await RemoteEngine.start(config, builder) as remote:
            yield remote

    def note(http: HttpServer, remote: RemoteEngine, url: str) -> None:
        port = int(url.rpartition(":")[2])
        found["server"] = FuzzServer(port, http, remote, asyncio.get_running_loop(), remote.pid)
        started.set()

    def run() -> None:
        try:
            asyncio.run(serve_forever(client, ServeSettings(**LIMITS), note))
        except BaseException as error:
            found["error"] = error
            started.set()

    thread = threading.Thread(target=run, name="http", daemon=True)
    thread.start()
    started.wait()
    if "error" in found:
        raise found["error"]
    server: FuzzServer = found["server"]
    while not server.http.started:
        time.sleep(0.002)
    try:
        yield server
    finally:
        server.http.stop()
        thread.join(HANG_S)


def fuzz(
    server: FuzzServer,
    seed: int,
    indices: Iterable[int],
    show: bool = False,
    patience_s: float = HANG_S,
) -> dict[str, Any]:
    """Make the calls, print each failure, and return the counts and the failures."""
    maker = Maker(server.described(), seed)
    lock = threading.Lock()
    statuses: dict[str, Counter[str]] = {}
    kinds: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest: dict[str, Any] = {"wall_s": 0.0, "index": -1}
    began = time.monotonic()

    def one(index: int) -> None:
        call = maker.make(index)
        at = time.monotonic()
        answer = send(server.port, call, patience_s)
        wall_s = time.monotonic() - at
        problem = problem_of(call, answer)
        left = call.leave_after is not None and not answer.whole
        told = "left" if left else str(answer.status or "closed")
        with lock:
            statuses.setdefault(call.route, Counter())[told] += 1
            kinds[call.kind] += 1
            if wall_s > slowest["wall_s"]:
                about = {"kind": call.kind, "route": call.route, "status": told}
                slowest.update(wall_s=round(wall_s, 3), index=index, **about)
            if problem:
                failures.append({"index": index, "route": call.route, "problem": problem})
            if problem or show:
                print(f"seed {seed}, call {index} ({call.kind}, {call.route}): {problem or told}")
                print(f"    sent {call.data[:1500]!r}, {len(call.data):,} bytes in all")
                print(f"    got  {answer.status} {answer.body[:600]!r}", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        for done in [pool.submit(one, index) for index in indices]:
            done.result()
    leftovers = server.leftovers()
    if leftovers:
        failures.append({"index": -1, "route": "", "problem": f"at the end: {leftovers}"})
        print(failures[-1]["problem"])
    total: Counter[str] = sum(statuses.values(), Counter())
    return {
        "calls": sum(total.values()),
        "patience_s": patience_s,
        "seed": seed,
        "failures": sorted(failures, key=lambda failure: failure["index"])[:50],
        "num_failures": len(failures),
        "statuses": dict(sorted(total.items())),
        "kinds": dict(kinds),
        "routes": {
            route: dict(sorted(counts.items())) for route, counts in sorted(statuses.items())
        },
        "slowest": slowest,
        "wall_s": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="begin here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("instant", "tiny"), default="instant")
    parser.add_argument("--only", type=int, metavar="INDEX", help="make this call alone")
    parser.add_argument(
        "--patience-s", type=float, default=HANG_S, help="for an answer, on a busy machine"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    indices = range(args.first, args.first + args.calls) if args.only is None else [args.only]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), args.engine) as server:
        result = fuzz(server, args.seed, indices, args.only is not None, args.patience_s)
    result = {"bench": "fuzz", "engine": args.engine, "machine": platform.machine(), **result}
    for route, counts in result["routes"].items():
        print(f"{route:28} " + "  ".join(f"{name}: {count}" for name, count in counts.items()))
    write_result(result, args.json, indent=1)
    return 1 if result["num_failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
