"""Simulated engines with speculation, an offload tier, and plans that run ahead."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.planner.test_simulation import EXACT, NO_GOALS, SHAPE
from twostroke.measure.load.traces import TraceRequest, synthetic
from twostroke.observe.record import RequestRecord
from twostroke.plan import PhaseWork, Slot
from twostroke.planner.engine import Link, SimulatedEngine
from twostroke.planner.layout import EngineLayout, EngineShape, shape_of_server
from twostroke.planner.offload import OffloadHits
from twostroke.planner.predict import predict
from twostroke.planner.simulate import VirtualClock, simulate
from twostroke.planner.speculation import WRONG, Acceptance, counts_of, measured_acceptance
from twostroke.planner.steptimes import FittedSteps, MeasuredStep
from twostroke.planner.stretch import TOKEN, SteadyScheduler


class Flat:
    """10 ms a step and 0.1 ms a token: drafted tokens are nearly free."""

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        return 1e-2 + 1e-4 * (prefill.tokens + decode.tokens)


def run(
    trace: list[TraceRequest], shape: EngineShape, host_s: float = 0.0
) -> tuple[list[RequestRecord], SimulatedEngine]:
    clock = VirtualClock()
    (engine,) = EngineLayout(1, shape).simulated(Flat(), host_s, clock)
    records = simulate(trace, clock, [engine])
    engine.scheduler.audit()
    assert not engine.scheduler.has_requests
    return records, engine


def test_drafts_write_several_tokens_in_a_step() -> None:
    trace = [TraceRequest(0.0, 64, 200)]
    ((plain,), _), ((drafted,), engine) = (
        run(trace, SHAPE._replace(acceptance=acceptance))
        for acceptance in (None, Acceptance(0.7, 4))
    )
    assert len(plain.token_s) == len(drafted.token_s) == 200
    # 1 + 0.7 + 0.7² + 0.7³ + 0.7⁴ tokens a step, which takes 4% longer
    assert plain.decode_s / drafted.decode_s == pytest.approx(2.77 / 1.04, rel=0.15)
    assert drafted.accepted / drafted.drafted == pytest.approx(1.77 / 4, rel=0.15)
    assert engine.usage.decode_tokens == 199
    assert engine.usage.steps < 100


def test_bad_drafts_are_soon_not_verified() -> None:
    trace = [TraceRequest(0.0, 64, 400)]

    class Dear(Flat):
        def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
            return 1e-3 + 1e-3 * (prefill.tokens + decode.tokens)

    clock = VirtualClock()
    shape = SHAPE._replace(acceptance=Acceptance(0.1, 4))
    (engine,) = EngineLayout(1, shape).simulated(Dear(), 0.0, clock)
    (record,) = simulate(trace, clock, [engine])
    assert record.drafted < 100  # of 1,600 offered tokens


def test_the_tokens_before_the_first_wrong_one_are_written() -> None:
    slots = (Slot(0, 5, 3), Slot(1, 5, 0), Slot(2, 5, 2), Slot(3, 5, 1))
    drafts = (TOKEN, WRONG, WRONG, TOKEN, TOKEN, WRONG)
    assert counts_of(slots, drafts, 2) == [2, 1, 3, 1, 1, 1]


def test_a_servers_acceptance_comes_from_its_records() -> None:
    # Of each step: rows with an offer, rows with drafts, drafted tokens, accepted rows by position
    steps: list[dict[str, Any]] = [
        {"drafts": [2, 2, 8, [2, 1, 1, 1], 0.0, 0.0]},
        {"drafts": None},
        {},
        {"drafts": [1, 1, 4, [0, 0, 0, 0], 0.0, 0.0]},
    ]
    found = measured_acceptance(steps)
    assert found == Acceptance(5 / 7, 4)
    assert measured_acceptance(steps[1:3]) is None


def test_drafts_that_were_never_measured_cost_as_much_as_prompt_tokens() -> None:
    def seconds(tokens: int, rows: int) -> float:
        return 4e-3 + 2e-4 * tokens + 3e-4 * rows if tokens else 3e-3 + 4e-4 * rows

    steps = [
        MeasuredStep(
            PhaseWork(int(tokens > 0), tokens, tokens * 50, tokens),
            PhaseWork(rows, rows, 100 * rows, 100 * rows),
            seconds(tokens, rows),
        )
        for tokens in (0, 16, 64, 128, 0, 32)
        for rows in (1, 2, 4, 8)
        for _ in range(10)
    ]
    fitted = FittedSteps(steps)
    verified = fitted.seconds(PhaseWork(), PhaseWork(8, 40, 4000, 800))
    assert verified == pytest.approx(seconds(32, 8), rel=0.15)
    assert verified > fitted.seconds(PhaseWork(), PhaseWork(8, 8, 800, 800))


def test_a_plan_runs_ahead_as_on_a_gpu() -> None:
    """A request that arrives in a step waits for the next one, which is planned already."""
    ahead = SHAPE._replace(max_in_flight=2)
    trace = [TraceRequest(0.0, 64, 60), TraceRequest(0.213, 64, 2)]
    first_s = 1e-2 + 64e-4 + 1e-3
    step_s = 1e-2 + 1e-4 + 1e-3
    waits = {}
    for shape in (SHAPE, ahead):
        (short, long), _ = run(trace, shape, 1e-3)
        assert long.token_s[0] == pytest.approx(first_s)
        gaps = [after - before for before, after in pairwise(long.token_s)]
        assert min(gaps) == pytest.approx(step_s)  # the host's time is measured beside the device
        # The step that is running at the arrival ends here.
        running_s = first_s + step_s * -(-(0.213 - first_s) // step_s)
        assert short.num_prompt == 64
        waits[shape.max_in_flight] = short.token_s[0] - running_s
    assert waits[1] == pytest.approx(step_s + 64e-4)
    assert waits[2] == pytest.approx(waits[1] + step_s)


@pytest.mark.parametrize("rate", [1.0, 8.0])
def test_stretches_change_next_to_nothing_when_plans_run_ahead(
    rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = synthetic(rate, 20.0, 100, 60, seed=7)
    shape = SHAPE._replace(max_in_flight=2)
    found, engine = run(trace, shape)
    monkeypatch.setattr(SteadyScheduler, "steady_steps", lambda self: 0)
    monkeypatch.setattr(SteadyScheduler, "will_be_steady", lambda self: False)
    plain, other = run(trace, shape)
    assert engine.usage.decode_tokens == other.usage.decode_tokens
    ends = {one.request_id: list(one.token_s) for one in plain}
    for one in found:
        # At the end of a stretch a request may enter one step earlier.
        assert list(one.token_s) == pytest.approx(ends[one.request_id], abs=0.05)


def test_hits_in_an_offload_tier_are_fetched_instead_of_computed() -> None:
    shape = EngineShape(65536, 32768, 8, 8192, token_bytes=1e5)
    hits = OffloadHits(0.5, 1e9)
    (plain,), _ = run([TraceRequest(0.0, 8000, 4)], shape)
    (fetched,), _ = run([TraceRequest(0.0, 8000, 4)], shape._replace(offload=hits))
    assert (plain.num_cached, fetched.num_cached) == (0, 4000)
    assert plain.ttft_s == pytest.approx(1e-2 + 0.8)
    assert fetched.ttft_s == pytest.approx(4000 * 1e5 / 1e9 + 1e-2 + 0.4)
    # Two prompts share the link, and a part that is still cached is not fetched again.
    shared = [TraceRequest(0.0, 8000, 4), TraceRequest(0.0, 8000, 4)]
    first, second = run(shared, shape._replace(offload=hits))[0]
    assert second.ttft_s > first.ttft_s + 0.39
    cached = [TraceRequest(float(n), 512, 2, (1,)) for n in range(2)]
    _, again = run(cached, shape._replace(offload=hits))[0]
    assert again.ttft_s == pytest.approx(1e-2 + 16e-4)


def test_pools_have_these_features_too() -> None:
    shape = SHAPE._replace(
        acceptance=Acceptance(0.6, 3), offload=OffloadHits(0.3, 1e9), token_bytes=1e3
    )
    layout = EngineLayout(0, shape, 1, 1, Link(1e3, 1e9))
    trace = synthetic(4.0, 10.0, 200, 30, seed=3)
    found = predict(trace, layout, EXACT, NO_GOALS).figures
    slow = predict(trace, EngineLayout(0, SHAPE, 1, 1, layout.link), EXACT, NO_GOALS).figures
    assert found["cached"].expected > 0.2
    assert found["mean_tpot_ms"].expected < slow["mean_tpot_ms"].expected
    assert layout.as_json()["speculation"] == {"rate": 0.6, "depth": 3}


@pytest.mark.parametrize(("device", "in_flight"), [("cpu", 1), ("cuda:0", 2)])
def test_a_gpu_server_plans_ahead(device: str, in_flight: int) -> None:
    records = {
        "kv_tokens": 4096,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "device": device,
    }
    assert shape_of_server(records, "a test").max_in_flight == in_flight
