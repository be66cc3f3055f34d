"""What the steps between a start and a stop were made of, for `twostroke profile`.

A profile puts itself around the methods that do the work and hears of every step record, so that an
engine that is not profiled runs the code it always runs. `StageProfile` reads the native decoder's
own counters; torch's is in `torch_profile.py`. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from twostroke.exec.executor import Masks
from twostroke.exec.native import Computed, Forwarded, NativeExecutor
from twostroke.model.describe.cost import CostModel, Work
from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.plan import StepPlan

PHASES = ("prefill", "decode", "mixed")
UNACCOUNTED = "unaccounted"


def phase_of(prefill_tokens: int, decode_tokens: int) -> str:
    if prefill_tokens and decode_tokens:
        return "mixed"
    return "prefill" if prefill_tokens else "decode"


class Profile(Protocol):
    """One that runs; a listener of the step records."""

    max_steps: int

    @property
    def num_steps(self) -> int: ...

    def add_step(self, record: StepRecord) -> None: ...

    def add_request(self, record: RequestRecord) -> None: ...

    def end(self) -> None:
        """Leave the engine as it was."""

    def result(self) -> dict[str, Any]:
        """What was found, once it has ended; as JSON can hold it."""


@dataclass
class PhaseSums:
    """The steps of one phase. `stages` add up to `step_s`."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    between_s: float = 0.0  # from the step before to these: sending, receiving, nothing to do
    stages: dict[str, float] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)

    def add(self, record: StepRecord, step_s: float, between_s: float) -> None:
        self.steps += 1
        self.prefill_tokens += record.prefill.tokens
        self.decode_tokens += record.decode.tokens
        self.step_s += step_s
        self.between_s += between_s

    def add_stage(self, name: str, seconds: float) -> None:
        self.stages[name] = self.stages.get(name, 0.0) + seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "step_s": self.step_s,
            "between_s": self.between_s,
            "stages": {
                name: {"seconds": seconds, **self.work.get(name, Work())._asdict()}
                for name, seconds in self.stages.items()
            },
        }


class Wraps:
    """Puts functions around the methods of objects, and takes them away again."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, method: str, wrap: Callable[[Any], Any]) -> None:
        self._undo.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, wrap(getattr(owner, method)))

    def remove(self) -> None:
        while self._undo:
            owner, method, before = self._undo.pop()
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)


class StageProfile:
    """Steps on the native kernels, which run one at a time: from the plan to the commit."""

    max_steps = 16384

    def __init__(self, executor: NativeExecutor, cost: CostModel) -> None:
        self._executor, self._cost, self._wraps = executor, cost, Wraps()
        self._phases: dict[str, PhaseSums] = {}
        self._steps: list[list[Any]] = []  # number, phase, when it began, seconds by name
        self._names: list[str] = []
        self._plan: StepPlan | None = None  # of the step that runs
        self._stages: dict[str, float] = {}  # its own
        self._forward_end_s = self._sample_s = self._last_end_s = 0.0
        self._wraps.put(executor, "forward", self._around_forward)
        self._wraps.put(executor, "sample", self._around_sample)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def _around_forward(
        self, forward: Callable[[StepPlan], Forwarded]
    ) -> Callable[[StepPlan], Forwarded]:
        def run(plan: StepPlan) -> Forwarded:
            before, started_s = self._executor.stage_seconds(), monotonic()
            handle = forward(plan)
            self._forward_end_s = monotonic()
            after = self._executor.stage_seconds()
            self._plan = plan
            stages = {name: after[name] - was for name, was in before.items() if after[name]}
            # In no stage: starting the threads, waiting for the last, the interpreter's lock.
            took_s = self._forward_end_s - started_s
            self._stages = stages | {"call": took_s - sum(stages.values())}
            return handle

        return run

    def _around_sample(
        self, sample: Callable[[Forwarded, Masks | None], Computed]
    ) -> Callable[[Forwarded, Masks | None], Computed]:
        def run(handle: Forwarded, masks: Masks | None = None) -> Computed:
            pending = sample(handle, masks)
            self._sample_s = monotonic() - self._forward_end_s  # grammars' masks are part of it
            return pending

        return run

    def add_step(self, record: StepRecord) -> None:
        now, plan = monotonic(), self._plan
        if plan is None or plan.step != record.step:  # begun before the profile
            return
        seconds = {"plan": record.launched_s - record.planned_s, **self._stages}
        seconds |= {"sampling": self._sample_s, "commit": now - record.committed_s}
        step_s = now - record.planned_s
        seconds[UNACCOUNTED] = step_s - sum(seconds.values())
        phase = phase_of(record.prefill.tokens, record.decode.tokens)
        sums = self._phases.setdefault(phase, PhaseSums())
        between_s = record.planned_s - self._last_end_s if self._last_end_s else 0.0
        sums.add(record, step_s, between_s)
        for name, value in seconds.items():
            sums.add_stage(name, value)
        samples = plan.decode_work.tokens + sum(chunk.last for chunk in plan.prefill)
        phases = plan.prefill_work, plan.decode_work
        cost = self._cost.of_step(plan.prefill_work.tokens)
        for name, work in cost.stages(*phases, samples).items():
            sums.work[name] = sums.work.get(name, Work()) + work
        self._names = list(seconds)
        self._steps.append([record.step, phase, record.planned_s, *seconds.values()])
        self._last_end_s = now

    def add_request(self, record: RequestRecord) -> None: ...

    def end(self) -> None:
        self._wraps.remove()

    def result(self) -> dict[str, Any]:
        return {
            "kind": "stages",
            "phases": {
                name: self._phases[name].as_json() for name in PHASES if name in self._phases
            },
            "stage_names": self._names,
            "steps": self._steps,
        }
