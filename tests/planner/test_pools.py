"""Simulated pools: the product's hand-over with copies of bytes / bandwidth seconds."""

from __future__ import annotations

import pytest

from tests.planner.test_simulation import EXACT, SHAPE, Linear
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import TraceRequest, synthetic
from twostroke.planner.engine import Link
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.predict import predict
from twostroke.planner.simulate import VirtualClock, simulate

TOKEN_BYTES = 1000.0


def pools(
    prefill: int, decode: int, bytes_per_s: float, shape: EngineShape = SHAPE
) -> EngineLayout:
    return EngineLayout(0, shape, prefill, decode, Link(TOKEN_BYTES, bytes_per_s))


@pytest.mark.parametrize("bytes_per_s", [1e6, 1e7])
def test_the_second_token_waits_for_the_blocks_of_the_prompt(bytes_per_s: float) -> None:
    clock = VirtualClock()
    layout = pools(1, 1, bytes_per_s)
    engines = layout.simulated(Linear(), 0.0, clock)
    (record,) = simulate([TraceRequest(0.0, 200, 5)], clock, engines)
    assert len(record.token_s) == 5
    gaps = [record.token_s[n + 1] - record.token_s[n] for n in range(4)]
    blocks = -(-200 // SHAPE.block_size)
    copy_s = blocks * SHAPE.block_size * TOKEN_BYTES / bytes_per_s
    assert gaps[0] == pytest.approx(copy_s + gaps[1])
    assert gaps[1:] == pytest.approx([1e-3 + 5e-4] * 3)
    for engine in engines:
        engine.scheduler.audit()
        assert not engine.scheduler.has_requests
        assert engine.scheduler.kv.num_held == 0  # offers are released once they are fetched
    prefill, decode = (engine.usage for engine in engines)
    assert (prefill.prefill_tokens, prefill.decode_tokens) == (200, 0)
    assert (decode.prefill_tokens, decode.decode_tokens) == (0, 4)


def test_blocks_of_a_long_prompt_travel_while_the_rest_is_computed() -> None:
    layout = pools(1, 1, 2e7)
    long = TraceRequest(0.0, 2000, 3)
    clock = VirtualClock()
    (record,) = simulate([long], clock, layout.simulated(Linear(), 0.0, clock))
    whole_s = 2000 * TOKEN_BYTES / 2e7
    assert record.token_s[1] - record.token_s[0] < 0.5 * whole_s


def test_every_request_of_a_load_ends_with_its_tokens_and_nothing_is_held() -> None:
    trace = synthetic(20.0, 15.0, 150, 20, seed=4)
    clock = VirtualClock()
    tight = EngineShape(2048, 2048, 8, 256)
    engines = pools(2, 2, 5e6, tight).simulated(Linear(), 1e-3, clock)
    records = simulate(trace, clock, engines)
    assert sorted(len(one.token_s) for one in records) == sorted(one.output_tokens for one in trace)
    for engine in engines:
        engine.scheduler.audit()
        state = engine.state
        assert (state.streams, state.queued, state.promised) == (0, 0, 0)
        assert engine.scheduler.kv.num_held == engine.scheduler.kv.num_receiving == 0


def test_pools_keep_prompts_away_from_streams() -> None:
    """With as many engines; on a fast link."""
    trace = synthetic(16.0, 20.0, 150, 30, seed=5)
    both = predict(trace, EngineLayout(2, SHAPE), EXACT, Goals()).figures
    apart = predict(trace, pools(1, 1, 1e9), EXACT, Goals()).figures
    assert apart["p99_itl_ms"].expected < 0.7 * both["p99_itl_ms"].expected
    assert {"prefill_utilisation", "decode_kv_peak"} <= apart.keys()
