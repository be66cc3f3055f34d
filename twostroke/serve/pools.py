"""`Pool`: threads for one kind of work that would keep the event loop from its streams."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from twostroke.serve.errors import ApiError, retry_after

T = TypeVar("T")
Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Pool:
    """Each kind of work has one of its own, so that none waits for another kind. The threads are
    daemons: none that hangs keeps the server from ending."""

    def __init__(self, what: str, threads: int, max_waiting: int) -> None:
        """`what` waits, as a refusal calls it."""
        self._what = what
        self._num_threads = threads
        self._max_waiting = max_waiting
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._started = False

    async def run(self, work: Callable[[], T]) -> T:
        """`work`'s result. Refused with 429 if too much waits already."""
        if self._num_open >= self._num_threads + self._max_waiting:
            raise ApiError(
                429,
                f"{self._max_waiting} {self._what} are waiting, and no more may; try again in a "
                "moment",
                code="queue_full",
                headers=retry_after(1),
            )
        if not self._started:
            self._started = True
            for n in range(self._num_threads):
                name = f"{self._what} {n}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._num_open += 1
        self._jobs.put((work, loop, result))
        try:
            return await result
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """End the threads that have nothing to do, and the others when they have done it."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, result = job
            if result.cancelled():
                continue
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, result, value, error)
            del job, work, loop, result, value, error  # not kept until the next one comes


def _settle(result: asyncio.Future[T], value: T, error: BaseException | None) -> None:
    if result.cancelled():
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)
