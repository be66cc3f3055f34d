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
    """Return the smallest number of values with a `percentile_interval`: 381 for p99, 35 for p90.
    With fewer values, all of them may be below (or all above) the percentile with a probability of
    more than 2%."""
    p = share / 100
    return math.floor(1.96**2 * max(p / (1 - p), (1 - p) / p)) + 1 if 0 < p < 1 else 1


def percentile_interval(values: Sequence[float], share: float) -> tuple[float, float] | None:
    """Return the 95% confidence interval of a percentile, or None with too few values.

    The ends are order statistics (Conover, Practical Nonparametric Statistics): counted from 1,
    the values with the numbers n p ± 1.96 √(n p (1 − p)), rounded up.
    """
    count, p = len(values), share / 100
    if not 0 < p < 1:
        return None
    half_width = 1.96 * math.sqrt(count * p * (1 - p))
    low, high = math.ceil(count * p - half_width) - 1, math.ceil(count * p + half_width) - 1
    if low < 0 or high >= count:
        return None
    ordered = sorted(values)
    return ordered[low], ordered[high]


def summary_statistics(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
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
