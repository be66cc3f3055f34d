"""Stretches of decode steps give the same times and tokens as the steps one by one."""

from __future__ import annotations

import pytest

from tests.planner.test_simulation import SHAPE, Linear
from twostroke.measure.load.traces import TraceRequest, synthetic
from twostroke.observe.record import RequestRecord
from twostroke.planner.engine import EngineUsage
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.simulate import VirtualClock, simulate
from twostroke.planner.stretch import SteadyScheduler

TIGHT = EngineShape(1024, 1024, 8, 256)  # requests are preempted


def simulated(
    trace: list[TraceRequest], engines: int, shape: EngineShape
) -> tuple[list[RequestRecord], list[EngineUsage]]:
    clock = VirtualClock()
    simulated_engines = EngineLayout(engines, shape).simulated(Linear(), 1e-4, clock)
    records = simulate(trace, clock, simulated_engines)
    for one in simulated_engines:
        one.scheduler.audit()
        assert not one.scheduler.has_requests
    return records, [one.usage for one in simulated_engines]


@pytest.mark.parametrize(("shape", "rate"), [(SHAPE, 1.0), (SHAPE, 8.0), (TIGHT, 4.0)])
def test_stretches_change_nothing(
    shape: EngineShape, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic(rate, 20.0, 100, 60, seed=7)
    trace = [one for one in trace if one.prompt_tokens + one.output_tokens < 1000]
    found, use = simulated(trace, 1, shape)
    monkeypatch.setattr(SteadyScheduler, "steady_steps", lambda self: 0)
    plain, plain_use = simulated(trace, 1, shape)
    assert [one.request_id for one in found] == [one.request_id for one in plain]
    for one, other in zip(found, plain, strict=True):
        assert list(one.token_s) == pytest.approx(list(other.token_s))
        assert list(one.token_step) == list(other.token_step)
        assert len(one.preempted) == len(other.preempted)
    for of_one, of_other in zip(use, plain_use, strict=True):
        assert (of_one.steps, of_one.decode_tokens) == (of_other.steps, of_other.decode_tokens)
        assert of_one.device_s == pytest.approx(of_other.device_s)
        assert of_one.kv_seconds == pytest.approx(of_other.kv_seconds, rel=0.1)


def test_a_stretch_ends_where_a_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    stretches: list[int] = []
    run = SteadyScheduler.run_stretch

    def count(self: SteadyScheduler, ends_s: list[float]) -> None:
        stretches.append(len(ends_s))
        run(self, ends_s)

    monkeypatch.setattr(SteadyScheduler, "run_stretch", count)
    trace = [TraceRequest(0.0, 100, 400), TraceRequest(0.3, 100, 100)]
    (last, first), _ = simulated(trace, 1, SHAPE)
    assert len(stretches) >= 3
    assert sum(stretches) > 350  # nearly all steps
    assert {len(last.token_s), len(first.token_s)} == {400, 100}
    late = next(one for one in (last, first) if one.num_prompt == 100 and one.received_s > 0.1)
    assert late.scheduled_s - late.received_s < 0.01  # it waits for one step at most
