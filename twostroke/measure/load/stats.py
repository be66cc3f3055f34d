"""Percentiles and spreads, and how far to trust them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the closest ranks, as numpy and vLLM have it; `share` in %."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def least_samples(share: float) -> int:
    """How many values a percentile needs before an interval can be given for it: 381 for a p99,
    35 for a p90. With fewer, the largest value may well be below it."""
    p = share / 100
    return math.floor(3.8416 * p / (1 - p)) + 1 if p < 1 else 1


def percentile_interval(values: Sequence[float], share: float) -> tuple[float, float] | None:
    """An interval that has the true percentile in it 95 times of 100, by order statistics; None
    where there are too few values for one."""
    count, p = len(values), share / 100
    if not count:
        return None
    spread = 1.96 * math.sqrt(count * p * (1 - p))
    low, high = math.floor(count * p - spread), math.ceil(count * p + spread)
    if low < 0 or high >= count:
        return None
    ordered = sorted(values)
    return ordered[low], ordered[high]


def spread(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles, under vLLM's names."""
    found = {
        "mean": statistics.fmean(values) if values else 0.0,
        "median": statistics.median(values) if values else 0.0,
        "std": statistics.pstdev(values) if values else 0.0,
    }
    for share in percentiles:
        found[f"p{share:g}"] = percentile(values, share)
    return found


def parse_metric_percentiles(text: str) -> list[float]:
    from twostroke.errors import ConfigError

    try:
        shares = [float(one) for one in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 < share <= 100 for share in shares):
        raise ConfigError(
            f"--metric-percentiles {text!r}: give numbers between 0 and 100, such as 50,90,99"
        )
    return shares
