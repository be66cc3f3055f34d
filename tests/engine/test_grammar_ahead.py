"""Grammars beside other streams: steps are launched ahead, and the tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_llm
from twostroke.engine.core import EngineCore
from twostroke.exec.executor import Masks
from twostroke.plan import StepPlan, StepResult
from twostroke.request import EngineRequest, FinishReason, SamplingParams, StructuredOutputs

Calls = list[tuple[str, int]]


class Noted:
    """An executor that takes steps ahead, and notes its calls."""

    def __init__(self, executor: Any, max_in_flight: int) -> None:
        self.executor, self.max_in_flight = executor, max_in_flight
        self.calls: Calls = []
        self.masked: set[int] = set()  # steps with a sample of a grammar
        self.fail_at = -1

    def forward(self, plan: StepPlan) -> tuple[int, Any]:
        self.calls.append(("forward", plan.step))
        return plan.step, self.executor.forward(plan)

    def sample(self, handle: tuple[int, Any], masks: Masks | None = None) -> Pending:
        step, given = handle
        if step == self.fail_at:
            raise RuntimeError("no luck")
        self.calls.append(("sample", step))
        if masks is not None:
            self.masked.add(step)
        return Pending(self.calls, step, self.executor.sample(given, masks))

    def reset(self) -> None:
        self.executor.reset()


class Pending:
    def __init__(self, calls: Calls, step: int, pending: Any) -> None:
        self.calls, self.step, self.pending = calls, step, pending

    def wait(self) -> StepResult:
        self.calls.append(("wait", self.step))
        result: StepResult = self.pending.wait()
        return result


def requests() -> list[EngineRequest]:
    """Streams that end at their length, and grammars that end by themselves, one after another."""

    def free(n: int) -> SamplingParams:
        return SamplingParams(temperature=0.8, max_tokens=20 + 3 * n, ignore_eos=True)

    def bound(regex: str) -> SamplingParams:
        return SamplingParams(max_tokens=40, structured_outputs=StructuredOutputs(regex=regex))

    wanted = [free(n) for n in range(4)]
    wanted += [bound("[a-z]{5}"), bound("[0-9]{9,14}"), bound("(ab|cd){2,5}x")]
    return [EngineRequest(f"r{n}", (5, 6, 7 + n), p, seed=n) for n, p in enumerate(wanted)]


def write(
    folder: Path, depth: int, fail_at: int = -1, **settings: Any
) -> tuple[dict[str, list[int]], dict[str, FinishReason], Noted, EngineCore]:
    core = tiny_llm(folder, **settings).engine.core
    for given in requests()[4:]:  # so that the grammars are compiled
        core.add(given)
    while core.has_work:
        core.step()
    core.scheduler._step = 0
    object.__setattr__(
        core.scheduler.config, "lookahead", 0
    )  # few blocks: some request is preempted
    noted = core._executor = Noted(core._executor, depth)
    noted.fail_at = fail_at
    written: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    for given in requests():
        core.add(given)
        written[given.request_id] = []
    while core.has_work:
        for update in core.step():
            assert not update.error, update.error
            written[update.request_id] += update.tokens
            if update.finish_reason is not None:
                assert update.request_id not in ends
                ends[update.request_id] = update.finish_reason
        core.scheduler.audit()
    return written, ends, noted, core


def test_the_next_forward_is_launched_before_a_grammar_is_waited_for(folder: Path) -> None:
    _, _, noted, _ = write(folder, 2)
    at = {call: n for n, call in enumerate(noted.calls)}
    last = max(step for _, step in noted.calls)
    plain = set(range(last + 1)) - noted.masked
    assert len(noted.masked) > 5
    assert plain
    for step in range(1, last + 1):
        forward, sample, before = at["forward", step], at["sample", step], at["wait", step - 1]
        if step in noted.masked:
            assert forward < before < sample
        else:
            assert forward < sample < before


def test_an_executor_of_one_step_at_a_time_is_called_as_before(folder: Path) -> None:
    _, _, noted, _ = write(folder, 1)
    steps = max(step for _, step in noted.calls) + 1
    expected = [(name, n) for n in range(steps) for name in ("forward", "sample", "wait")]
    assert noted.calls == expected


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 7}, {"max_num_seqs": 3}])
def test_steps_ahead_write_the_same_as_one_step_at_a_time(
    folder: Path, settings: dict[str, Any]
) -> None:
    written, ends, _, _ = write(folder, 1)
    ahead, ends_ahead, noted, core = write(folder, 2, **settings)
    assert ahead == written
    assert ends_ahead == ends
    assert ends["r4"] == FinishReason.STOP
    assert noted.masked
    if "num_gpu_blocks_override" in settings:
        assert any(record.preempted for record in core.records.requests)


def test_updates_collected_before_a_step_fails_are_delivered(folder: Path) -> None:
    """Step 9 fails when it is sampled, after step 8 was waited for."""
    written, ends, _, _ = write(folder, 1)
    ahead, ends_ahead, noted, _ = write(folder, 2, fail_at=9)
    assert ("sample", 9) not in noted.calls
    assert ("wait", 8) in noted.calls
    assert 8 in noted.masked
    assert (ahead, ends_ahead) == (written, ends)
