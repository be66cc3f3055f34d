"""`ab`: two servers, or one server with two settings, under the exact same requests, in pairs."""

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


class Figures(NamedTuple):
    """One run of one arm."""

    ttft: float
    tpot: float
    itl_p99: float
    throughput: float
    failed: int = 0
    problems: tuple[str, ...] = ()


class Pilot(NamedTuple):
    """What runs before the trial say about its power. Their figures are compared within an arm
    only: they know nothing of B against A."""

    spread: dict[str, float]  # metric → standard deviation of the logarithm of a pair's ratio
    runs: int  # of each arm

    def detectable(self, pairs: int) -> dict[str, float]:
        """By metric, the relative change that so many pairs find in nine of ten cases."""
        return {
            name: detectable(spread, pairs, len(self.spread))
            for name, spread in self.spread.items()
        }

    def pairs_for(self, effect: float) -> dict[str, int]:
        return {
            name: pairs_needed(spread, effect, len(self.spread))
            for name, spread in self.spread.items()
        }


@dataclass(frozen=True)
class Trial:
    a: list[Figures]
    b: list[Figures]
    comparisons: list[Comparison] = field(default_factory=list)
    pilot: Pilot | None = None

    @property
    def runs(self) -> list[Figures]:
        return [*self.a, *self.b]

    @property
    def verdict(self) -> str:
        """INVALID: requests failed. A server that refuses half of them may well be the faster."""
        if any(one.failed for one in self.runs):
            return "INVALID"
        return overall(self.comparisons)


@dataclass
class Watcher:
    """Is told of the trial as it goes."""

    pilot: Callable[[Pilot], None] = lambda pilot: None
    run: Callable[[int, str, Figures], None] = lambda pair, arm, figures: None


def run_ab(
    arms: tuple[str, str],
    options: ServeOptions,
    pairs: int,
    pilot_runs: int = 0,
    watcher: Watcher | None = None,
) -> Trial:
    """`arms`: as `arms.py` says. `options`: the workload. `pilot_runs`: of each arm, before the
    pairs; they warm the servers up, and say what so many pairs can find."""
    if pairs < 2:
        raise ConfigError("--pairs must be at least 2: one pair has no spread to judge by")
    if pilot_runs < 0 or pilot_runs == 1:
        raise ConfigError("--pilot must be 0, or at least 2: one run has no spread")
    with serving(arms) as urls:
        return asyncio.run(_trial(urls, options, pairs, pilot_runs, watcher or Watcher()))


async def _trial(
    urls: Sequence[str], options: ServeOptions, pairs: int, pilot_runs: int, watcher: Watcher
) -> Trial:
    # The same prompts for both, unless one server is both and would know them the second time.
    salt = secrets.token_hex(4)
    salts = [f"{salt} {arm if urls[0] == urls[1] else ''}" for arm in "AB"]
    benches = [
        ServeBench(replace(options, url=url, salt=one))
        for url, one in zip(urls, salts, strict=True)
    ]

    async def alternating(count: int, seeds: Sequence[int]) -> tuple[list[Figures], list[Figures]]:
        found: tuple[list[Figures], list[Figures]] = ([], [])
        for pair in range(count):
            # A B, then B A: whatever drifts meets both alike.
            for arm in (0, 1) if pair % 2 == 0 else (1, 0):
                benches[arm].options = replace(benches[arm].options, seed=seeds[pair])
                figures = _figures((await benches[arm].run()).result)
                found[arm].append(figures)
                watcher.run(pair, "AB"[arm], figures)
        return found

    pilot = None
    try:
        for bench in benches:
            await bench.connect()
        if pilot_runs:
            # One seed: what differs between seeds is the same in both runs of a pair.
            pilot = pilot_of(*await alternating(pilot_runs, [options.seed] * pilot_runs))
            watcher.pilot(pilot)
        a, b = await alternating(pairs, range(options.seed, options.seed + pairs))
    finally:
        for bench in benches:
            bench.close()
    return Trial(a, b, compare_runs(a, b), pilot)


def pilot_of(a: Sequence[Figures], b: Sequence[Figures]) -> Pilot:
    """The spread of a pair's ratio, from the spread of the runs within each arm."""
    spread = {}
    for name in METRICS:
        arms = [[getattr(one, name) for one in runs] for runs in (a, b)]
        if all(value > 0 for values in arms for value in values):
            variances = [statistics.variance(map(math.log, values)) for values in arms]
            spread[name] = math.sqrt(sum(variances))
    return Pilot(spread, len(a))


def compare_runs(a: Sequence[Figures], b: Sequence[Figures]) -> list[Comparison]:
    names = [name for name in METRICS if all(getattr(one, name) > 0 for one in (*a, *b))]
    return [
        compare(
            name, [getattr(one, name) for one in a], [getattr(one, name) for one in b], len(names)
        )
        for name in names
    ]


def _figures(result: dict[str, Any]) -> Figures:
    # Means: requests fall into kinds (those that found the engine busy, and others), and a median
    # jumps from one to the other when a single request changes sides.
    # A p99 of one run is not judged by itself, so its own requests need not suffice for it.
    problems = tuple(one for one in result["problems"] if "too few" not in one)
    return Figures(
        result["mean_ttft_ms"],
        result["mean_tpot_ms"],
        result.get("p99_itl_ms", 0.0),
        result["output_throughput"],
        result["failed"],
        problems,
    )
