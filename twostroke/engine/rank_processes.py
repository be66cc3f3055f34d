"""`RankProcesses`: the processes (`rank.py`) of the ranks other than the first.

to a rank     frames on its stdin: its settings, then a plan a step; closing stdin ends the rank
from a rank   lines of JSON on its stdout: heartbeats with the stage of its start, that it is ready
              to meet, or why it ends

A rank that is silent is killed, in every stage of its start and after it: then the other ranks
notice its end, and the engine ends with the reason.
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
START_SILENCE_S = 300.0  # an import may keep the interpreter from sending heartbeats for so long
IMPORTING = "importing its modules"  # the first stage of a rank's start
BEAT_S = 0.5  # between two heartbeats of a rank
GRACE_S = 5.0  # a step may notice the end of a rank before its process has ended
STACKS_S = 0.2
POLL_S = 0.01


class RankProcess:
    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank, self._process = rank, process
        self.has_come = threading.Event()  # it is ready to meet, or has ended
        self.noticed_s: float | None = None  # when it reported its end, or ended
        self.kind = ""  # the class of its last error, if that is meant for the user
        self.stage = IMPORTING  # of its start; "" once it runs steps
        self.heard_s = monotonic()  # when it sent its last message
        self._killed_because = ""
        self._last_words = ""
        threading.Thread(target=self._listen, name=f"twostroke-rank-{rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard_s = monotonic()
            match json.loads(line):
                case "here":
                    self.has_come.set()
                case {"stage": str(stage)}:
                    self.stage = stage
                case [str(kind), str(message)]:
                    self.kind, self._last_words = kind, message
                    self.noticed_s = monotonic()
        self._process.wait()
        self.noticed_s = self.noticed_s or monotonic()
        self.has_come.set()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill_if_silent(self, timeout_s: float) -> None:
        """Kill the rank if it has sent nothing for too long. A rank that starts has more time,
        unless it is stopped."""
        stopped = child_process.is_stopped(self._process.pid)
        if self.stage and not stopped:
            timeout_s = max(timeout_s, START_SILENCE_S)
        silent_s = monotonic() - self.heard_s
        if silent_s <= timeout_s or self.has_ended:
            return
        if stopped:
            what, advice = "was stopped and ", "find out what stopped it (SIGSTOP, a debugger)"
        else:
            what, advice = "", "raise --engine-hang-timeout-s if the machine is only slow"
        self._killed_because = (
            f"rank {self.rank} {what}sent nothing for {silent_s:.0f} s while "
            f"{self.stage or 'running steps'}, so its process was killed; {advice}"
        )
        self._process.kill()

    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to stderr, and wait for that."""
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            sleep(STACKS_S)

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        if self._killed_because:
            return self._killed_because
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
        if config.hang_timeout_s:
            watch = (self.ranks, config.hang_timeout_s)  # not `self`, which ends the ranks
            threading.Thread(target=_watch, args=watch, name="ranks", daemon=True).start()
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
                    f"rank {one.rank} has not come within {COME_S:.0f} s of its start: it is still "
                    f"{one.stage}; its stacks are on stderr, as far as it can write them. Start "
                    "again when the machine and the disk of the Python packages are less busy"
                )
        self.check()

    def check(self) -> None:
        """Raise the reason if a rank has ended."""
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


def _watch(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    """Kill ranks that are silent, until all ranks have ended."""
    slept_from = monotonic()
    while not all(one.has_ended for one in ranks):
        sleep(min(1.0, timeout_s / 4))
        now = monotonic()
        overslept, slept_from = now - slept_from > timeout_s / 2, now
        for one in ranks:
            if overslept:  # this process was stopped itself, and has not read the heartbeats
                one.heard_s = now
            one.kill_if_silent(timeout_s)


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
