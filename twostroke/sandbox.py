"""`SandboxPool`: processes with limits on time and memory, for work that some inputs make endless.

    ask ── socket pair ─▶ worker: reads a request, works within the limits, answers, reads the next
                            │ dies
        ◀── reason ───── zygote: reaps the worker, answers for it, forks a new worker

The zygote is a process that imports modules and prepares the work once. A worker is a fork of the
zygote, so that a dead worker is replaced in milliseconds. Zygote and workers have none of the
server's sockets, environment variables or keys. They end when the program ends or closes its ends
of the sockets. The module does not import torch.
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
START_S: Final = 60.0  # time limit for the start of the zygote, on a busy machine
# Variables that Python or the clock need. Keys stay out of the sandbox.
INHERITED_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ")
DONE, REFUSED, DIED = b"+", b"-", b"!"
OUT_OF_MEMORY: Final = 3  # a worker's exit status


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each request."""

    cpu_s: float
    wall_s: float
    memory_bytes: int  # address space beyond that of a new worker
    stack_bytes: int = 4 * 1024**2
    nice: int = 0


class LimitExceeded(Exception):  # noqa: N818
    """A request exceeded a limit, and its worker died. `transient`: the request may succeed at
    another time."""

    def __init__(self, reason: str, transient: bool) -> None:
        super().__init__(reason)
        self.transient = transient


class SandboxPool:
    """Workers for requests. Several threads may use the pool; each request has its own worker."""

    def __init__(self, factory: str, setup: bytes, workers: int, limits: Limits) -> None:
        """`factory`: "module:function", a function that makes the workers' function from `setup`.
        The zygote calls the factory once. If it raises a `RequestError`, this error is the answer
        to every request. Each new worker first answers an empty request, as a warm-up."""
        self._factory, self._setup, self._limits = factory, setup, limits
        self._num_workers = workers
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None

    def start(self) -> None:
        """Start the processes without waiting. Otherwise the first call of `ask` starts them."""
        self._started()

    def _started(self) -> _Zygote:
        with self._lock:
            if self._zygote is None:
                self._zygote = _Zygote(self._factory, self._setup, self._num_workers, self._limits)
            return self._zygote

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request. Raises `RequestError` if the work refuses the request,
        and `LimitExceeded` if the worker died of it."""
        zygote = self._started()
        worker = zygote.free.get()
        try:
            _send(worker, request)
            answer = _receive(worker)
        except OSError:
            answer = b""
        finally:
            zygote.free.put(worker)
        status, text = answer[:1], answer[1:]
        if status == DONE:
            return text
        if status == REFUSED:
            raise RequestError(text.decode())
        if status == DIED:
            raise LimitExceeded(*json.loads(text))
        with self._lock:  # the zygote has ended or does not answer
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
    """The program's handle of the zygote and its workers."""

    def __init__(self, factory: str, setup: bytes, workers: int, limits: Limits) -> None:
        pairs = [socket.socketpair() for _ in range(workers)]
        files = [child_end.fileno() for _, child_end in pairs]
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        arguments = [factory, json.dumps(asdict(limits)), *map(str, files)]
        self._process = child_process.start(
            "twostroke.sandbox",
            *arguments,
            pass_fds=files,
            # Otherwise glibc reserves 64 MiB of the limited address space for each thread.
            env=inherited | {"MALLOC_ARENA_MAX": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        own_ends = [own_end for own_end, _ in pairs]
        for own_end, child_end in pairs:
            child_end.close()
            own_end.settimeout(START_S + limits.wall_s)
            self.free.put(own_end)
        self.end = weakref.finalize(self, _end, self._process, own_ends)
        with contextlib.suppress(OSError):  # `ask` notices that the zygote has ended
            _send(own_ends[0], setup)


def _end(process: subprocess.Popen[bytes], sockets: list[socket.socket]) -> None:
    for own_end in sockets:
        with contextlib.suppress(OSError):
            own_end.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        own_end.close()
    process.kill()
    process.wait()


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(struct.pack("<Q", len(message)))
    to.sendall(message)


def _receive(source: socket.socket) -> bytes:
    """Receive a message. It is empty when the other end is closed."""
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
    """Run this thread only while no other thread needs the processor (Linux). Otherwise the threads
    of a step, which wait for each other at barriers, would lose a time slice at each barrier."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


# ── in the zygote and its workers ───────────────────────────────────────────────────────────────


def main(factory: str, limits_json: str, *files: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # only the program handles these signals
        signal.signal(number, signal.SIG_IGN)
    limits = Limits(**json.loads(limits_json))
    sockets = [socket.socket(fileno=int(file)) for file in files]
    module, _, function = factory.partition(":")
    make_work = getattr(import_module(module), function)
    work = _prepare(make_work, _receive(sockets[0]))
    gc.freeze()  # pages that no process writes stay shared
    # Shared with the workers: byte n is 1 while worker n handles a request.
    busy = mmap.mmap(-1, len(sockets))
    workers = {_fork(work, n, sockets, busy, limits): n for n in range(len(sockets))}
    while workers:
        pid, status = os.wait()
        n = workers.pop(pid)
        if status == 0:
            continue  # the program has closed the socket
        if busy[n]:
            busy[n] = 0
            with contextlib.suppress(OSError):
                _send(sockets[n], DIED + json.dumps(_cause(status, limits)).encode())
        else:
            sleep(0.1)  # the worker died without a request: do not fork in a busy loop
        workers[_fork(work, n, sockets, busy, limits)] = n


def _prepare(make_work: Callable[[bytes], Work], setup: bytes) -> Work:
    try:
        return make_work(setup)
    except RequestError as error:
        problem = str(error)

    def refuse(request: bytes) -> bytes:
        if not request:
            return b""
        raise RequestError(problem)

    return refuse


def _fork(work: Work, n: int, sockets: list[socket.socket], busy: mmap.mmap, limits: Limits) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        child_process.end_with_parent(zygote)
        for other in sockets[:n] + sockets[n + 1 :]:
            other.close()
        _limit(limits)
        threading.stack_size(limits.stack_bytes)
        worker = threading.Thread(target=_serve, args=(work, n, sockets[n], busy, limits))
        worker.start()
        worker.join()
        status = 0
    os._exit(status)


def _limit(limits: Limits) -> None:
    import resource  # not on every system

    os.nice(limits.nice)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        max_bytes = _address_space_bytes() + limits.stack_bytes + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _serve(work: Work, n: int, program: socket.socket, busy: mmap.mmap, limits: Limits) -> None:
    work(b"")
    while request := _receive(program):
        busy[n] = 1
        # The signals have no handlers, so that they end the process.
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, limits.wall_s)
        try:
            answer = DONE + work(request)
        except RequestError as error:
            answer = REFUSED + str(error).encode(errors="replace")
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[n] = 0
        _send(program, answer)


def _cause(status: int, limits: Limits) -> tuple[str, bool]:
    """Return the reason of a worker's death, and whether it is transient."""
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGPROF:
        return f"it takes longer than {limits.cpu_s:g} s of CPU time", False
    if number == signal.SIGALRM:
        return f"it takes longer than {limits.wall_s:g} s", True
    return "it takes too much memory or nests too deeply", False


if __name__ == "__main__":
    main(*sys.argv[1:])
