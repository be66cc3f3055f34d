"""Arrival times of an open-loop workload, which sends requests at a rate regardless of answers."""

from __future__ import annotations

import math
import random

from twostroke.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds, the first at 0.

    Gaps are gamma-distributed with mean 1 / `rate`. `burstiness` 1 is a Poisson process and a
    smaller value is burstier, as in vLLM. The gaps are scaled so that the whole run has exactly
    this rate, whatever the seed. With `rate` inf all requests arrive at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    return _cumulated(gaps, (count - 1) / rate)


def ramp_times(count: int, start: float, end: float, strategy: str, seed: int) -> list[float]:
    """Return Poisson arrival times whose rate grows from `start` to `end` over the run."""
    rng = random.Random(seed)
    times, at = [0.0], 0.0
    for n in range(count - 1):
        done = n / max(1, count - 1)
        if strategy == "linear":
            rate = start + (end - start) * done
        else:
            rate = start * (end / start) ** done
        at += rng.expovariate(rate)
        times.append(at)
    return times


def check_rate(rate: float, burstiness: float) -> None:
    if not rate > 0:
        raise ConfigError(
            f"--request-rate {rate:g}: give requests a second, or inf for all at once"
        )
    if not 0 < burstiness < math.inf:
        raise ConfigError(
            f"--burstiness {burstiness:g}: give a number above 0; 1 is Poisson, lower is burstier"
        )


def _cumulated(gaps: list[float], total_s: float) -> list[float]:
    scale = total_s / sum(gaps) if gaps else 0.0
    times, at = [0.0], 0.0
    for gap in gaps:
        at += scale * gap
        times.append(at)
    return times
