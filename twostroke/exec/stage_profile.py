"""Profiles for `twostroke profile`, which measure the steps from its start command to its stop
command.

A profile wraps methods of the engine and listens to step records, so that an engine without a
profile runs unchanged code. `StageProfile` is the profile of the native executor: it reads the
executor's stage counters. The profile of the torch executor is in `torch_profile.py`; this module
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from twostroke.exec.executor import Masks
from twostroke.exec.native_executor import FinishedStep, NativeExecutor, NativeForwardHandle
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
    """A running profile, which listens to step records."""

    max_steps: int  # the profiler ends the profile after this many steps

    @property
    def num_steps(self) -> int: ...

    def add_step(self, record: StepRecord) -> None: ...

    def add_request(self, record: RequestRecord) -> None: ...

    def end(self) -> None:
        """Remove all wrappers from the engine."""

    def result(self) -> dict[str, Any]:
        """Return the result of an ended profile, as JSON values."""


@dataclass
class PhaseSums:
    """Sums over the steps of one phase. The seconds of all stages add up to `step_s`."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    between_s: float = 0.0  # time between the steps: sending results, receiving requests, idle
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_work: dict[str, Work] = field(default_factory=dict)  # FLOPs and bytes of each stage

    def add(self, record: StepRecord, step_s: float, between_s: float) -> None:
        self.steps += 1
        self.prefill_tokens += record.prefill.tokens
        self.decode_tokens += record.decode.tokens
        self.step_s += step_s
        self.between_s += between_s

    def add_stage(self, name: str, seconds: float) -> None:
        self.stage_s[name] = self.stage_s.get(name, 0.0) + seconds

    def add_stage_work(self, name: str, work: Work) -> None:
        self.stage_work[name] = self.stage_work.get(name, Work()) + work

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "prefill_tokens": self.prefill_tokens,
            "decode_tokens": self.decode_tokens,
            "step_s": self.step_s,
            "between_s": self.between_s,
            "stages": {
                name: {"seconds": seconds, **self.stage_work.get(name, Work())._asdict()}
                for name, seconds in self.stage_s.items()
            },
        }


class MethodWrappers:
    """Wrappers around methods of objects, which can be removed again."""

    def __init__(self) -> None:
        # Object, name of the method, and the object's earlier attribute: None for a class's method.
        self._replaced: list[tuple[Any, str, Any]] = []

    def wrap(self, owner: Any, method: str, wrapper_of: Callable[[Any], Any]) -> None:
        """Replace a method of the object `owner` by `wrapper_of(method)`."""
        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, wrapper_of(getattr(owner, method)))

    def remove(self) -> None:
        """Remove all wrappers, the newest first."""
        while self._replaced:
            owner, method, earlier = self._replaced.pop()
            if earlier is None:
                delattr(owner, method)
            else:
                setattr(owner, method, earlier)


class StageProfile:
    """A profile of the native executor, from the plan to the commit of each step."""

    max_steps = 16384

    def __init__(self, executor: NativeExecutor, cost: CostModel) -> None:
        self._executor, self._cost, self._wrappers = executor, cost, MethodWrappers()
        self._phases: dict[str, PhaseSums] = {}
        # For each step: its number, its phase, its start time and the seconds of each stage.
        self._steps: list[list[Any]] = []
        self._stage_names: list[str] = []
        self._plan: StepPlan | None = None  # plan of the running step
        self._stage_s: dict[str, float] = {}  # of each stage of the running step's `forward`
        self._forward_end_s = 0.0  # time at which the running step's `forward` returned
        self._sampling_s = 0.0  # duration of sampling in the running step
        self._last_step_end_s = 0.0  # time at which the previous step ended
        self._wrappers.wrap(executor, "forward", self._around_forward)
        self._wrappers.wrap(executor, "sample", self._around_sample)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def _around_forward(
        self, forward: Callable[[StepPlan], NativeForwardHandle]
    ) -> Callable[[StepPlan], NativeForwardHandle]:
        def run(plan: StepPlan) -> NativeForwardHandle:
            before, started_s = self._executor.stage_seconds(), monotonic()
            handle = forward(plan)
            self._forward_end_s = monotonic()
            after = self._executor.stage_seconds()
            self._plan = plan
            # A stage with the counter 0 has never run: the model does not have this stage.
            stage_s = {name: after[name] - before[name] for name in before if after[name]}
            forward_s = self._forward_end_s - started_s
            # "call" is the time of `forward` outside of these stages: starting the threads, waiting
            # for the last thread, waiting for the GIL.
            self._stage_s = stage_s | {"call": forward_s - sum(stage_s.values())}
            return handle

        return run

    def _around_sample(
        self, sample: Callable[[NativeForwardHandle, Masks | None], FinishedStep]
    ) -> Callable[[NativeForwardHandle, Masks | None], FinishedStep]:
        def run(handle: NativeForwardHandle, masks: Masks | None = None) -> FinishedStep:
            finished = sample(handle, masks)
            # From the end of `forward`, so this time includes the computing of grammar masks.
            self._sampling_s = monotonic() - self._forward_end_s
            return finished

        return run

    def add_step(self, record: StepRecord) -> None:
        end_s, plan = monotonic(), self._plan
        if plan is None or plan.step != record.step:  # the step began before the profile
            return
        start_s = record.planned_s  # the time when planning began
        # The commit begins at `committed_s`, when the host knows the tokens of the step.
        stage_s = {"plan": record.launched_s - start_s, **self._stage_s}
        stage_s |= {"sampling": self._sampling_s, "commit": end_s - record.committed_s}
        step_s = end_s - start_s
        stage_s[UNACCOUNTED] = step_s - sum(stage_s.values())
        phase = phase_of(record.prefill.tokens, record.decode.tokens)
        sums = self._phases.setdefault(phase, PhaseSums())
        between_s = start_s - self._last_step_end_s if self._last_step_end_s else 0.0
        sums.add(record, step_s, between_s)
        for name, seconds in stage_s.items():
            sums.add_stage(name, seconds)
        # A prompt's first token is sampled after its last chunk.
        num_samples = plan.decode_work.tokens + sum(chunk.last for chunk in plan.prefill)
        cost = self._cost.for_step(plan.prefill_work.tokens)
        stage_work = cost.stages(plan.prefill_work, plan.decode_work, num_samples)
        for name, work in stage_work.items():
            sums.add_stage_work(name, work)
        self._stage_names = list(stage_s)
        self._steps.append([record.step, phase, start_s, *stage_s.values()])
        self._last_step_end_s = end_s

    def add_request(self, record: RequestRecord) -> None:
        """Do nothing: this profile measures steps only."""

    def end(self) -> None:
        self._wrappers.remove()

    def result(self) -> dict[str, Any]:
        return {
            "kind": "stages",
            "phases": {
                name: self._phases[name].as_json() for name in PHASES if name in self._phases
            },
            "stage_names": self._stage_names,
            "steps": self._steps,
        }
