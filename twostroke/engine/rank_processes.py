"""`RankProcesses`: the processes (`rank.py`) of the ranks other than the first.

to a rank     frames on its stdin: its settings, then a plan a step; closing stdin ends the rank
from a rank   lines of JSON on its stdout: that it is ready to meet, or why it ends
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from time import monotonic, sleep
from typing import BinaryIO

from twostroke import child_process
from twostroke.config import EngineConfig
from twostroke.engine.wire import unpack_error
from twostroke.errors import EngineError, TwostrokeError
from twostroke.owned_folder import OwnedFolder

MODULE = "twostroke.engine.rank"
HEADER_BYTES = 8  # the length of a frame, before it
COME_S = 300.0  # for importing torch on a busy machine
GRACE_S = 5.0  # a step may notice the end of a rank before its process has ended
STACKS_S = 0.2
POLL_S = 0.01


class RankProcess:
    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank, self._process = rank, process
        self.has_come = threading.Event()  # it is ready to meet, or has ended
        self.noticed_s: float | None = None  # when it reported its end, or ended
        self.kind = ""  # the class of its last error, if that is meant for the user
        self._last_words = ""
        threading.Thread(target=self._listen, name=f"twostroke-rank-{rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match json.loads(line):
                case "here":
                    self.has_come.set()
                case [str(kind), str(message)]:
                    self.kind, self._last_words = kind, message
                    self.noticed_s = monotonic()
        self._process.wait()
        self.noticed_s = self.noticed_s or monotonic()
        self.has_come.set()

    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, and wait for that."""
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            sleep(STACKS_S)

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        if code is not None and code < 0:
            memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
            status = f"was ended by signal {-code}{memory}"
        else:
            status = f"ended with exit code {code}"
        words = f": {self._last_words}" if self._last_words else ""
        return f"rank {self.rank} {status}{words}"


class RankProcesses:
    def __init__(self, config: EngineConfig, module: str = MODULE) -> None:
        """Start the processes without waiting. `config.model`: the path of the model's files."""
        folder = OwnedFolder("twostroke-ranks-")
        self.meeting_place = os.path.join(folder.path, "store")
        processes = [_spawn(module) for _ in range(1, config.tensor_parallel_size)]
        self._finalizer = weakref.finalize(self, _end, processes, folder)
        self.ranks = [RankProcess(n, process) for n, process in enumerate(processes, 1)]
        settings = dataclasses.asdict(config)
        for one in self.ranks:
            with contextlib.suppress(OSError):  # `wait_for_all` tells that it has ended
                one.send(json.dumps([settings, one.rank, self.meeting_place]).encode())

    def wait_for_all(self) -> None:
        """Wait until all ranks are about to meet at the `meeting_place`; raise if one has ended or
        does not come."""
        until = monotonic() + COME_S
        for one in self.ranks:
            if not one.has_come.wait(until - monotonic()):
                one.dump_stacks()
                raise EngineError(
                    f"rank {one.rank} has not come within {COME_S:.0f} s of its start; what it is "
                    "doing is on stderr, as far as it can tell"
                )
        if any(one.noticed_s for one in self.ranks):
            raise self._error()

    def send(self, data: bytes) -> None:
        for one in self.ranks:
            one.send(data)

    def failure(self) -> str:
        first = self._first_to_end()
        if first is not None:
            return first.how_it_ended()
        for one in self.ranks:
            one.dump_stacks()
        return ""

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A block that all ranks run. If it fails because a rank ended, raises why it ended."""
        try:
            yield
        except BaseException as error:
            try:
                ours = isinstance(error, TwostrokeError) or not isinstance(error, Exception)
                if not ours and self._first_to_end() is not None:
                    raise self._error() from None
                raise
            finally:
                self.close()

    def close(self) -> None:
        self._finalizer()

    def _first_to_end(self) -> RankProcess | None:
        """Return the rank whose end made the others end."""
        until = monotonic() + GRACE_S
        while not (ended := [one for one in self.ranks if one.noticed_s]) and monotonic() < until:
            sleep(POLL_S)
        return min(ended, key=lambda one: one.noticed_s or 0.0, default=None)

    def _error(self) -> TwostrokeError:
        first = self._first_to_end()
        assert first is not None
        return unpack_error(first.kind, first.how_it_ended(), "the engine could not start")


def _spawn(module: str) -> subprocess.Popen[bytes]:
    return child_process.start(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: OwnedFolder) -> None:
    """End ranks by closing their stdin; kill those that do not end."""
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    for process in processes:
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    folder.remove()


def read_frame(file: BinaryIO) -> bytes:
    """Read a frame of `RankProcess.send`; b"": the first rank has ended."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return b""
    size = int.from_bytes(header, "little")
    data = file.read(size)
    return data if len(data) == size else b""
