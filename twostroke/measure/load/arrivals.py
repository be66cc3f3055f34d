"""When requests are due: open loop (a rate, whatever the server does) or closed loop (so many at a
time)."""

from __future__ import annotations

import math
import random

from twostroke.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start of `count` arrivals, the first at 0.

    Gaps are gamma-distributed with mean 1 / `rate`: `burstiness` 1 is a Poisson process, less is
    burstier (vLLM's meaning). They are scaled to last exactly what the rate says, so that seeds
    differ in shape and not in load. `rate` inf: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    return _cumulated(gaps, (count - 1) / rate)


def ramp_times(count: int, start: float, end: float, strategy: str, seed: int) -> list[float]:
    """Poisson arrivals whose rate grows from `start` to `end` over the run."""
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
            f"--burstiness {burstiness:g}: give a number above 0; 1 is Poisson, less is burstier"
        )


def _cumulated(gaps: list[float], total_s: float) -> list[float]:
    scale = total_s / sum(gaps) if gaps else 0.0
    times, at = [0.0], 0.0
    for gap in gaps:
        at += scale * gap
        times.append(at)
    return times
