"""Percentiles, their confidence intervals, and summary statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile (`share` in %) with linear interpolation, as numpy and vLLM do."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def min_samples(share: float) -> int:
    """Return the number of values that a percentile's interval needs: 381 for a p99, 35 for a
    p90. With fewer values the largest one may lie below the percentile."""
    p = share / 100
    return math.floor(3.8416 * p / (1 - p)) + 1 if p < 1 else 1


def percentile_interval(values: Sequence[float], share: float) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a percentile from order statistics, or None with too
    few values."""
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
    """Return mean, median, standard deviation and percentiles, under vLLM's names."""
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
