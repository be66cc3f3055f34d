"""`LimitedPool`: work that an input can make endless, done in processes that may die of it.

    ask ── socket pair ─▶ worker: read a request, work within the limits, answer, read the next
                            │ dies
        ◀── why ──────── zygote: reaps it, answers in its place, forks the next one

The zygote imports and prepares once; a worker is a fork of it, so that a dead one is replaced in
milliseconds. Neither has a socket of the server's, its environment or its keys. They end when the
program that asked closes its ends of the sockets, or is gone. No torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from time import sleep
from typing import Final

from twostroke import child_process
from twostroke.errors import EngineError, RequestError

Work = Callable[[bytes], bytes]
START_S: Final = 60.0  # for the zygote to be ready, on a machine that is busy
# What the environment may hold that Python or the clock need; no keys.
ENVIRONMENT: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ")
DONE, REFUSED, DIED = b"+", b"-", b"!"
OUT_OF_MEMORY: Final = 3  # a worker's exit status


@dataclass(frozen=True, slots=True)
class Limits:
    """For each request that a worker works on."""

    cpu_s: float
    wall_s: float
    memory_bytes: int  # address space beyond what a worker has when it begins
    stack_bytes: int = 4 * 1024**2
    nice: int = 0
    idle: bool = False  # only while nothing else wants the processor


class OverLimit(Exception):  # noqa: N818
    """The worker died of a request. `by_chance`: another time it might not."""

    def __init__(self, reason: str, by_chance: bool) -> None:
        super().__init__(reason)
        self.by_chance = by_chance


class LimitedPool:
    """Several threads may use one; each request takes a worker of its own."""

    def __init__(self, work: str, hello: bytes, workers: int, limits: Limits) -> None:
        """`work` is "module:function", which makes of `hello` what answers requests. It is called
        once, in the zygote; a `RequestError` that it raises is the answer to every request. Each
        new worker answers an empty request first, to be warm for the next."""
        self._work, self._hello, self._limits = work, hello, limits
        self._num_workers = workers
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def start(self) -> None:
        """Start the processes without waiting until they are ready. `ask` does it if nobody has."""
        self._started()

    def _started(self) -> _Zygote:
        with self._lock:
            if self._zygote is None:
                self._zygote = _Zygote(self._work, self._hello, self._num_workers, self._limits)
            return self._zygote

    def ask(self, request: bytes) -> bytes:
        """The answer. Raises what the work refuses (`RequestError`), and `OverLimit`."""
        zygote = self._started()
        worker = zygote.free.get()
        try:
            _send(worker, request)
            answer = _receive(worker)
        except OSError:
            answer = b""
        finally:
            zygote.free.put(worker)
        kind, text = answer[:1], answer[1:]
        if kind == DONE:
            return text
        if kind == REFUSED:
            raise RequestError(text.decode())
        if kind == DIED:
            raise OverLimit(*json.loads(text))
        with self._lock:  # the zygote is gone, or does not answer any more
            zygote.end()
            if self._zygote is zygote:
                self._zygote = None
        raise EngineError("a helper process has ended; the next request starts it again")

    def close(self) -> None:
        with self._lock:
            if self._zygote is not None:
                self._zygote.end()
                self._zygote = None


class _Zygote:
    """The processes as the program sees them that asked for them."""

    def __init__(self, work: str, hello: bytes, workers: int, limits: Limits) -> None:
        pairs = [socket.socketpair() for _ in range(workers)]
        theirs = [there for _, there in pairs]
        kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        arguments = [work, json.dumps(asdict(limits)), *(str(one.fileno()) for one in theirs)]
        self._process = child_process.start(
            "twostroke.limited",
            *arguments,
            pass_fds=[one.fileno() for one in theirs],
            # glibc gives each thread an arena of 64 MiB of addresses, which are limited here.
            env=kept | {"MALLOC_ARENA_MAX": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        ours = []
        for here, there in pairs:
            there.close()
            here.settimeout(START_S + limits.wall_s)
            self.free.put(here)
            ours.append(here)
        self.end = weakref.finalize(self, _end, self._process, ours)
        with contextlib.suppress(OSError):  # whoever asks learns that it has ended
            _send(ours[0], hello)


def _end(process: subprocess.Popen[bytes], sockets: list[socket.socket]) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        one.close()
    process.kill()
    process.wait()


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(struct.pack("<Q", len(message)))
    to.sendall(message)


def _receive(source: socket.socket) -> bytes:
    """A message, empty at the end."""
    head = _receive_bytes(source, 8)
    return _receive_bytes(source, struct.unpack("<Q", head)[0]) if head else b""


def _receive_bytes(source: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = source.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def run_when_idle() -> None:
    """Have this thread give way to all others at once, where the system can (Linux): threads that
    wait for each other at barriers, as a step's do, lose a time slice at each of them else."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


# ── in the zygote and its workers ───────────────────────────────────────────────────────────────


def main(work: str, limits_json: str, *files: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the program that asked
        signal.signal(number, signal.SIG_IGN)
    limits = Limits(**json.loads(limits_json))
    sockets = [socket.socket(fileno=int(file)) for file in files]
    module, _, function = work.partition(":")
    make = getattr(import_module(module), function)
    do = _prepared(make, _receive(sockets[0]))
    gc.freeze()  # pages that nobody writes stay shared
    # A byte for each worker, seen by both sides: whether it is at work on a request.
    busy = mmap.mmap(-1, len(sockets))
    workers = {_fork(do, n, sockets, busy, limits): n for n in range(len(sockets))}
    while workers:
        pid, status = os.wait()
        n = workers.pop(pid)
        if status == 0:
            continue  # nobody is left to ask it
        if busy[n]:
            busy[n] = 0
            with contextlib.suppress(OSError):
                _send(sockets[n], DIED + json.dumps(_cause(status, limits)).encode())
        else:
            sleep(0.1)  # it should not have died; not all the time, at least
        workers[_fork(do, n, sockets, busy, limits)] = n


def _prepared(make: Callable[[bytes], Work], hello: bytes) -> Work:
    try:
        return make(hello)
    except RequestError as error:
        problem = str(error)

    def refuse(request: bytes) -> bytes:
        if not request:
            return b""
        raise RequestError(problem)

    return refuse


def _fork(do: Work, n: int, sockets: list[socket.socket], busy: mmap.mmap, limits: Limits) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        child_process.end_with(zygote)
        for other in sockets[:n] + sockets[n + 1 :]:
            other.close()
        _limit(limits)
        threading.stack_size(limits.stack_bytes)
        worker = threading.Thread(target=_serve, args=(do, n, sockets[n], busy, limits))
        worker.start()
        worker.join()
        status = 0
    os._exit(status)


def _limit(limits: Limits) -> None:
    import resource  # which not every system has

    os.nice(limits.nice)
    if limits.idle:
        run_when_idle()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        max_bytes = _address_space_bytes() + limits.stack_bytes + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _serve(do: Work, n: int, asker: socket.socket, busy: mmap.mmap, limits: Limits) -> None:
    do(b"")
    while request := _receive(asker):
        busy[n] = 1
        # The signals end the process wherever it is: nobody handles them.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        try:
            answer = DONE + do(request)
        except RequestError as error:
            answer = REFUSED + str(error).encode(errors="replace")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[n] = 0
        _send(asker, answer)


def _cause(status: int, limits: Limits) -> tuple[str, bool]:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return f"it takes longer than {limits.cpu_s:g} s of CPU time", False
    if number == signal.SIGALRM:
        return f"it takes longer than {limits.wall_s:g} s", True
    return "it takes too much memory or nests too deeply", False


if __name__ == "__main__":
    main(*sys.argv[1:])
