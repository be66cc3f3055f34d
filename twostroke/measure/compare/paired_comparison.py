"""The statistics of `ab`: ratio, confidence interval and verdict from pairs of runs.

The unit is a run, because the requests of one run are not independent. A pair has one run of each
arm with the same requests (the same seed). The order is A B, B A, A B, …, so that a drift of the
machine affects both arms. The mean logarithm of the ratios B / A has a t interval, which is widened
for the number of metrics (Bonferroni).

Two processes of one program differ by a percent or two because of their memory layout. More runs of
the same two processes do not average this out, so a difference below SAME_SHARE is never a verdict.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.99  # one false verdict in a hundred trials
POWER = 0.9
MAX_PAIRS = 500
SAME_SHARE = 0.03  # a change of up to 3% counts as no change
# Metric → True if a larger value is better.
METRICS = {
    "ttft": False,
    "tpot": False,
    "itl_p99": False,
    "throughput": True,
}


@dataclass(frozen=True)
class Comparison:
    """B against A in one metric. `ratio` above 1: B's figure is larger."""

    metric: str
    ratio: float
    low: float
    high: float
    pairs: int
    detectable: float  # the relative change that `pairs` pairs detect with 90% power
    verdict: str  # for B: WIN, LOSS, TIE or INCONCLUSIVE

    def as_json(self) -> dict[str, float | str | int]:
        return {
            "metric": self.metric,
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "pairs": self.pairs,
            "detectable": self.detectable,
            "verdict": self.verdict,
        }


def compare(
    metric: str, a: Sequence[float], b: Sequence[float], num_metrics: int, same: float = SAME_SHARE
) -> Comparison:
    """Compare B with A. `a` and `b` have one figure for each run, in pairs."""
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True) if x > 0 and y > 0]
    count = len(logs)
    if count < 2:
        return Comparison(metric, 1.0, 0.0, math.inf, count, math.inf, "INCONCLUSIVE")
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(count)
    t = t_quantile(1 - (1 - CONFIDENCE) / 2 / num_metrics, count - 1)
    low, high = mean - t * error, mean + t * error
    margin = math.log1p(same)
    if max(-low, high) <= margin:
        verdict = "TIE"
    elif (low > 0 or high < 0) and abs(mean) > margin:
        verdict = "WIN" if (mean > 0) == METRICS.get(metric, False) else "LOSS"
    else:
        verdict = "INCONCLUSIVE"
    found = detectable(statistics.stdev(logs), count, num_metrics)
    return Comparison(metric, math.exp(mean), math.exp(low), math.exp(high), count, found, verdict)


def overall(found: Sequence[Comparison]) -> str:
    """Return one verdict for all metrics. A win and a loss are MIXED."""
    verdicts = {one.verdict for one in found}
    if "LOSS" in verdicts:
        return "MIXED" if "WIN" in verdicts else "LOSS"
    if "WIN" in verdicts:
        return "WIN"
    return "TIE" if verdicts == {"TIE"} else "INCONCLUSIVE"


def detectable(spread: float, pairs: int, num_metrics: int = 1) -> float:
    """Return the relative change that `pairs` pairs detect with 90% power. `spread`: the standard
    deviation of the logarithm of a pair's ratio."""
    t = t_quantile(1 - (1 - CONFIDENCE) / 2 / num_metrics, pairs - 1)
    error = spread / math.sqrt(pairs)
    return max(SAME_SHARE, math.expm1((t + t_quantile(POWER, pairs - 1)) * error))


def pairs_needed(spread: float, effect: float, num_metrics: int = 1) -> int:
    """Return the number of pairs, at most MAX_PAIRS, that detect a relative `effect` above
    SAME_SHARE with 90% power."""

    def suffice(count: int) -> bool:
        return detectable(spread, count, num_metrics) <= effect

    return 2 + bisect_left(range(2, MAX_PAIRS), True, key=suffice)


@lru_cache(maxsize=1024)
def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t for probability `share` (at least one half)."""
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        if t_share(middle, freedom) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_share(value: float, freedom: int) -> float:
    """Return the probability that Student's t is at most `value` ≥ 0: 1 − I(x; ν/2, 1/2) / 2."""
    x = freedom / (freedom + value * value)
    return 1 - 0.5 * _beta_share(x, freedom / 2, 0.5)


def _beta_share(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, by a continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny, fraction, c, d = 1e-300, 1.0, 1.0, 0.0
    for n in range(400):
        half = n // 2
        if n == 0:
            numerator = 1.0
        elif n % 2 == 0:
            numerator = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            numerator = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        d = 1 / (1 + numerator * d if abs(1 + numerator * d) > tiny else tiny)
        c = 1 + numerator / c if abs(1 + numerator / c) > tiny else tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return front * (fraction - 1) / a
