"""Measurements of `hostile.py`: the stream of a client beside an attack, and the memory and the CPU
time of processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
from itertools import pairwise
from pathlib import Path
from time import perf_counter

ATTACK_S = 180.0
MIB = 1024**2


class Victim(threading.Thread):
    """A client that streams without end and records the time of each event."""

    def __init__(self, port: int, key: str | None = None) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.errors: list[str] = []
        self._port, self._key = port, key
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.is_set():
            try:
                self._stream()
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                self._done.wait(0.1)

    def _stream(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ATTACK_S)
        asked = {"prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        body = json.dumps(asked | {"stream": True, "temperature": 0})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        for line in answer:
            if line.startswith(b"data: {"):
                self.times.append(perf_counter())
                if b'"error"' in line:
                    self.errors.append(line.decode()[:200])
            if self._done.is_set():
                break
        connection.close()

    def end(self) -> None:
        self._done.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Return the gaps that overlap this time, including a silence at its end."""
        times = [when for when in list(self.times) if when <= end] + [end]
        return [after - before for before, after in pairwise(times) if after > start]


class Memory(threading.Thread):
    """The peak resident memory of a process and its children by command."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.02):
            self.now = self._measure()
            for name, size in self.now.items():
                self.peak[name] = max(size, self.peak.get(name, 0))

    def restart(self) -> dict[str, int]:
        """Return the memory now, and reset the peaks."""
        self.now = self._measure()
        self.peak = dict(self.now)
        return dict(self.now)

    def end(self) -> None:
        self._done.set()

    def _measure(self) -> dict[str, int]:
        sizes = {"http": _rss(self._pid)}
        engine = 0
        others = 0
        for pid in children(self._pid):
            size = _rss(pid)
            if size > engine:
                engine, size = size, engine
            others += size
        return {**sizes, "engine": engine, "helpers": others}


def kv_bytes(pid: int) -> int:
    """Return the resident bytes of the engine's largest mapping, which is the KV cache."""
    largest = resident = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Size":
                size = int(value.split()[0])
            elif name == "Rss" and size > largest:
                largest, resident = size, 1024 * int(value.split()[0])
    return resident


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has ended meanwhile
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *children(child)]
    return found


def others_cpu_s() -> float:
    """Return the CPU time of all other processes since the start of the machine, including other
    guests of the hypervisor."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = ticks[:8]
    own = 0
    for pid in [os.getpid(), *children(os.getpid())]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += sum(map(int, fields[11:15]))  # its own and its ended children's
    return (user + nice + system + irq + softirq + steal - own) / os.sysconf("SC_CLK_TCK")


def engine_pid(http_pid: int) -> int:
    """Return the largest child process of the server."""
    return max(children(http_pid), key=_rss, default=0)
