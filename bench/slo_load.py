"""A bursty minute with the statistics of a production trace, for bench/slo.py.

Lengths follow the quantiles of the conversation half of the Azure LLM inference trace 2023 (Patel
et al., Splitwise, ISCA 2024; CC-BY 4.0): 19,366 requests of one hour, 1,155 tokens in and 211 out
on average. They are restated here and drawn by inversion, straight lines between their logarithms.
Gaps between arrivals are gamma-distributed. Over that hour they vary little more than a Poisson
process (coefficient of variation 1.1), in the code half of the trace by 13; BURSTY is between, so
that a minute has both a crowd and a lull.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from twostroke.measure.load.arrivals import arrival_times

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
INPUT = (20, 207, 396, 1020, 1189, 2735, 4083, 4142, 6000)
OUTPUT = (10, 54, 85, 129, 395, 424, 451, 601, 1000)
BURSTY = 2.0  # coefficient of variation of the gaps


class Arrival(NamedTuple):
    at_s: float
    input: int
    output: int


def minute(seed: int, rate: float, seconds: float, shrink: float) -> list[Arrival]:
    """Requests at `rate` a second on average, all lengths divided by `shrink`."""
    rng = random.Random(seed)
    times = arrival_times(round(rate * seconds), rate, BURSTY**-2, seed)
    return [Arrival(at, _draw(rng, INPUT, shrink), _draw(rng, OUTPUT, shrink)) for at in times]


def mean_lengths(shrink: float) -> tuple[float, float]:
    drawn = minute(0, 5000.0, 1.0, shrink)
    return sum(a.input for a in drawn) / 5000, sum(a.output for a in drawn) / 5000


def _draw(rng: random.Random, quantiles: tuple[int, ...], shrink: float) -> int:
    share = rng.random()
    upper = next(n for n, mark in enumerate(SHARES) if n and share <= mark)
    low, high = math.log(quantiles[upper - 1]), math.log(quantiles[upper])
    part = (share - SHARES[upper - 1]) / (SHARES[upper] - SHARES[upper - 1])
    return max(2, round(math.exp(low + part * (high - low)) / shrink))
