"""`SimulatedEngine`: the product's Scheduler and KV cache, with modelled step times.

    add ─▶ begin(now): plan a step ─▶ (host_s + modelled seconds) ─▶ end(now): commit the step

One step runs at a time, as on a synchronous executor. The product's code decides admission,
chunking, preemption and caching. Only the tokens and the times are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from twostroke.observe.record import PhaseRecord, StepRecord
from twostroke.plan import PhaseWork, StepResult
from twostroke.planner.handover import SimulatedTransport, transfer_of
from twostroke.route.router import EngineState, Role
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig, StepInFlight
from twostroke.sched.updates import Update

TOKEN = 7  # the id of every sampled token


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
        self.scheduler = Scheduler(config, clock, transfer)
        self.usage = EngineUsage()
        self._cost, self._host_s = cost, host_s

    def wake_s(self) -> float | None:
        """Return when the next copy of blocks ends, or None without a running copy."""
        return None if self._transport is None else self._transport.next_end_s()

    def begin(self, now: float) -> tuple[float, StepInFlight] | None:
        """Plan the next step. Return when it ends, and the step; None if there is nothing to do."""
        step = self.scheduler.plan()
        if step is None:
            return None
        device_s = self._cost.seconds(step.plan.prefill_work, step.plan.decode_work)
        return now + device_s + self._host_s, step

    def end(self, step: StepInFlight, now: float) -> list[Update]:
        """Commit the step and return its updates."""
        plan = step.plan
        step_s = now - step.planned_s
        device_s = step_s - self._host_s
        committed = self.scheduler.commit(
            StepResult([TOKEN] * len(step.sampled), {}, {}, device_s), now
        )
        self.usage.add(step, device_s, step_s)
        prefill, decode = (
            PhaseRecord(one.rows, one.tokens, one.kv_tokens, 0.0, 0.0)
            for one in (plan.prefill_work, plan.decode_work)
        )
        self.state.add_step(
            StepRecord(
                step=plan.step,
                planned_s=step.planned_s,
                launched_s=step.planned_s,
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
