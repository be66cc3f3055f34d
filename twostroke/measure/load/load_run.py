"""Open-loop and closed-loop runs of a workload, with a check that the client itself is on time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from twostroke.measure.load.definitions import Sample
from twostroke.measure.load.sample_client import OpenAIClient
from twostroke.measure.load.workload import PlannedRequest

TICK_S = 0.01


@dataclass(slots=True)
class LoadRun:
    """The samples of one run of a workload."""

    samples: list[Sample]
    started_s: float
    ended_s: float
    loop_lags_s: list[float] = field(default_factory=list)  # delays of the event loop
    max_running: int = 0

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


class EventLoopWatch:
    """A task that wakes up every 10 ms and records its delay. No time stamp of this process can be
    later than the event by more than such a delay."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EventLoopWatch:
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
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection, which would add a gap to every stream."""
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
    planned: Sequence[PlannedRequest],
    max_concurrency: int | None = None,
    done: Callable[[Sample], None] = lambda sample: None,
) -> LoadRun:
    """Send every request at its scheduled time, regardless of answers. With `max_concurrency` a
    request may wait in the client, which counts as latency."""
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    running = max_running = 0
    samples: list[Sample | None] = [None] * len(planned)

    async def one(number: int, request: PlannedRequest, due_s: float) -> None:
        nonlocal running, max_running
        if room is not None:
            await room.acquire()
        running += 1
        max_running = max(max_running, running)
        try:
            sample = await client.send(request, due_s)
        finally:
            running -= 1
            if room is not None:
                room.release()
        samples[number] = sample
        done(sample)

    with gc_disabled():
        async with EventLoopWatch() as watch, asyncio.TaskGroup() as tasks:
            started = perf_counter()
            for number, request in enumerate(planned):
                due = started + request.at_s
                if (wait := due - perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(one(number, request, due))
    found = [sample for sample in samples if sample is not None]
    return LoadRun(found, started, max(s.ended_s for s in found), watch.lags_s, max_running)


async def run_closed_loop(
    client: OpenAIClient,
    planned: Sequence[PlannedRequest],
    concurrency: int,
    done: Callable[[Sample], None] = lambda sample: None,
) -> LoadRun:
    """Send from `concurrency` users. Each user sends the next request after the last answer, and
    that moment is the scheduled time of the request."""
    samples: list[Sample] = []
    waiting = iter(planned)

    async def user() -> None:
        for request in waiting:
            sample = await client.send(request, perf_counter())
            samples.append(sample)
            done(sample)

    with gc_disabled():
        async with EventLoopWatch() as watch, asyncio.TaskGroup() as tasks:
            started = perf_counter()
            for _ in range(min(concurrency, len(planned))):
                tasks.create_task(user())
    ended = max(sample.ended_s for sample in samples)
    return LoadRun(samples, started, ended, watch.lags_s, min(concurrency, len(planned)))
