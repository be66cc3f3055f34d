"""`Recent`: windows are differences of the totals, and quantiles are within a bin of the truth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from twostroke.kv.usage import KVUsage
from twostroke.observe.recent import COARSE, FINE, HOUR_S, MINUTE_S, Recent, Spread, totals_snapshot
from twostroke.observe.record import Causes, FirstToken, PhaseRecord, StepRecord
from twostroke.observe.totals import Totals

EMPTY = PhaseRecord(0, 0, 0, 0.0, 0.0)


def step(at: float, took: float, prefill: int = 0, streams: int = 0) -> StepRecord:
    """A step that ended at `at` with `streams` tokens, or with the first token of a prompt."""
    chunk = PhaseRecord(1, prefill, 0, 2.0 * prefill, 1.0) if prefill else EMPTY
    slots = PhaseRecord(streams, streams, 0, 2.0 * streams, 5.0) if streams else EMPTY
    since = Causes(took if streams else 0.0, 0.0 if streams else took)
    first = (FirstToken(took * 3, prefill, 0),) if prefill else ()
    kv = KVUsage(100, 0, 0, 0, 100)
    return StepRecord(
        *(0, at - took, at - took, at, took, 0.0, chunk, slots, (), (), 0, 0, 0, kv),
        since_s=since,
        regular=streams,
        first=first,
    )


def told(steps: Sequence[StepRecord], started_s: float = 0.0) -> Recent:
    totals = Totals(1024)
    recent = Recent(totals, started_s)
    for one in steps:
        recent.add_step(one)
        totals.add_step(one)
    return recent


@pytest.mark.parametrize("seed", range(5))
def test_a_quantile_is_within_one_bin_of_the_exact_one(seed: int) -> None:
    chance = random.Random(seed)
    values = sorted(chance.lognormvariate(-4.0, 1.5) for _ in range(2000))
    spread = Spread()
    for value in values:
        spread.add(value)
    shares = (0.01, 0.5, 0.95, 0.99, 1.0)
    exact = [values[max(0, round(share * 2000) - 1)] for share in shares]
    assert spread.quantiles(shares) == pytest.approx(exact, rel=0.012)
    assert spread.count == 2000


def test_an_empty_spread_has_no_quantile() -> None:
    assert Spread().quantiles((0.5, 0.99)) == [None, None]


def test_equal_values_have_one_quantile_whatever_the_share() -> None:
    spread = Spread()
    spread.add(0.006, 1000)
    assert spread.quantiles((0.01, 0.5, 0.99)) == pytest.approx([0.006] * 3, rel=0.012)


def test_a_window_contains_what_was_added_in_it_at_the_right_rate() -> None:
    """Ten steps of eight streams a second, for five minutes: 80 tokens a second in any window."""
    recent = told([step(0.1 * n, 0.1, streams=8) for n in range(1, 3001)])
    whole = recent.window(300.0, None)
    assert whole.work == totals_snapshot(recent.totals)
    assert (whole.seconds, whole.work.generated_tokens, whole.gaps.count) == (300.0, 24000, 24000)
    for seconds in (10.0, 60.0):
        window = recent.window(300.0, seconds)
        assert seconds - 1.2 <= window.seconds <= seconds
        assert window.work.generated_tokens / window.seconds == pytest.approx(80.0, rel=0.012)
        assert window.work.generated_tokens == window.gaps.count
        assert window.gaps.quantiles((0.5,)) == pytest.approx([0.1], rel=0.012)


def test_after_a_pause_a_window_leaves_out_earlier_work() -> None:
    early = [step(0.1 * n, 0.1, streams=4) for n in range(1, 21)]
    recent = told([*early, step(100.0, 0.5, prefill=64)])
    window = recent.window(101.0, 10.0)
    assert window.seconds == 10.0
    assert (window.work.prefill_tokens, window.work.generated_tokens) == (64, 1)
    assert window.ttfts.count == 1
    assert window.gaps.count == 0
    assert recent.window(200.0, 60.0).work.generated_tokens == 0
    assert recent.window(200.0, None).work.generated_tokens == 81


def test_the_first_seconds_are_not_spread_over_a_minute() -> None:
    recent = told([step(50.0 + 0.1 * n, 0.1, streams=1) for n in range(1, 41)], started_s=50.0)
    window = recent.window(54.0, 60.0)
    assert window.seconds == pytest.approx(4.0)
    assert window.work.generated_tokens == 40


def test_only_a_minute_is_kept_and_a_long_step_is_drawn_as_long_as_it_took() -> None:
    recent = told([step(1.1 * n, 0.1, streams=1) for n in range(1, 500)])
    assert len(recent.fine) == FINE[1]
    series = recent.series(1.1 * 499, MINUTE_S)
    assert 53 <= len(series) <= 56
    assert all(0 <= one.ended_s < one.began_s < 62 for one in series)
    (point,) = told([step(20.0, 8.0, prefill=400)]).series(21.0, MINUTE_S)
    assert (point.began_s, point.ended_s) == pytest.approx((9.0, 1.0))
    assert (point.prefill_rate, point.written_rate) == pytest.approx((50.0, 0.125))
    assert (point.first_p50_s, point.first_p95_s) == pytest.approx((24.0, 24.0), rel=0.012)
    assert point.gap_p50_s is None


def test_the_number_of_slices_of_an_hour_does_not_depend_on_the_load() -> None:
    """Two hours of ten steps a second: quick ones, and in the last half hour slow ones."""
    steps = [step(0.5 * n, 0.1 if n < 10800 else 0.4, streams=2) for n in range(1, 14401)]
    recent = told(steps)
    assert len(recent.coarse) == COARSE[1]
    hour, ten_minutes = recent.window(7200.0, HOUR_S), recent.window(7200.0, 600.0)
    for window, seconds in ((hour, HOUR_S), (ten_minutes, 600.0)):
        assert seconds - 2 * COARSE[0] <= window.seconds <= seconds
        assert window.work.generated_tokens / window.seconds == pytest.approx(4.0, rel=0.01)
    assert hour.gaps.quantiles((0.25, 0.75)) == pytest.approx([0.1, 0.4], rel=0.012)
    assert ten_minutes.gaps.quantiles((0.01,)) == pytest.approx([0.4], rel=0.012)
    series = recent.series(7200.0, HOUR_S)
    assert len(series) <= HOUR_S / COARSE[0] + 1
    assert [round(one.gap_p50_s or 0, 1) for one in (series[0], series[-1])] == [0.1, 0.4]
    assert {round(one.written_rate or 0, 1) for one in series} <= {4.0, 4.1}


def test_the_load_of_a_slice_is_the_maximum_of_all_engines_together() -> None:
    recent = Recent(Totals(1024), 0.0)
    for engine, at, running, waiting, used in (
        ("a", 1.0, 3, 5, 40),
        ("b", 1.1, 2, 0, 10),
        ("a", 1.2, 1, 0, 20),
    ):
        kv = KVUsage(100, used, 0, 0, 100 - used)
        one = step(at, 0.1, streams=1)
        recent.add_step(one._replace(engine=engine, running=running, waiting=waiting, kv=kv))
    (point,) = recent.series(2.0, MINUTE_S)
    assert (point.running, point.waiting) == (5, 5)
    assert point.kv_share == pytest.approx(0.25), "of both: 50 of 200"


def test_errors_have_a_point_where_no_step_ran() -> None:
    recent = told([])
    for _ in range(3):
        recent.before_change(10.0)
        recent.totals.add_answer(500)
    (point,) = recent.series(10.5, MINUTE_S)
    assert point.error_rate == 3.0
    assert (point.running, point.written_rate, point.gap_p50_s) == (None, None, None)


def test_a_refusal_while_nothing_runs_is_in_the_windows_and_leaves_them() -> None:
    recent = told([step(1.0, 0.1, streams=1)])
    for at in (100.0, 100.5):
        recent.before_change(at)
        recent.totals.add_answer(429)
    assert recent.window(105.0, 10.0).work.answered_429 == 2
    assert recent.window(105.0, 10.0).work.generated_tokens == 0
    assert recent.window(150.0, 10.0).work.answered_429 == 0
    assert recent.window(150.0, 60.0).work.answered_429 == 2
    (point,) = recent.series(150.0, MINUTE_S)
    assert (point.error_rate, point.written_rate) == (2.0, None), "no step, no rate of tokens"
