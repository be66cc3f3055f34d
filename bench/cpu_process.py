"""Engine processes that are stopped while other engines are measured, for bench/cpu.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any


class PausedProcess:
    """A process with its children in its own session, stopped except inside `awake()`."""

    def __init__(self, command: list[str], environment: dict[str, str], piped: bool) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        out: Any = pipe if piped else self._log
        self.started_s = perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=out,
            stderr=self._log,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        said = lines[-1][:300] if lines else "no word"
        code = self.process.poll()
        return f"{signal.Signals(-code).name}: {said}" if code is not None and code < 0 else said

    def peak_bytes(self) -> int:
        """Return the sum of the processes' peak memory; shared pages count twice."""
        return sum(_status(pid, "VmHWM") * 1024 for pid in self._family())

    def close(self) -> None:
        for which in (signal.SIGCONT, signal.SIGTERM):
            self._signal(which)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _cpu_s(self) -> float:
        """Return the CPU time of the process, its children, and ended children."""
        ticks = 0
        for pid in self._family():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, stat[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, which: signal.Signals) -> None:
        for pid in self._family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def _family(self) -> list[int]:
        """Return the ids of the session's processes."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(after_name[3]) == self.process.pid and after_name[0] != "Z":
                        found.append(int(entry.name))
        return found


def _busy_s() -> float:
    """Return the CPU time of all processes since the machine started, including stolen time."""
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _status(pid: int, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


class Worker(PausedProcess):
    """A process that runs `cpu_workers.py` and answers one line at a time."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        super().__init__(command, environment, piped=True)
        self._child_peak = 0
        self._read()
        self.start_s = perf_counter() - self.started_s
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[list[int]], output: int) -> dict[str, float]:
        with self.awake():
            before, own_before, start = _busy_s(), self._cpu_s(), perf_counter()
            assert self.process.stdin is not None
            try:
                self.process.stdin.write(json.dumps({"prompts": prompts, "output": output}) + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(self.last_words()) from None
            answer = self._read()
            others = (_busy_s() - before) - (self._cpu_s() - own_before)
            answer["others"] = others / (perf_counter() - start) / (os.cpu_count() or 1)
        self._child_peak = max(self._child_peak, int(answer.get("child_peak_kib", 0)) * 1024)
        return answer

    def peak_bytes(self) -> int:
        """Return the peak memory, including ended children."""
        return max(super().peak_bytes(), self._child_peak)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise RuntimeError(self.last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer
