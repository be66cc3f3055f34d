"""Definitions, statistics, arrival times and certification, on numbers checked by hand."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from twostroke.errors import ConfigError
from twostroke.measure.load.arrivals import arrival_times, check_rate, ramp_times
from twostroke.measure.load.definitions import Goals, Sample, goodput
from twostroke.measure.load.load_run import LoadRun
from twostroke.measure.load.result import problems, result
from twostroke.measure.load.stats import (
    min_samples,
    percentile,
    percentile_interval,
    summary_statistics,
)
from twostroke.measure.load.workload import PromptGenerator, random_lengths


def sample(due: float = 0.0, first: float = 1.0, gap: float = 0.1, count: int = 5) -> Sample:
    times = [due + first + n * gap for n in range(count)]
    return Sample(due, due, times, times[-1], 10, count, 0)


def test_a_requests_figures_count_from_when_it_was_due() -> None:
    late = Sample(10.0, 12.0, [13.0, 13.5, 14.5], 14.6, 8, 4)
    assert (late.lag_s, late.ttft_s, late.e2el_s) == (2.0, 3.0, 4.5)
    assert late.itls_s == [0.5, 1.0]
    assert late.tpot_s == 0.5  # 1.5 s for the three tokens after the first, in two events
    assert Sample(0.0, 0.0, [1.0], 1.0, 8, 1).tpot_s is None


def test_goodput_counts_those_that_met_every_goal() -> None:
    samples = [sample(first=0.1), sample(first=0.3), sample(gap=0.5), Sample(0.0, error="no")]
    assert goodput(samples, Goals(ttft_s=0.2), 2.0) == 0.5
    assert goodput(samples, Goals(tpot_s=0.2), 1.0) == 2.0
    assert goodput(samples, Goals(ttft_s=0.2, e2el_s=0.4), 1.0) == 0.0


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    for share in (1, 25, 50, 90, 99, 100):
        assert percentile(values, share) == pytest.approx(float(numpy.percentile(values, share)))
    found = summary_statistics(values, [50, 99.9])
    assert found["median"] == found["p50"] == 3.5
    assert "p99.9" in found
    assert percentile([], 99) == 0.0


def test_a_p99_needs_381_values() -> None:
    assert [min_samples(share) for share in (50, 90, 99)] == [4, 35, 381]
    for share in (0.1, *range(1, 100), 99.9):
        values = [float(n) for n in range(min_samples(share))]
        interval = percentile_interval(values, share)
        assert interval is not None
        assert interval[0] <= percentile(values, share) <= interval[1]
        assert percentile_interval(values[1:], share) is None
    assert percentile_interval(values, 100) is None


def test_the_interval_of_a_percentile_holds_the_percentile_in_95_percent_of_the_samples() -> None:
    # P(interval) = P(low <= number of values below the percentile < high), a binomial.
    for count, share in ((381, 99), (381, 50), (500, 95), (800, 90)):
        interval = percentile_interval([float(n + 1) for n in range(count)], share)
        assert interval is not None
        p, (low, high) = share / 100, map(int, interval)
        chances = (math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(low, high))
        assert sum(chances) == pytest.approx(0.95, abs=0.012)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = arrival_times(4001, 20.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(200.0)
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)
    assert times == arrival_times(4001, 20.0, burstiness, seed=3)
    assert arrival_times(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_one_rate_to_the_other(strategy: str) -> None:
    times = ramp_times(2000, 5.0, 50.0, strategy, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert 1 / statistics.fmean(gaps[:200]) == pytest.approx(6.5, rel=0.35)
    assert 1 / statistics.fmean(gaps[-200:]) == pytest.approx(46.0, rel=0.35)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_wrong_rates_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ConfigError, match=r"--request-rate|--burstiness"):
        check_rate(rate, burstiness)


def test_prompts_are_their_own_and_share_what_they_should() -> None:
    prompts = PromptGenerator(0, "a", as_text=False)
    one, two = prompts.unique(1, 100), prompts.unique(2, 100)
    assert len(one) == 100
    assert one != two
    assert one == PromptGenerator(0, "a", as_text=False).unique(1, 100)
    assert one != PromptGenerator(0, "b", as_text=False).unique(1, 100)
    one, two = prompts.unique(1, 100, 30), prompts.unique(2, 100, 30)
    assert one[:30] == two[:30]
    assert one[30:] != two[30:]
    text = PromptGenerator(0, "a", as_text=True, words_per_token=0.5).unique(1, 100)
    assert len(str(text).split()) == 50


def test_lengths_vary_by_the_ratio() -> None:
    lengths = random_lengths(2000, 100, 40, 0.5, seed=0)
    inputs, outputs = zip(*lengths, strict=True)
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (20, 60)
    assert random_lengths(3, 100, 40, 0.0, 0) == [(100, 40)] * 3


def run_of(samples: list[Sample], lags: list[float] | None = None) -> LoadRun:
    return LoadRun(samples, 0.0, max(s.ended_s for s in samples), lags or [0.0001] * 100, 4)


def changed(samples: list[Sample], late_s: float = 0.0, cached: int = 0) -> list[Sample]:
    return [replace(s, sent_s=s.sent_s + late_s, cached_tokens=cached) for s in samples]


GOOD = [sample(due=0.1 * n) for n in range(400)]


def test_a_good_run_is_certified_under_vllms_names() -> None:
    found = result(
        run_of(GOOD),
        percentiles=[99],
        goals=Goals(ttft_s=2.0),
        settings={"max_concurrency": None},
        cached_expected=0.0,
    )
    assert found["certified"], found["problems"]
    assert found["completed"] == 400
    assert found["total_output_tokens"] == 2000
    assert found["p99_ttft_ms"] == pytest.approx(1000.0)
    assert found["mean_tpot_ms"] == pytest.approx(100.0)
    assert found["request_goodput"] == pytest.approx(400 / found["duration"])
    assert {"definitions", "environment", "schema_version"} <= found.keys()


@pytest.mark.parametrize(
    ("run", "expected", "says"),
    [
        (run_of([*GOOD, Sample(0.0, ended_s=1.0, error="no")]), 0.0, "1 of 401 requests"),
        (
            run_of(GOOD, [0.0] * 90 + [0.2] * 10),
            0.0,
            "the p99 delay of its event loop was 200.0 ms",
        ),
        (run_of(GOOD[:100]), 0.0, "100 requests are too few for a p99"),
        (run_of(changed(GOOD, late_s=0.5)), 0.0, "the p99 delay of sending a request was 500.0"),
        (run_of(changed(GOOD, cached=9)), 0.0, "the prefix cache answered 90%"),
    ],
)
def test_a_run_that_cannot_be_believed_says_why(run: LoadRun, expected: float, says: str) -> None:
    assert any(says in problem for problem in problems(run, [99], expected, limited=False))


def test_what_the_prefix_cache_should_answer_is_no_problem() -> None:
    shared = changed(GOOD, cached=9)
    assert problems(run_of(shared), [99], 0.9, limited=False) == []
    assert problems(run_of(shared), [99], None, limited=False) == []
