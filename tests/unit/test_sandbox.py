"""The death of a worker affects only its request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.errors import EngineError, RequestError
from twostroke.sandbox import LimitExceeded, Limits, SandboxPool, Work

pytestmark = pytest.mark.core  # bounds of security

PATIENCE_S = 240
MIB = 1024**2
LIMITS = Limits(cpu_s=0.3, wall_s=3.0, memory_bytes=32 * MIB)


def make_work(setup: bytes) -> Work:
    """Return the work of the tests, whose requests name an action."""
    if setup == b"bad":
        raise RequestError("no such model")

    def work(request: bytes) -> bytes:
        action, _, rest = request.decode().partition(" ")
        if action == "spin":
            while True:
                pass
        if action == "sleep":
            time.sleep(float(rest))
        elif action == "meet":
            folder, _, others = rest.partition(" ")
            Path(folder, str(os.getpid())).touch()
            while len(os.listdir(folder)) < int(others):
                time.sleep(0.01)
        elif action == "take":
            bytearray(int(rest) * MIB)
        elif action == "refuse":
            raise RequestError(rest)
        elif action == "crash":
            os.abort()
        elif action == "pid":
            return f"{os.getpid()} {os.getppid()}".encode()
        elif action == "files":
            names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
            return "\n".join(os.readlink(name) for name in names if os.path.exists(name)).encode()
        elif action == "environment":
            return "\n".join(os.environ).encode()
        return setup + request

    return work


def make_pool(setup: bytes = b"hello ", workers: int = 1, limits: Limits = LIMITS) -> SandboxPool:
    return SandboxPool("tests.unit.test_sandbox:make_work", setup, workers, limits)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    made = make_pool()
    yield made
    made.close()


def pids(pool: SandboxPool) -> list[int]:
    """Return the ids of the worker and of the zygote."""
    return [int(word) for word in pool.ask(b"pid").split()]


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, "a process was left behind"
        time.sleep(0.01)


def test_a_worker_answers_and_stays(pool: SandboxPool) -> None:
    first = pids(pool)
    assert pool.ask(b"x" * 3 * MIB) == b"hello " + b"x" * 3 * MIB
    with pytest.raises(RequestError, match="not so"):
        pool.ask(b"refuse not so")
    assert pids(pool) == first


@pytest.mark.parametrize(
    ("request_", "reason", "transient"),
    [
        (b"spin", "longer than 0.3 s of CPU time", False),
        (b"sleep 60", "longer than 3 s", True),
        (b"take 64", "too much memory", False),
        (b"crash", "too much memory or nests", False),
    ],
)
def test_a_limit_ends_the_worker_and_the_next_request_has_another(
    pool: SandboxPool, request_: bytes, reason: str, transient: bool
) -> None:
    worker, zygote = pids(pool)
    with pytest.raises(LimitExceeded, match=reason) as caught:
        pool.ask(request_)
    assert caught.value.transient == transient
    other, same = pids(pool)
    assert other != worker
    assert same == zygote
    wait_for_end(worker)  # reaped: no zombie is left


def test_requests_within_the_limits_are_answered(pool: SandboxPool) -> None:
    assert pool.ask(b"take 16") == b"hello take 16"
    assert pool.ask(b"sleep 0.5") == b"hello sleep 0.5"


def test_a_worker_killed_while_idle_is_replaced(pool: SandboxPool) -> None:
    worker, _ = pids(pool)
    os.kill(worker, signal.SIGKILL)
    assert pool.ask(b"after") == b"hello after"
    assert pids(pool)[0] != worker


def test_workers_are_asked_at_the_same_time(tmp_path: Path) -> None:
    """Each of three requests ends when all three have begun."""
    patient = Limits(LIMITS.cpu_s * 10, PATIENCE_S, LIMITS.memory_bytes)
    pool, answers = make_pool(workers=3, limits=patient), []
    request = f"meet {tmp_path} 3".encode()
    threads = [threading.Thread(target=lambda: answers.append(pool.ask(request))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [b"hello " + request] * 3
    pool.close()


def test_a_preparation_that_refuses_answers_every_request() -> None:
    pool = make_pool(b"bad")
    for _ in range(2):
        with pytest.raises(RequestError, match="no such model"):
            pool.ask(b"x")
    pool.close()


def test_nothing_of_the_server_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_API_KEY", "secret")
    kept_open = open(__file__)  # noqa: SIM115
    os.set_inheritable(kept_open.fileno(), True)
    pool = make_pool(workers=2)
    assert b"TWOSTROKE_API_KEY" not in pool.ask(b"environment").split()
    files = pool.ask(b"files").decode().split("\n")
    sockets = [name for name in files if name.startswith("socket:")]
    assert len(sockets) == 1  # its own
    assert __file__ not in files
    kept_open.close()
    pool.close()


def test_a_closed_pool_leaves_no_process_and_no_file_open() -> None:
    files = len(os.listdir("/proc/self/fd"))
    pool = make_pool(workers=2)
    worker, zygote = pids(pool)
    for _ in range(3):
        with pytest.raises(LimitExceeded):
            pool.ask(b"take 64")
    pool.close()
    wait_for_end(worker)
    wait_for_end(zygote)
    assert len(os.listdir("/proc/self/fd")) == files
    assert pool.ask(b"again") == b"hello again"  # it can be used again
    pool.close()


def test_closing_wakes_a_waiting_thread_and_ends_a_busy_worker() -> None:
    pool = make_pool(limits=Limits(cpu_s=100, wall_s=2, memory_bytes=32 * MIB))
    worker, _ = pids(pool)
    seen: list[BaseException] = []

    def ask() -> None:
        try:
            pool.ask(b"sleep 60")
        except EngineError as error:
            seen.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(PATIENCE_S)
    assert len(seen) == 1
    wait_for_end(worker)


def test_a_zygote_that_died_is_started_again() -> None:
    pool = make_pool()
    worker, zygote = pids(pool)
    os.kill(zygote, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    wait_for_end(worker)
    with pytest.raises(EngineError, match="the next request starts it"):
        pool.ask(b"x")
    assert pool.ask(b"x") == b"hello x"
    pool.close()
