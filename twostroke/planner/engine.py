"""`SimulatedEngine`: the product's Scheduler and KV cache, with modelled step times.

    add ─▶ begin(now): plan a step ─▶ (host_s + modelled seconds) ─▶ end(now): commit the step
       ─▶ stretch(now): run steps that only decode, until a request ends or arrives

With `max_in_flight` 1 a step is planned when the previous step has ended, as on a CPU. With 2 it is
planned when the previous step begins, as on a GPU: a request that arrives meanwhile waits for one
more step. In both cases a step takes `host_s` in addition to its device time, as servers measure
it. The product's code decides admission, chunking, preemption and caching. Only the tokens and the
times are simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import NO_WORK, PhaseWork, StepResult
from twostroke.planner.handover import SimulatedTransport, transfer_of
from twostroke.planner.offload import OffloadHits, OffloadTier
from twostroke.planner.speculation import Acceptance, SimulatedDrafter, counts_of
from twostroke.planner.stretch import TOKEN, SteadyScheduler
from twostroke.route.router import EngineState, Role
from twostroke.sched.step import SchedulerConfig, StepInFlight
from twostroke.sched.updates import Update

TIMELINE_S = 10.0  # the interval of an engine's timeline


class StepCost(Protocol):
    """A model of the time of steps on a device."""

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float: ...


class Link(NamedTuple):
    """The network link of an engine in a pool."""

    token_bytes: float  # of keys and values
    bytes_per_s: float

    def block_bytes(self, config: SchedulerConfig) -> list[int]:
        """Return the bytes of a block of each KV group, by its share of a token's elements."""
        elements = sum(group.kv_elements for group in config.groups)
        block_bytes = self.token_bytes * config.block_size
        return [max(1, round(block_bytes * one.kv_elements / elements)) for one in config.groups]


@dataclass(slots=True)
class EngineUsage:
    """The use of an engine, summed over its steps."""

    steps: int = 0
    device_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0
    kv_seconds: float = 0.0  # share of the KV cache held by requests, times seconds
    kv_peak: float = 0.0  # largest share of the KV cache held by requests
    # Number of an interval of `TIMELINE_S` → `device_s` and `kv_seconds` of its steps
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(
        self, step: StepInFlight, num_tokens: int, device_s: float, begun_s: float, end_s: float
    ) -> None:
        """Add a step. `num_tokens`: the tokens that the step wrote."""
        plan = step.plan
        self.steps += 1
        self.prefill_tokens += plan.prefill_work.tokens
        self.decode_tokens += num_tokens - (len(step.sampled_requests) - len(plan.decode))
        self.preempted += step.preempted
        self._add_time(device_s, end_s - begun_s, step.kv.taken, end_s)
        self.kv_peak = max(self.kv_peak, step.kv.taken)

    def add_stretch(
        self,
        steps: int,
        rows: int,
        device_s: float,
        seconds: float,
        held: tuple[float, float],
        end_s: float,
    ) -> None:
        """Add a stretch of steps. `held`: share of the KV cache in use at its start and end."""
        self.steps += steps
        self.decode_tokens += steps * rows
        self._add_time(device_s, seconds, sum(held) / 2, end_s)
        self.kv_peak = max(self.kv_peak, *held)

    def _add_time(self, device_s: float, seconds: float, taken: float, end_s: float) -> None:
        held = taken * seconds
        self.device_s += device_s
        self.kv_seconds += held
        number = int(end_s / TIMELINE_S)
        before = self.intervals.get(number, (0.0, 0.0))
        self.intervals[number] = (before[0] + device_s, before[1] + held)


class EngineFeatures(NamedTuple):
    """The features of an engine that change its steps or the time between steps."""

    max_in_flight: int = 1  # steps that are planned and have not ended
    acceptance: Acceptance | None = None  # None: no drafts
    offload: OffloadHits | None = None  # None: no offload tier
    token_bytes: float = 0.0  # of keys and values, for the offload tier


class SimulatedEngine:
    """One engine of a simulation."""

    def __init__(
        self,
        name: str,
        config: SchedulerConfig,
        cost: StepCost,
        host_s: float,
        clock: Callable[[], float],
        role: Role = Role.BOTH,
        link: Link | None = None,
        features: EngineFeatures = EngineFeatures(),  # noqa: B008 - immutable
    ) -> None:
        """`host_s`: the time of a step outside the device. `link`: for an engine in a pool."""
        kv_tokens = min(group.num_blocks for group in config.groups) * config.block_size
        self.state = EngineState(name, role, capacity_tokens=kv_tokens)
        self._transport: SimulatedTransport | None = None
        transfer = None
        if link is not None:
            self.state.token_bytes, self.state.bytes_per_s = link
            self._transport = SimulatedTransport(clock, link.bytes_per_s)
            transfer = transfer_of(self._transport, config.block_size, link.block_bytes(config))
        self.link = link
        self.scheduler = SteadyScheduler(config, clock, transfer)
        self.usage = EngineUsage()
        self.offload: OffloadTier | None = None
        if features.offload is not None:
            self.offload = OffloadTier(features.offload, features.token_bytes, self.scheduler)
        if (speculator := self.scheduler.speculator) is not None:
            assert features.acceptance is not None, "the drafts of a configured speculator"
            speculator.drafters = [SimulatedDrafter(features.acceptance, name)]
        # A draft needs the tokens before it, so that steps with drafts run one at a time.
        self._max_in_flight = 1 if speculator is not None else features.max_in_flight
        self._decoded = False  # whether the last step only decoded
        self._free_s = 0.0  # end of the newest step
        self._device_s: deque[float] = deque()  # of the steps in flight
        self._cost, self._host_s = cost, host_s

    def wake_s(self) -> float | None:
        """Return when the next copy of blocks ends, or None without a running copy."""
        return None if self._transport is None else self._transport.next_end_s()

    @property
    def full(self) -> bool:
        """Return True if no step can be planned before a step in flight ends."""
        return len(self.scheduler.in_flight) >= self._max_in_flight

    @property
    def defers_plan(self) -> bool:
        """Return True if the next step may be planned at the end of the step in flight, because the
        plan would be the same: the steps only decode. They may then be run as a stretch."""
        return self._decoded and self.link is None and self.scheduler.will_be_steady()

    def stretch(self, now: float, until_s: float) -> float | None:
        """Run the steps that begin before `until_s` and only decode, as the last step did. Return
        when they end; None if there are not at least two."""
        if not self._decoded or self.link is not None:
            return None
        limit = self.scheduler.steady_steps()
        if limit < 2:
            return None
        rows, positions = self.scheduler.num_running, self.scheduler.positions
        ends_s: list[float] = []
        device_s, end_s = 0.0, now
        planned_s = now  # of the next step
        while len(ends_s) < limit and planned_s < until_s:
            step_s = self._cost.seconds(NO_WORK, PhaseWork(rows, rows, positions, positions))
            positions += rows
            device_s += step_s
            begun_s, end_s = end_s, end_s + step_s + self._host_s
            planned_s = end_s if self._max_in_flight == 1 else begun_s
            ends_s.append(end_s)
        if not ends_s:
            return None
        before = self.scheduler.kv.usage().taken
        self.scheduler.run_stretch(ends_s)
        held = before, self.scheduler.kv.usage().taken
        self.usage.add_stretch(len(ends_s), rows, device_s, end_s - now, held, end_s)
        self._free_s = end_s
        return end_s

    def begin(self, now: float) -> tuple[float, StepInFlight] | None:
        """Plan the next step. Return when it ends, and the step; None if there is nothing to do."""
        step = self.scheduler.plan()
        if step is None:
            return None
        device_s = self._cost.seconds(step.plan.prefill_work, step.plan.decode_work)
        self._device_s.append(device_s)
        self._decoded = not step.plan.prefill
        self._free_s = max(now, self._free_s) + device_s + self._host_s
        return self._free_s, step

    def end(self, step: StepInFlight, now: float) -> list[Update]:
        """Commit the step and return its updates."""
        plan = step.plan
        device_s = self._device_s.popleft()
        counts = None
        if plan.draft_tokens:
            chunks = len(step.sampled_requests) - len(plan.decode)
            counts = counts_of(plan.decode, plan.draft_tokens, chunks)
        num_tokens = len(step.sampled_requests) if counts is None else sum(counts)
        committed = self.scheduler.commit(
            StepResult([TOKEN] * num_tokens, {}, {}, device_s, counts=counts), now
        )
        begun_s = now - device_s - self._host_s
        self.usage.add(step, num_tokens, device_s, begun_s, now)
        prefill, decode = (
            PhaseRecord(one.rows, one.tokens, one.kv_tokens, 0.0, 0.0)
            for one in (plan.prefill_work, plan.decode_work)
        )
        self.state.add_step(
            StepRecord(
                step=plan.step,
                planned_s=step.planned_s,
                launched_s=begun_s,
                committed_s=now,
                device_s=device_s,
                host_gap_s=self._host_s,
                prefill=prefill,
                decode=decode,
                chunks=(),
                slots=(),
                waiting=0,
                running=0,
                preempted=0,
                kv=step.kv,
            )
        )
        return committed.updates
