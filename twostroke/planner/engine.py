"""`SimulatedEngine`: the product's own Scheduler and KV cache, with steps whose time is computed.

    add ─▶ begin(now): plan a step ─▶ (host_s + the model's seconds later) ─▶ end(now): commit it

One step runs at a time, as on a synchronous executor. Nothing of a schedule is imitated here: what
is admitted, how prompts are cut, what is preempted and what is cached is decided by the code that
decides it in a server. Only the tokens are made up, and the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork, StepResult
from twostroke.planner.handover import SimulatedWay, transfer_of
from twostroke.route.router import EngineState, Role
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig, StepInFlight
from twostroke.sched.updates import Update

TOKEN = 7  # that every sampled position writes


class StepCost(Protocol):
    """How long steps take on a device."""

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float: ...


class Link(NamedTuple):
    """How an engine of a pool reaches the others."""

    token_bytes: float  # of keys and values
    bytes_per_s: float

    def block_bytes(self, config: SchedulerConfig) -> list[int]:
        """Of a block of each KV group, by its share of a token's elements."""
        elements = sum(group.kv_elements for group in config.groups)
        of_block = self.token_bytes * config.block_size
        return [max(1, round(of_block * one.kv_elements / elements)) for one in config.groups]


@dataclass(slots=True)
class EngineUse:
    """How much of an engine was in use, summed over its steps."""

    steps: int = 0
    device_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0
    kv_seconds: float = 0.0  # the share of the KV cache that requests had, times seconds
    kv_peak: float = 0.0  # the largest such share

    def add(self, step: StepInFlight, device_s: float, step_s: float) -> None:
        plan = step.plan
        self.steps += 1
        self.device_s += device_s
        self.prefill_tokens += plan.prefill_work.tokens
        self.decode_tokens += plan.decode_work.tokens
        self.preempted += step.preempted
        taken = step.kv.taken
        self.kv_seconds += taken * step_s
        self.kv_peak = max(self.kv_peak, taken)


class SimulatedEngine:
    def __init__(
        self,
        name: str,
        config: SchedulerConfig,
        cost: StepCost,
        host_s: float,
        clock: Callable[[], float],
        role: Role = Role.BOTH,
        link: Link | None = None,
    ) -> None:
        """`host_s`: what a step takes besides its time on the device. `link`: of an engine in a
        pool, to the others."""
        kv_tokens = min(group.num_blocks for group in config.groups) * config.block_size
        self.state = EngineState(name, role, capacity_tokens=kv_tokens)
        self._way: SimulatedWay | None = None
        transfer = None
        if link is not None:
            self.state.token_bytes, self.state.bytes_per_s = link
            self._way = SimulatedWay(clock, link.bytes_per_s)
            transfer = transfer_of(self._way, config.block_size, link.block_bytes(config))
        self.link = link
        self.scheduler = Scheduler(config, clock, transfer)
        self.use = EngineUse()
        self._cost, self._host_s = cost, host_s

    def wake_s(self) -> float | None:
        """When blocks will be here that are on their way, of an engine with nothing else to do."""
        return None if self._way is None else self._way.next_end_s()

    def begin(self, now: float) -> tuple[float, StepInFlight] | None:
        """Plan the next step. Return when it ends, and the step; None if there is nothing to do."""
        step = self.scheduler.plan()
        if step is None:
            return None
        device_s = self._cost.seconds(step.plan.prefill_work, step.plan.decode_work)
        return now + device_s + self._host_s, step

    def end(self, step: StepInFlight, now: float) -> list[Update]:
        """Commit the step; its tokens are known from now on."""
        plan = step.plan
        step_s = now - step.planned_s
        device_s = step_s - self._host_s
        committed = self.scheduler.commit(
            StepResult([TOKEN] * len(step.sampled), {}, {}, device_s), now
        )
        self.use.add(step, device_s, step_s)
        prefill, decode = (
            PhaseRecord(one.rows, one.tokens, one.kv_tokens, 0.0, 0.0)
            for one in (plan.prefill_work, plan.decode_work)
        )
        times = step.planned_s, step.planned_s, now, device_s, self._host_s
        kv = step.kv
        self.state.add_step(StepRecord(plan.step, *times, prefill, decode, (), (), 0, 0, 0, kv))
        return committed.updates
