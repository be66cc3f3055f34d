"""`ab`: compares two servers or two settings with pairs of runs of the same requests."""

from __future__ import annotations

import asyncio
import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.measure.compare.arms import serving
from twostroke.measure.compare.paired_comparison import (
    METRICS,
    Comparison,
    compare,
    detectable,
    overall,
    pairs_needed,
)
from twostroke.measure.load.bench import ServeBench, ServeOptions


class RunFigures(NamedTuple):
    """The figures of one run of one arm."""

    ttft: float
    tpot: float
    itl_p99: float
    throughput: float
    failed: int = 0
    problems: tuple[str, ...] = ()


class Pilot(NamedTuple):
    """The spread of pilot runs, which determines the changes that the trial can detect. Pilot runs
    are compared only within an arm, so they do not anticipate the result."""

    spread: dict[str, float]  # metric → standard deviation of the logarithm of a pair's ratio
    runs: int  # of each arm

    def detectable(self, pairs: int) -> dict[str, float]:
        """Return, by metric, the relative change that `pairs` pairs detect with 90% power."""
        return {
            name: detectable(spread, pairs, len(self.spread))
            for name, spread in self.spread.items()
        }

    def pairs_for(self, effect: float) -> dict[str, int]:
        """Return, by metric, the number of pairs that detect `effect` with 90% power."""
        return {
            name: pairs_needed(spread, effect, len(self.spread))
            for name, spread in self.spread.items()
        }


@dataclass(frozen=True)
class Trial:
    """The runs of both arms and their comparison."""

    a: list[RunFigures]
    b: list[RunFigures]
    comparisons: list[Comparison] = field(default_factory=list)
    pilot: Pilot | None = None

    @property
    def runs(self) -> list[RunFigures]:
        return [*self.a, *self.b]

    @property
    def verdict(self) -> str:
        """The overall verdict; INVALID if requests failed, because their times do not count."""
        if any(one.failed for one in self.runs):
            return "INVALID"
        return overall(self.comparisons)


@dataclass
class TrialCallbacks:
    """Callbacks for the progress of a trial."""

    pilot: Callable[[Pilot], None] = lambda pilot: None
    run: Callable[[int, str, RunFigures], None] = lambda pair, arm, figures: None


def run_ab(
    arms: tuple[str, str],
    options: ServeOptions,
    pairs: int,
    pilot_runs: int = 0,
    callbacks: TrialCallbacks | None = None,
) -> Trial:
    """Run a trial.

    `arms`: two arms in the format of `arms.py`. `options`: the workload. `pilot_runs`: number of
    runs of each arm before the pairs, which warm the servers up and measure the spread.
    """
    if pairs < 2:
        raise ConfigError("--pairs must be at least 2: the spread needs two pairs")
    if pilot_runs < 0 or pilot_runs == 1:
        raise ConfigError("--pilot must be 0 or at least 2: the spread needs two runs")
    with serving(arms) as urls:
        trial = _trial(urls, options, pairs, pilot_runs, callbacks or TrialCallbacks())
        return asyncio.run(trial)


async def _trial(
    urls: Sequence[str],
    options: ServeOptions,
    pairs: int,
    pilot_runs: int,
    callbacks: TrialCallbacks,
) -> Trial:
    # Both arms get the same prompts. If both arms are one server, the prompts differ, because its
    # prefix cache would have the prompts of the other arm's run.
    salt = secrets.token_hex(4)
    salts = [f"{salt} {arm if urls[0] == urls[1] else ''}" for arm in "AB"]
    benches = [
        ServeBench(replace(options, url=url, salt=one))
        for url, one in zip(urls, salts, strict=True)
    ]

    async def alternating(
        count: int, seeds: Sequence[int]
    ) -> tuple[list[RunFigures], list[RunFigures]]:
        found: tuple[list[RunFigures], list[RunFigures]] = ([], [])
        for pair in range(count):
            # A B, then B A: a drift of the machine affects both arms alike.
            for arm in (0, 1) if pair % 2 == 0 else (1, 0):
                benches[arm].options = replace(benches[arm].options, seed=seeds[pair])
                figures = _figures((await benches[arm].run()).result)
                found[arm].append(figures)
                callbacks.run(pair, "AB"[arm], figures)
        return found

    pilot = None
    try:
        for bench in benches:
            await bench.connect()
        if pilot_runs:
            # One seed for all pilot runs, because the two runs of a pair have one seed, too.
            pilot = pilot_of(*await alternating(pilot_runs, [options.seed] * pilot_runs))
            callbacks.pilot(pilot)
        a, b = await alternating(pairs, range(options.seed, options.seed + pairs))
    finally:
        for bench in benches:
            bench.close()
    return Trial(a, b, compare_runs(a, b), pilot)


def pilot_of(a: Sequence[RunFigures], b: Sequence[RunFigures]) -> Pilot:
    """Return the spread of a pair's ratio from the spread of the runs within each arm."""
    spread = {}
    for name in METRICS:
        arms = [[getattr(one, name) for one in runs] for runs in (a, b)]
        if all(value > 0 for values in arms for value in values):
            variances = [statistics.variance(map(math.log, values)) for values in arms]
            spread[name] = math.sqrt(sum(variances))
    return Pilot(spread, len(a))


def compare_runs(a: Sequence[RunFigures], b: Sequence[RunFigures]) -> list[Comparison]:
    names = [name for name in METRICS if all(getattr(one, name) > 0 for one in (*a, *b))]
    return [
        compare(
            name, [getattr(one, name) for one in a], [getattr(one, name) for one in b], len(names)
        )
        for name in names
    ]


def _figures(result: dict[str, Any]) -> RunFigures:
    # Means, because latencies have two modes (the engine was busy or idle), and a median can jump
    # between the modes. A single run may have too few requests for a p99, because only all runs
    # together are judged.
    problems = tuple(one for one in result["problems"] if "too few" not in one)
    return RunFigures(
        result["mean_ttft_ms"],
        result["mean_tpot_ms"],
        result.get("p99_itl_ms", 0.0),
        result["output_throughput"],
        result["failed"],
        problems,
    )
