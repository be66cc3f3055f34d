"""Faults of a server's processes: every request ends exactly once, and nothing is left behind.

    python -m bench.faults [--only NAME ...] [--json FILE] [--faketime LIBRARY] [--list]

Each case starts `twostroke serve` on the default model, in a temporary directory of its own.
Clients stream all the time, with some long prompts. A fault (SIGKILL or SIGSTOP) hits a process at
a stage: its start, a prefill, a hand-over, decode. Afterwards the server must answer again. A
request ends exactly once: with `[DONE]`, whole or after an error event, or with an error's status;
a request that is silent for `PATIENCE_S`, or that goes on after its end, breaks the case. When the
server has ended, no process of it, no folder in its temporary directory, no file in /dev/shm and no
listening socket may be left. Exit code 1 if a case is broken.

All time limits are multiplied by FAULTS_SLOW from the environment, for a machine on which other
programs run.

`--faketime` names libfaketime.so.1 (Debian's package libfaketime); without it the case of clock
jumps is not run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

SLOW = float(os.environ.get("FAULTS_SLOW", "1"))  # how much slower a busy machine may be
PATIENCE_S = 180.0 * SLOW
CLIENTS = 4
HANG_TIMEOUT_S = 3 * SLOW  # after which the server replaces an engine that is silent
LONG = [100 + n * 31 % 40_000 for n in range(2500)]  # a prompt of several chunks
STAGES = ("prefill", "decode", "start")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
DAY_S = 86_400


class CaseFailed(Exception):  # noqa: N818
    """A failed case. The message describes the failure."""


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


def tree(pid: int) -> dict[int, str]:
    """Return the command lines of a process's descendants by their ids."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in map(int, (task / "children").read_text().split()):
                    command = Path(f"/proc/{child}/cmdline").read_bytes()
                    found[child] = command.replace(b"\0", b" ").decode(errors="replace")
                    found |= tree(child)
    return found


def alive(pid: int, command: str) -> bool:
    """Return whether the process still runs. Another process with its id does not count."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return state not in "ZX" and now == command
    return False


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    until = monotonic() + patience_s
    while not (found := condition()):
        if monotonic() > until:
            raise CaseFailed(f"not within {patience_s:.0f} s: {what}")
        sleep(0.01)
    return found


class FaultedServer:
    """A `twostroke serve` process in its own temporary directory."""

    def __init__(
        self,
        *flags: str,
        env: dict[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        folder: Path,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder / "tmp"
        self.folder.mkdir(exist_ok=True)
        self.log = folder / "server.log"
        self.seen: dict[int, str] = {}  # processes that were there at some time
        self._shared = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "twostroke", "serve", "--port", str(self.port), *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": str(self.folder)} | (env or {}),
                preexec_fn=prepare,
            )

    def look(self) -> dict[int, str]:
        now = tree(self.process.pid)
        self.seen |= now
        return now

    def find(self, name: str, known: set[int] | frozenset[int] = frozenset()) -> int:
        """Return a process whose command has this name; 0: there is none."""
        return next((p for p, said in self.look().items() if name in said and p not in known), 0)

    def status(self, path: str = "/health") -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def wait_until_up(self) -> None:
        def up() -> bool:
            if self.process.poll() is not None:
                raise CaseFailed(f"the server has ended: {self.log.read_text()[-300:]}")
            return self.status() == 200

        wait_for(up, "/health answers 200")

    def end(self, how: int = signal.SIGTERM) -> None:
        self.look()
        self.process.send_signal(how)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise CaseFailed("SIGTERM did not end the server within 60 s") from None

    def check_nothing_left(self, folders: bool = True) -> None:
        """Check that nothing is left. `folders`: also no socket folders."""

        def left() -> list[str]:
            found = [f"process {p}: {s}" for p, s in self.seen.items() if alive(p, s)]
            found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shared]
            if folders:
                found += [str(one) for one in self.folder.glob("twostroke-*")]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    found.append(f"a socket listens on {self.port}")
            return found

        wait_for(lambda: not left(), f"nothing is left: {left()[:3]}", 30.0)


# ── clients ───────────────────────────────────────────────────────────────────────────────────────


class StreamedRequest:
    """A streamed request, which the caller's thread reads to its end."""

    def __init__(self, port: int, **fields: Any) -> None:
        self.port = port
        self.fields = {"stream": True, "ignore_eos": True, "temperature": 0, **fields}

    def run(self, on_event: Callable[[dict[str, Any]], None] | None = None) -> str:
        """Return how it ended. Raises `CaseFailed` if it did not end, or ended twice."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(self.fields), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                answer.read()
                return f"status {answer.status}"
            return self._read(answer, on_event)
        except TimeoutError:
            raise CaseFailed(f"a request was silent for {PATIENCE_S:.0f} s") from None
        except (OSError, http.client.HTTPException):
            return "disconnected"
        finally:
            connection.close()

    def _read(
        self,
        answer: http.client.HTTPResponse,
        on_event: Callable[[dict[str, Any]], None] | None,
    ) -> str:
        ended = errors = finished = 0
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if ended:
                raise CaseFailed(f"an event came after the end of a request: {line[:80]!r}")
            if line.startswith(b"data: [DONE]"):
                ended += 1
                continue
            event = json.loads(line[6:])
            errors += "error" in event
            finished += any(one.get("finish_reason") for one in event.get("choices", ()))
            if on_event is not None:
                on_event(event)
        if not ended:
            return "disconnected"
        if errors + finished != 1:
            raise CaseFailed(f"a request ended {errors} times by error and {finished} times well")
        return "error event" if errors else "whole"


@dataclass
class FaultLoad:
    """Clients that send one request after the other, and the outcomes of the requests."""

    server: FaultedServer
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        work = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]
        self._threads = work
        for thread in work:
            thread.start()

    def _run(self, client: int) -> None:
        number = client
        while not self._over.is_set():
            number += CLIENTS
            prompt = [number, *LONG[: 100 if number % 5 else 800]]
            try:
                asking = StreamedRequest(
                    self.server.port, prompt=prompt, max_tokens=8 + number % 40
                )
                end = asking.run()
            except CaseFailed as problem:
                self.problems.append(str(problem))
                return
            self.ends[end] += 1
            if end.startswith(("status", "disconnected")):
                self._over.wait(0.05)

    def stop(self) -> None:
        """Raises `CaseFailed` if a request did not end, or ended twice."""
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S + 30)
            if thread.is_alive():
                self.problems.append("a request does not end")
        if self.problems:
            raise CaseFailed(self.problems[0])

    def whole(self) -> int:
        return self.ends["whole"]


@contextmanager
def served(folder: Path, *flags: str, **more: Any) -> Iterator[tuple[FaultedServer, FaultLoad]]:
    """Run a server under load, stop the server, and check that nothing is left."""
    server = FaultedServer(*flags, folder=folder, **more)
    try:
        server.wait_until_up()
        load = FaultLoad(server)
        yield server, load
        load.stop()
        check_answers(server)
        server.end()
        server.check_nothing_left()
    finally:
        server.look()
        server.process.kill()
        server.process.wait()


def check_answers(server: FaultedServer) -> None:
    end = StreamedRequest(server.port, prompt="Once upon", max_tokens=8).run()
    if end != "whole":
        raise CaseFailed(f"afterwards a request ends with: {end}")


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


def at_stage(server: FaultedServer, stage: str, victim: Callable[[], int], how: int) -> int:
    """Send the signal when a request is at the stage. Returns the process that got it."""
    hit: list[int] = []

    def strike() -> None:
        if not hit and (pid := victim()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
                hit.append(pid)

    def on_event(event: dict[str, Any]) -> None:
        progress = event.get("prompt_progress")
        done = progress["processed"] / progress["total"] if progress else 0.0
        reached = {
            "prefill": True,
            "hand-over": done > 0.8,
            "decode": any(one.get("text") for one in event.get("choices", ())),
        }
        if reached[stage]:
            strike()

    if stage == "start":
        strike()
    until = monotonic() + PATIENCE_S
    while not hit:
        if monotonic() > until:
            raise CaseFailed(f"no request came to the stage {stage}")
        prompt = [int(monotonic() * 1e3) % 40_000, *LONG]
        StreamedRequest(server.port, prompt=prompt, max_tokens=64, return_progress=True).run(
            on_event
        )
    return hit[0]


def strike_and_recover(
    server: FaultedServer, load: FaultLoad, name: str, stage: str, how: int, skip: int = 0
) -> None:
    """Inject one fault into a process of this name, and wait until the server answers again."""

    def victim() -> int:
        found = [pid for pid, said in server.look().items() if name in said]
        return found[skip] if len(found) > skip else 0

    if stage == "start":  # the successor of one that is killed
        old = set(server.look())
        os.kill(wait_for(victim, name), signal.SIGKILL)
        pid = wait_for(lambda: server.find(name, old), f"a successor of {name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
    else:
        pid = at_stage(server, stage, victim, how)
    command = server.seen.get(pid, "")
    wait_for(lambda: not alive(pid, command), f"the end of {name} ({signal.Signals(how).name})")
    server.wait_until_up()
    before = load.whole()
    wait_for(lambda: load.whole() > before or load.problems, "a whole answer after the fault")


def strikes(folder: Path, name: str, stages: tuple[str, ...], *flags: str) -> str:
    limit = ("--engine-hang-timeout-s", str(HANG_TIMEOUT_S), "--engine-restart-limit", "1000")
    with served(folder, *limit, *flags) as (server, load):
        for stage in stages:
            for how in SIGNALS:
                strike_and_recover(server, load, name, stage, how)
    return said_of(load, len(stages) * len(SIGNALS))


def said_of(load: FaultLoad, faults: int) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in load.ends.most_common())
    return f"{faults} faults; requests: {ends}"


def engine(folder: Path) -> str:
    return strikes(folder, "twostroke.engine.process", STAGES)


def thirty_kills(folder: Path) -> str:
    with served(folder, "--engine-restart-limit", "1000") as (server, load):
        for n in range(30):
            stage = STAGES[n % 3]
            strike_and_recover(server, load, "twostroke.engine.process", stage, signal.SIGKILL)
    return said_of(load, 30)


def ranks(folder: Path) -> str:
    flags = ("--kernels", "reference", "--tensor-parallel-size", "3", "--max-model-len", "4096")
    return strikes(folder, "twostroke.engine.rank", STAGES, *flags)


def pools(folder: Path) -> str:
    said = []
    flags = ("--prefill-engines", "1", "--decode-engines", "1")
    limit = ("--engine-hang-timeout-s", str(HANG_TIMEOUT_S), "--engine-restart-limit", "1000")
    with served(folder, *limit, *flags) as (server, load):
        for skip in range(2):  # the prefill engine and the decode engine
            for stage in ("prefill", "hand-over", "decode", "start"):
                for how in SIGNALS:
                    name = "twostroke.engine.process"
                    strike_and_recover(server, load, name, stage, how, skip)
        said.append(said_of(load, 16))
    return "; ".join(said)


# ── the HTTP process, the clock, memory ───────────────────────────────────────────────────────────


def http_stopped(folder: Path) -> str:
    """Stop the server's own process for longer than an engine may be silent."""
    with served(folder, "--engine-hang-timeout-s", str(HANG_TIMEOUT_S)) as (server, load):
        pid = wait_for(lambda: server.find("twostroke.engine.process"), "an engine")
        for _ in range(3):
            before = load.whole()
            wait_for(lambda before=before: load.whole() > before, "an answer")  # type: ignore[misc]
            server.process.send_signal(signal.SIGSTOP)
            sleep(2 * HANG_TIMEOUT_S)  # the fault
            server.process.send_signal(signal.SIGCONT)
            before = load.whole()
            wait_for(lambda before=before: load.whole() > before + CLIENTS, "answers")  # type: ignore[misc]
        if server.find("twostroke.engine.process") != pid:
            raise CaseFailed("the engine was replaced though it was not silent")
    if set(load.ends) != {"whole"}:
        raise CaseFailed(f"requests ended otherwise: {dict(load.ends)}")
    return said_of(load, 3)


def http_killed(folder: Path) -> str:
    """Kill the server while its engine is stopped. The next server removes the folder."""
    for number in range(2):
        server = FaultedServer(folder=folder)
        server.wait_until_up()
        left = list(server.folder.glob("twostroke-*"))
        if len(left) != 1:
            raise CaseFailed(f"{len(left)} folders, and not the one of this server: {left}")
        check_answers(server)
        if number == 0:
            os.kill(server.find("twostroke.engine.process"), signal.SIGSTOP)
            server.end(signal.SIGKILL)
            server.check_nothing_left(folders=False)
        else:
            server.end()
            server.check_nothing_left()
    return "the stopped engine ended with its server; the next server removed its folder"


def clock_jumps(folder: Path, library: str) -> str:
    """Let the wall clock jump by days. (The monotonic clock cannot jump.)"""
    file = folder / "time"
    file.write_text("+0")
    env = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1",
           "DONT_FAKE_MONOTONIC": "1"}  # fmt: skip
    with served(folder, "--engine-hang-timeout-s", str(HANG_TIMEOUT_S), env=env) as (server, load):
        pid = wait_for(lambda: server.find("twostroke.engine.process"), "an engine")
        for jump_s in (DAY_S, -DAY_S, 3650 * DAY_S, -3650 * DAY_S, 0):
            file.write_text(f"{jump_s:+d}")
            before = load.whole()
            wait_for(lambda before=before: load.whole() > before + 2 * CLIENTS, "answers")  # type: ignore[misc]
        if server.find("twostroke.engine.process") != pid:
            raise CaseFailed("the engine was replaced")
    if set(load.ends) != {"whole"}:
        raise CaseFailed(f"requests ended otherwise: {dict(load.ends)}")
    return said_of(load, 5)


def memory_limit(folder: Path) -> str:
    """Start servers with address spaces (ulimit -v) from too small to large enough."""
    said = []
    for mib in (150, 300, 600, 1200, 2400, 6000):
        size = mib * 1024**2

        def confine(size: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (size, size))

        flags = ("--kv-cache-memory-bytes", str(256 * 1024**2), "--engine-restart-limit", "3")
        server = FaultedServer(*flags, folder=folder, prepare=confine)
        try:
            wait_for(lambda s=server: s.process.poll() is not None or s.status() == 200, "a start")  # type: ignore[misc]
            if server.process.poll() is None:
                load = FaultLoad(server)
                wait_for(lambda one=load, s=server: one.ends.total() > 20 or one.problems  # type: ignore[misc]
                         or s.process.poll() is not None, "ends")  # fmt: skip
                load.stop()
                said.append(f"{mib} MiB: {dict(load.ends)}")
            else:
                lines = server.log.read_text().strip().splitlines()
                said.append(f"{mib} MiB: exit {server.process.returncode}, {lines[-1][:80]!r}")
            if server.process.poll() is None:
                server.end()
            server.check_nothing_left()
        finally:
            server.process.kill()
            server.process.wait()
    return "; ".join(said)


CASES: dict[str, Callable[..., str]] = {
    "engine killed and stopped": engine,
    "30 kills in one run": thirty_kills,
    "rank killed and stopped": ranks,
    "engines of pools killed and stopped": pools,
    "HTTP process stopped": http_stopped,
    "HTTP process killed": http_killed,
    "clock jumps": clock_jumps,
    "memory limit": memory_limit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases whose name has this")
    parser.add_argument("--json", help="keep the results here, beside those of other cases")
    parser.add_argument("--faketime", metavar="LIBRARY", help="libfaketime.so.1")
    parser.add_argument("--list", action="store_true", help="the names, and no more")
    args = parser.parse_args()
    chosen = [name for name in CASES if not args.only or any(one in name for one in args.only)]
    if args.list:
        print("\n".join(chosen))
        return
    rows: dict[str, dict[str, Any]] = {}
    if args.json and Path(args.json).exists():
        rows = {row["case"]: row for row in json.loads(Path(args.json).read_text())["cases"]}
    for name in chosen:
        if name == "clock jumps" and args.faketime is None:
            print(f"{name:36} not run: --faketime is not given")
            continue
        more = (args.faketime,) if name == "clock jumps" else ()
        start, broken, said = monotonic(), "", ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                said = CASES[name](Path(folder), *more)
            except CaseFailed as problem:
                broken = str(problem)
        rows[name] = {"case": name, "took_s": round(monotonic() - start, 1)}
        rows[name] |= {"outcome": said, "broken": broken}
        print(f"{name:36} {'BROKEN ' + broken if broken else 'ok     ' + said}", flush=True)
        if args.json:
            ordered = [rows[one] for one in CASES if one in rows]
            result: dict[str, Any] = {
                "bench": "faults",
                "machine": platform.machine(),
                "cores": os.cpu_count(),
            }
            result |= {"slow": SLOW, "load": round(os.getloadavg()[2], 1)}
            Path(args.json).write_text(json.dumps(result | {"cases": ordered}) + "\n")
    sys.exit(any(rows[name]["broken"] for name in chosen if name in rows))


if __name__ == "__main__":
    main()
