"""Sends a workload and gathers samples, watching the client itself: a figure counts only if the
client was there to take it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.sample_client import OpenAIClient
from twostroke.measure.load.workload import Planned

TICK_S = 0.01


@dataclass(slots=True)
class Run:
    samples: list[Sample]
    started_s: float
    ended_s: float
    loop_lags_s: list[float] = field(default_factory=list)  # how late the event loop was
    most_running: int = 0

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


class LoopWatch:
    """Wakes up every 10 ms and notes how late: so late may any time stamp of this process be."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatch:
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()

    async def _watch(self) -> None:
        due = perf_counter() + TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - perf_counter()))
            now = perf_counter()
            self.lags_s.append(max(0.0, now - due))
            due = now + TICK_S


@contextmanager
def no_collections() -> Iterator[None]:
    """A garbage collection would be a gap in every stream."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def run_open_loop(
    client: OpenAIClient,
    planned: Sequence[Planned],
    max_concurrency: int | None = None,
    done: Callable[[Sample], None] = lambda sample: None,
) -> Run:
    """Every request is sent when it is due, whatever has been answered by then. With
    `max_concurrency` it may have to wait, which counts as its latency."""
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    running = most = 0
    samples: list[Sample | None] = [None] * len(planned)

    async def one(number: int, request: Planned, due_s: float) -> None:
        nonlocal running, most
        if room is not None:
            await room.acquire()
        running += 1
        most = max(most, running)
        try:
            sample = await client.send(request, due_s)
        finally:
            running -= 1
            if room is not None:
                room.release()
        samples[number] = sample
        done(sample)

    with no_collections():
        async with LoopWatch() as watch, asyncio.TaskGroup() as tasks:
            started = perf_counter()
            for number, request in enumerate(planned):
                due = started + request.at_s
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(one(number, request, due))
    found = [sample for sample in samples if sample is not None]
    return Run(found, started, max(s.ended_s for s in found), watch.lags_s, most)


async def run_closed_loop(
    client: OpenAIClient,
    planned: Sequence[Planned],
    concurrency: int,
    done: Callable[[Sample], None] = lambda sample: None,
) -> Run:
    """`concurrency` users, each of whom sends the next request when the last is answered: a
    request is due when its user is free."""
    samples: list[Sample] = []
    waiting = iter(planned)

    async def user() -> None:
        for request in waiting:
            sample = await client.send(request, perf_counter())
            samples.append(sample)
            done(sample)

    with no_collections():
        async with LoopWatch() as watch, asyncio.TaskGroup() as tasks:
            started = perf_counter()
            for _ in range(min(concurrency, len(planned))):
                tasks.create_task(user())
    ended = max(sample.ended_s for sample in samples)
    return Run(samples, started, ended, watch.lags_s, min(concurrency, len(planned)))
