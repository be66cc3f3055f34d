"""What the HTTP side carries: many streams of one server-sent event a token, no model behind them.

    python bench/capacity.py [--streams 64 256 1000] [--json FILE]   # our server, an instant model
    python bench/capacity.py --url http://127.0.0.1:8000 --pid PID   # any OpenAI-compatible server
    python bench/capacity.py --calibrate                             # what the load client can take

The client must not be what is measured: it is several processes with raw sockets and epoll that
only count where events begin. On a small machine it still takes time from the server, so each
process's CPU time is told apart: what a token costs the HTTP side does not depend on who else runs.

Without a pace the clients look every 2 ms instead of at each token: woken for each, they would
cost as much as the server. (TTFT and ITL are then as coarse; with a pace they look at once.)

Closed loop: every stream is open before the clock starts, sends one request, and is read to its
end. TTFT and ITL are on the client's side; tokens that arrive together share their gap. With
`--pace MS` our engine gives a step its time, as a real one would, and every token says when it was
made: the added latency is from there to the client. Prints a table, ends with one JSON line.
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rpartition("/bench/")[0] or "."  # `bench` and `tests` are found there

import argparse  # noqa: E402
import asyncio  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import re  # noqa: E402
import resource  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402
from urllib.parse import urlsplit  # noqa: E402

from twostroke.measure.load.http_client import Connections, Endpoint  # noqa: E402
from twostroke.measure.load.sample_client import first_model  # noqa: E402
from twostroke.measure.load.stats import percentile  # noqa: E402

EVENT = b"\ndata:"  # JSON has no bare line feed, so this is where an event begins and nothing else
DONE = b"[DONE]"
KEEP = max(len(EVENT), len(DONE)) - 1  # of what came before, lest a boundary fall between reads
READ_BYTES = 1 << 14  # more would be mapped and unmapped at every read
STALL_S = 60.0
CONTEXT = multiprocessing.get_context("fork")


class Target(NamedTuple):
    host: str
    port: int
    path: str
    body: bytes

    def request(self) -> bytes:
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"{_authorization()}Content-Length: {len(self.body)}\r\n\r\n"
        )
        return head.encode() + self.body


class Seen(NamedTuple):
    """What one client process saw. Gaps are (seconds, tokens that share them)."""

    events: int
    tokens: int  # by the server's own count where it gives one, or else the events
    first_s: float  # monotonic, when the first request went out
    last_s: float
    ttft_s: list[float]
    gaps: list[tuple[float, int]]
    added_s: list[float]
    failed: list[str]
    cpu_s: float


# The load client


def client(target: Target, count: int, tick_s: float, started: Connection) -> None:
    """Open `count` streams, wait for the word, send all requests, read all answers."""
    sockets = {}
    for _ in range(count):
        sock = socket.create_connection((target.host, target.port), timeout=30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[sock.fileno()] = sock
    started.send("ready")
    started.recv()
    started.send(_drive(target.request(), sockets, tick_s))


def _drive(request: bytes, sockets: dict[int, socket.socket], tick_s: float) -> Seen:
    now, poll = time.monotonic, select.epoll()
    before = resource.getrusage(resource.RUSAGE_SELF)
    first = now()
    sent: dict[int, float] = {}
    last: dict[int, float] = {}  # when it last had an event
    held: dict[int, bytes] = {}  # what it read last
    tail = dict.fromkeys(sockets, b"")
    for fd, sock in sockets.items():
        sent[fd] = now()
        sock.sendall(request)
        sock.setblocking(False)
        poll.register(fd, select.EPOLLIN)
    events = tokens = 0
    ttft: list[float] = []
    gaps: list[tuple[float, int]] = []
    added: list[float] = []
    failed: list[str] = []
    while sockets:
        if tick_s:
            time.sleep(tick_s)
        ready = poll.poll(STALL_S)
        if not ready:
            failed += ["no event for a minute"] * len(sockets)
            break
        for fd, _ in ready:
            try:
                data = sockets[fd].recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                data, failed = b"", [*failed, str(error)]
            at = now()
            piece = tail[fd] + data
            if fd not in held and not piece.startswith(b"HTTP/1.1 200"):
                failed.append(piece[:300].decode(errors="replace") or "no answer")
                data = b""
            begun = piece.count(EVENT)
            if begun:
                events += begun
                if fd in last:
                    gaps.append((at - last[fd], begun))
                else:
                    ttft.append(at - sent[fd])
                last[fd] = at
                if STAMP in piece:
                    _read_stamps(piece, at, added)
            if DONE in piece or not data:
                if data:
                    tokens += _tokens_said(held.get(fd, b"") + piece)
                elif fd in last:
                    failed.append("the stream ended early")
                poll.unregister(fd)
                sockets.pop(fd).close()
                continue
            tail[fd], held[fd] = piece[-KEEP:], data
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return Seen(events, tokens or events, first, now(), ttft, gaps, added, failed, cpu)


def _tokens_said(end: bytes) -> int:
    found = re.search(rb'"completion_tokens": ?(\d+)', end)
    return int(found[1]) if found else 0


# When a token was made, as the engine wrote it into the token's text: see `bench/paced.py`.
STAMP = b"@"
STAMP_TICKS, STAMP_TICK_S = 10_000, 1e-4


def _read_stamps(piece: bytes, at: float, added: list[float]) -> None:
    """Of the newest token that came; the clock is the machine's, so both sides share it."""
    end = piece.rfind(STAMP)
    ticks = piece[end + 1 : end + 5]
    if ticks.isdigit():
        now_ticks = at / STAMP_TICK_S
        added.append((now_ticks - int(ticks)) % STAMP_TICKS * STAMP_TICK_S)


# One measurement


def measure(
    target: Target, streams: int, clients: int, tick_s: float, pids: list[int]
) -> dict[str, Any]:
    pipes = []
    for index in range(clients):
        ours, theirs = CONTEXT.Pipe()
        count = streams // clients + (index < streams % clients)
        process = CONTEXT.Process(target=client, args=(target, count, tick_s, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append((process, ours))
    for _, pipe in pipes:
        pipe.recv()
    processes = list(_family(pids))
    before = {pid: _cpu_s(pid) for pid in processes}
    for _, pipe in pipes:
        pipe.send("go")
    seen = [pipe.recv() for _, pipe in pipes]
    after = {pid: _cpu_s(pid) for pid in processes}
    for process, _ in pipes:
        process.join()
    wall = max(s.last_s for s in seen) - min(s.first_s for s in seen)
    tokens, events = sum(s.tokens for s in seen), sum(s.events for s in seen)
    failed = [reason for s in seen for reason in s.failed]
    row: dict[str, Any] = {
        "streams": streams,
        "tokens": tokens,
        "events": events,
        "failed": len(failed),
        "wall_s": wall,
        "tokens_per_s": tokens / wall,
        "ttft_ms": _percentiles([t for s in seen for t in s.ttft_s]),
        "itl_ms": _percentiles([gap / n for s in seen for gap, n in s.gaps for _ in range(n)]),
        "added_ms": _percentiles([t for s in seen for t in s.added_s]),
        "client_cpu_s": sum(s.cpu_s for s in seen),
        "client_us_per_token": 1e6 * sum(s.cpu_s for s in seen) / max(1, tokens),
        "processes": [
            {
                "pid": pid,
                "name": _name(pid, pids),
                "cpu_s": after[pid] - before[pid],
                "us_per_token": 1e6 * (after[pid] - before[pid]) / max(1, tokens),
                **_memory(pid),
            }
            for pid in processes
        ],
    }
    if failed:
        row["first_failure"] = failed[0]
    return row


def _percentiles(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    if not values:
        return {}
    found = {f"p{share}": 1e3 * percentile(values, share) for share in (50, 90, 99)}
    return found | {"max": 1e3 * max(values)}


def _family(pids: list[int]) -> Iterator[int]:
    """These processes and all below them."""
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(name)] = int(_stat(int(name))[1])
    for pid in pids:
        yield pid
        yield from _family([child for child, parent in parents.items() if parent == pid])


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()  # from the third field on


def _cpu_s(pid: int) -> float:
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> dict[str, float]:
    try:
        with open(f"/proc/{pid}/status") as file:
            said = dict(line.split(":", 1) for line in file)
    except OSError:
        return {}
    mib = {"rss_mib": "VmRSS", "peak_rss_mib": "VmHWM"}
    return {name: int(said[key].split()[0]) / 1024 for name, key in mib.items() if key in said}


def _name(pid: int, roots: list[int]) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
        if "resource_tracker" in words:
            return "tracker"
    return "http" if pid in roots else "engine"


def _authorization() -> str:
    key = os.environ.get("OPENAI_API_KEY")
    return f"Authorization: Bearer {key}\r\n" if key else ""


# What is measured


@contextlib.contextmanager
def calibration_server(tokens: int) -> Iterator[tuple[str, int]]:
    """Writes one event to each stream in turn: a system call a token, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    event = b'data: {"id":"x","choices":[{"index":0,"text":" word"}]}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(event), event)

    def serve() -> None:
        while True:
            listener.settimeout(None)
            socks = [listener.accept()[0]]
            listener.settimeout(0.05)  # a measurement opens all its streams before it begins
            with contextlib.suppress(TimeoutError):
                while True:
                    socks.append(listener.accept()[0])
            for sock in socks:
                sock.recv(READ_BYTES)
                sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(tokens):
                for sock in socks:
                    sock.sendall(chunk)
            for sock in socks:
                sock.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                sock.close()

    process = CONTEXT.Process(target=serve, daemon=True)
    process.start()
    assert process.pid is not None
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", process.pid
    process.kill()
    process.join()


def wait_until_up(url: str, process: subprocess.Popen[bytes], timeout_s: float = 60) -> None:
    split = urlsplit(url)
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((split.hostname, split.port), timeout=5) as sock,
        ):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if sock.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.1)
    raise SystemExit(f"no answer from {url}/health within {timeout_s:g} s")


@contextlib.contextmanager
def own_server(streams: int, pace_ms: float) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "bench.paced", str(port), str(streams), str(pace_ms)]
    process = subprocess.Popen(line, cwd=sys.path[0])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(url, process)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_target(url: str, args: argparse.Namespace) -> Target:
    split = urlsplit(url)
    assert split.hostname is not None
    body: dict[str, Any] = {
        "model": args.model or _first_model(url),
        "max_tokens": args.tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
    }
    if args.route == "chat":
        body["messages"] = [{"role": "user", "content": "Count."}]
    else:
        body["prompt"] = "Count."
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[args.route]
    return Target(split.hostname, split.port or 80, path, json.dumps(body).encode())


def _first_model(url: str) -> str:
    connections = Connections(Endpoint(url, os.environ.get("OPENAI_API_KEY")))
    return str(asyncio.run(first_model(connections))["id"])


def report(row: dict[str, Any]) -> None:
    print(
        f"{row['streams']:5} streams  {row['tokens_per_s']:9,.0f} tokens/s  "
        f"{row['tokens']:,} tokens in {row['events']:,} events, {row['failed']} failed"
    )
    for name in ("ttft_ms", "itl_ms", "added_ms"):
        if row.get(name):
            values = "  ".join(f"{key} {value:8.2f}" for key, value in row[name].items())
            print(f"      {name:9} {values}")
    for process in row["processes"]:
        print(
            f"      {process['name']:9} {process['cpu_s']:6.2f} CPU s  "
            f"{process['us_per_token']:6.1f} µs a token  {process.get('rss_mib', 0):6.0f} MiB"
        )
    print(
        f"      {'client':9} {row['client_cpu_s']:6.2f} CPU s  "
        f"{row['client_us_per_token']:6.1f} µs a token",
        flush=True,
    )
    if "first_failure" in row:
        print(f"      failure: {row['first_failure']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--pid", type=int, action="append", default=[], help="whose CPU to count")
    parser.add_argument("--model", help="the model's name there (default: the first it has)")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=200, help="a stream")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--route", choices=("completions", "chat"), default="completions")
    parser.add_argument("--pace", type=float, default=0, metavar="MS", help="our engine's step")
    parser.add_argument(
        "--tick", type=float, metavar="MS", help="how often a client looks (default: 2, or at once)"
    )
    parser.add_argument("--calibrate", action="store_true", help="measure the client itself")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server: contextlib.AbstractContextManager[tuple[str, int]]
    if args.url:
        server = contextlib.nullcontext((args.url, 0))
    elif args.calibrate:
        server, args.model = calibration_server(args.tokens), "calibration"
    else:
        server = own_server(max(args.streams), args.pace)
    rows = []
    tick_ms = (0 if args.pace else 2) if args.tick is None else args.tick
    with server as (url, pid):
        target, pids = make_target(url, args), args.pid or ([pid] if pid else [])
        measure(target, 8, 1, 0, pids)  # warm: imports, code, connections
        for streams in args.streams:
            row = measure(target, streams, args.clients, tick_ms / 1e3, pids)
            if not args.pace:
                del row["added_ms"]  # an engine without a pace only fills queues
            rows.append(row)
            report(row)
    line = json.dumps(
        {
            "bench": "http",
            "server": args.url or ("calibration" if args.calibrate else "twostroke"),
            "route": args.route,
            "tokens": args.tokens,
            "pace_ms": args.pace,
            "tick_ms": tick_ms,
            "clients": args.clients,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "results": rows,
        }
    )
    print(line)
    if args.json:
        with open(args.json, "w") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
