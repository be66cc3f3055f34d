"""Simulated engines follow the scheduler, and their times are sums of step times."""

from __future__ import annotations

from itertools import pairwise

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import TraceRequest, synthetic
from twostroke.plan import PhaseWork
from twostroke.planner.engine import SimulatedEngine
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.predict import BEYOND_MEASURED_DRIFT, predict
from twostroke.planner.simulate import VirtualClock, simulate
from twostroke.planner.steptimes import MeasuredRange, StepModel

SHAPE = EngineShape(4096, 2048, 8, 256)
NO_GOALS = Goals()


class Linear:
    """1 ms a step, 0.1 ms a prompt token, 0.5 ms a row that decodes."""

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        return 1e-3 + 1e-4 * prefill.tokens + 5e-4 * decode.rows


EXACT = StepModel(Linear(), "a test", drift=0.0, step_error=0.0, host_s=2e-3)


def test_a_request_alone_takes_the_sum_of_its_steps() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine("engine-0", SHAPE.scheduler_config(), Linear(), 2e-3, clock)
    (record,) = simulate([TraceRequest(0.0, 300, 4)], clock, [engine])
    chunks = [size for _, _, _, size in record.chunks]
    assert chunks == [256, 44]
    first_s = 2 * (1e-3 + 2e-3) + 300 * 1e-4
    assert record.token_s[0] == pytest.approx(first_s)
    gaps = [after - before for before, after in pairwise(record.token_s)]
    assert gaps == pytest.approx([1e-3 + 5e-4 + 2e-3] * 3)
    engine.scheduler.audit()


def test_prompts_that_share_blocks_find_them_cached() -> None:
    shared = [TraceRequest(float(n), 512, 2, (1, 2)) for n in range(2)]
    other = TraceRequest(2.0, 512, 2, (3, 2))
    clock = VirtualClock()
    engine = SimulatedEngine("engine-0", SHAPE.scheduler_config(), Linear(), 0.0, clock)
    records = simulate([*shared, other], clock, [engine], block_tokens=256)
    assert [one.num_cached for one in records] == [0, 496, 0]  # one token must be computed


def test_requests_without_blocks_share_nothing() -> None:
    clock = VirtualClock()
    engine = SimulatedEngine("engine-0", SHAPE.scheduler_config(), Linear(), 0.0, clock)
    records = simulate([TraceRequest(float(n), 400, 2) for n in range(3)], clock, [engine])
    assert [one.num_cached for one in records] == [0, 0, 0]


def test_the_same_seed_gives_the_same_answer_and_another_one_another() -> None:
    trace = synthetic(6.0, 6.0, 200, 20, seed=1)
    noisy = StepModel(Linear(), "", 0.1, 0.1, 1e-3, decode_ratios=(0.5, 1.5))
    one, again, other = (
        predict(trace, EngineLayout(1, SHAPE), noisy, NO_GOALS, seed=seed).figures
        for seed in (3, 3, 4)
    )
    assert one == again
    assert one != other


def test_intervals_are_as_wide_as_the_step_times_are_uncertain() -> None:
    trace = [TraceRequest(float(n), 100, 5) for n in range(10)]
    sure = predict(trace, EngineLayout(1, SHAPE), EXACT, NO_GOALS).figures["p50_ttft_ms"]
    assert sure.low == pytest.approx(sure.expected)
    assert sure.high == pytest.approx(sure.expected)
    unsure = StepModel(Linear(), "", drift=0.2, step_error=0.0, host_s=0.0)
    found = predict(trace, EngineLayout(1, SHAPE), unsure, NO_GOALS).figures["p50_ttft_ms"]
    assert found.low == pytest.approx(0.8 * found.expected)
    assert found.high == pytest.approx(1.2 * found.expected)


def test_steps_beyond_what_was_measured_widen_the_interval_and_are_told() -> None:
    trace = [TraceRequest(float(n), 200, 2) for n in range(5)]
    small = StepModel(Linear(), "", 0.1, 0.0, 0.0, range=MeasuredRange(100, 100, 1e6))
    found = predict(trace, EngineLayout(1, SHAPE), small, NO_GOALS)
    assert 0.5 < found.beyond_measured_share < 1.0
    drift = 0.1 + BEYOND_MEASURED_DRIFT * found.beyond_measured_share
    ttft = found.figures["p50_ttft_ms"]
    assert ttft.high == pytest.approx((1 + drift) * ttft.expected)
    assert "larger than all measured steps" in found.notes[0]


def test_more_engines_meet_goals_that_one_misses() -> None:
    trace = synthetic(32.0, 8.0, 300, 30, seed=2)
    goals = Goals(ttft_s=0.2)
    one, four = (predict(trace, EngineLayout(n, SHAPE), EXACT, goals).figures for n in (1, 4))
    assert one["met"].expected < 0.5
    assert four["met"].expected > 0.95
    assert four["engine_utilisation"].expected < one["engine_utilisation"].expected


def test_a_full_cache_preempts_and_nothing_is_lost() -> None:
    tight = EngineShape(512, 512, 8, 256)
    trace = [TraceRequest(0.0, 100, 300) for _ in range(4)]
    found = predict(trace, EngineLayout(1, tight), EXACT, NO_GOALS)
    assert found.figures["preempted"].expected > 0
    assert found.figures["engine_kv_peak"].expected > 0.9


def test_requests_that_no_engine_can_hold_are_told_with_the_longest() -> None:
    trace = [TraceRequest(0.0, 100, 5), TraceRequest(1.0, 3000, 5), TraceRequest(2.0, 2046, 5)]
    with pytest.raises(ConfigError, match=r"2 of 3 requests .* longest: 3,000 prompt and 5 output"):
        predict(trace, EngineLayout(1, SHAPE), EXACT, NO_GOALS)
