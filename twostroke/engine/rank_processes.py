"""`RankProcesses`: the processes (`rank.py`) of the ranks other than the first.

to a rank     frames on its stdin: the settings, then one plan for each step; a rank whose stdin is
              closed ends
from a rank   lines of JSON on its stdout: "beat" (a heartbeat), {"stage": the stage of its start,
              "" once it runs steps}, "ready" (to join the other ranks), or [class, message] of
              the error that ends the rank

A rank that sends nothing for too long is killed, during its start and afterwards. The other ranks
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
HEADER_BYTES = 8  # the size of a frame's header, which has the length of the frame
JOIN_TIMEOUT_S = 300.0  # from the start until a rank is ready; importing torch may take minutes
START_SILENCE_S = 300.0  # a starting rank may be silent: an import can block its heartbeats
IMPORTING = "importing its modules"  # the first stage of a rank's start
HEARTBEAT_S = 0.5  # between two heartbeats of a rank
GRACE_S = 5.0  # a step may notice the end of a rank before its process has ended
DUMP_STACKS_S = 0.2  # time for a rank to write its stacks
POLL_S = 0.01  # between two checks for a rank that has ended


class RankProcess:
    """The process of one rank, with a thread that reads the messages of the rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self._process = rank, process
        self.ready_or_ended = threading.Event()  # the rank can join the others, or has ended
        self.end_noticed_s: float | None = None  # when the rank reported an error, or ended
        self.error_class = ""  # class of the rank's last error; "": an unexpected error
        self.stage = IMPORTING  # stage of the rank's start; "" once the rank runs steps
        self.last_message_s = monotonic()  # when the last message arrived
        self._killed_because = ""
        self._last_error = ""
        threading.Thread(target=self._listen, name=f"twostroke-rank-{rank}", daemon=True).start()

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_message_s = monotonic()
            match json.loads(line):
                case "ready":
                    self.ready_or_ended.set()
                case {"stage": str(stage)}:
                    self.stage = stage
                case [str(error_class), str(message)]:
                    self.error_class, self._last_error = error_class, message
                    self.end_noticed_s = monotonic()
        self._process.wait()
        self.end_noticed_s = self.end_noticed_s or monotonic()
        self.ready_or_ended.set()

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill_if_silent(self, timeout_s: float) -> None:
        """Kill the rank if it has sent nothing for `timeout_s`. During its start a rank has at
        least `START_SILENCE_S`, unless the process is stopped by a signal."""
        stopped = child_process.is_stopped(self._process.pid)
        if self.stage and not stopped:
            timeout_s = max(timeout_s, START_SILENCE_S)
        silent_s = monotonic() - self.last_message_s
        if silent_s <= timeout_s or self.has_ended:
            return
        if stopped:
            what, advice = "was stopped and ", "find out what stopped it (SIGSTOP, a debugger)"
        else:
            what, advice = "", "raise --engine-hang-timeout-s if the machine is only slow"
        self._killed_because = (
            f"rank {self.number} {what}sent nothing for {silent_s:.0f} s while "
            f"{self.stage or 'running steps'}, so its process was killed; {advice}"
        )
        self._process.kill()

    def dump_stacks(self) -> None:
        """Make the rank write the stacks of its threads to stderr, and wait a moment."""
        if hasattr(signal, "SIGUSR1"):
            self._process.send_signal(signal.SIGUSR1)
            sleep(DUMP_STACKS_S)

    def how_it_ended(self) -> str:
        """Return the reason of the rank's end, as a message for the user."""
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
        error = f": {self._last_error}" if self._last_error else ""
        return f"rank {self.number} {status}{error}"


class RankProcesses:
    """The processes of all ranks but the first. The first rank runs in this process."""

    def __init__(self, config: EngineConfig, module: str = MODULE) -> None:
        """Start the processes without waiting. `config.model`: the path of the model's files."""
        folder = OwnedFolder("twostroke-ranks-")
        self.store_path = os.path.join(folder.path, "store")
        processes = [_spawn(module) for _ in range(1, config.tensor_parallel_size)]
        self._finalizer = weakref.finalize(self, _end, processes, folder)
        self.ranks = [RankProcess(n, process) for n, process in enumerate(processes, 1)]
        if config.hang_timeout_s:
            # The thread has no reference to `self`, so that `self` can be collected and finalized.
            args = (self.ranks, config.hang_timeout_s)
            threading.Thread(target=_watch, args=args, name="ranks", daemon=True).start()
        settings = dataclasses.asdict(config)
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # the rank has ended: `wait_for_all` raises
                rank.send(json.dumps([settings, rank.number, self.store_path]).encode())

    def wait_for_all(self) -> None:
        """Wait until all ranks are ready to join at the store of `store_path`. Raise if a rank has
        ended or is not ready in time."""
        deadline_s = monotonic() + JOIN_TIMEOUT_S
        for rank in self.ranks:
            if not rank.ready_or_ended.wait(deadline_s - monotonic()):
                rank.dump_stacks()
                raise EngineError(
                    f"rank {rank.number} was not ready within {JOIN_TIMEOUT_S:.0f} s of its start: "
                    f"the rank is still {rank.stage}. Its stacks are on stderr if the rank could "
                    "write them. Start again when the machine and the disk of the Python packages "
                    "are less busy"
                )
        self.check()

    def check(self) -> None:
        """Raise the reason if a rank has ended."""
        if any(rank.end_noticed_s for rank in self.ranks):
            raise self._error()

    def send(self, data: bytes) -> None:
        for rank in self.ranks:
            rank.send(data)

    def failure(self) -> str:
        """Return the reason of the first rank's end; if no rank has ended, return "" after every
        rank has written its stacks to stderr."""
        first = self._first_to_end()
        if first is not None:
            return first.how_it_ended()
        for rank in self.ranks:
            rank.dump_stacks()
        return ""

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Run a part of the start in all ranks. End the ranks if this part raises an exception. If
        the exception is unexpected and a rank has ended, raise the reason of the rank's end."""
        try:
            yield
        except BaseException as error:
            try:
                is_unexpected = isinstance(error, Exception) and not isinstance(
                    error, TwostrokeError
                )
                if is_unexpected and self._first_to_end() is not None:
                    raise self._error() from None
                raise
            finally:
                self.close()

    def close(self) -> None:
        self._finalizer()

    def _first_to_end(self) -> RankProcess | None:
        """Wait up to `GRACE_S` for a rank that has ended. Return the rank that ended first, which
        is the reason why other ranks end; None if no rank has ended."""
        deadline_s = monotonic() + GRACE_S
        while not (ended := [rank for rank in self.ranks if rank.end_noticed_s]):
            if monotonic() >= deadline_s:
                return None
            sleep(POLL_S)
        return min(ended, key=lambda rank: rank.end_noticed_s or 0.0)

    def _error(self) -> TwostrokeError:
        first = self._first_to_end()
        assert first is not None
        return unpack_error(first.error_class, first.how_it_ended(), "the engine could not start")


def _watch(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    """Kill ranks that are silent, until all ranks have ended."""
    slept_from = monotonic()
    while not all(rank.has_ended for rank in ranks):
        sleep(min(1.0, timeout_s / 4))
        now = monotonic()
        overslept, slept_from = now - slept_from > timeout_s / 2, now
        for rank in ranks:
            if overslept:  # this process was itself stopped: heartbeats of the ranks are unread
                rank.last_message_s = now
            rank.kill_if_silent(timeout_s)


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
    """Read a frame of `RankProcess.send`. Return b"" if the first rank has closed the file."""
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return b""
    size = int.from_bytes(header, "little")
    data = file.read(size)
    return data if len(data) == size else b""
