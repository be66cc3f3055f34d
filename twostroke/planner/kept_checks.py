"""Kept results of `--check`: they correct the step times of the next plan for the same servers.

    a check ─▶ step_factors: the factors of all step times with which the simulation gives the
               measured latencies ─▶ keep: a line of a file ─▶ corrected: the next step times

The expected factor of the next run is the mean of the kept factors, drawn towards 1: the smaller
the error of the step times without checks, the more. Its error comes from the differences between
the checks and from the latencies that no factor explains. So checks that agree narrow the interval,
and checks that disagree widen it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.plan import PhaseWork
from twostroke.planner.engine import StepCost
from twostroke.planner.steptimes import MIN_DRIFT, Correction, StepModel

MAX_OF_SERVER, MAX_IN_FILE = 20, 500  # checks; the oldest are dropped
FITTED = ("p50_ttft_ms", "p90_ttft_ms", "p50_tpot_ms", "p90_tpot_ms", "p50_e2el_ms")
FIRST_STEP, LAST_STEP = 0.3, 0.015  # of the search, in logarithms
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1))  # prefill, decode
MAX_FACTOR = 5.0  # a larger factor means that another server was measured
SPREAD, SPREAD_CHECKS = 0.05, 2  # assumed deviation of one server's runs; counts as 2 checks
OF_INTERVAL = 1.645  # standard deviations on each side of an interval with 90% of the runs
Json = dict[str, Any]


class Factors(NamedTuple):
    """Measured / expected step times, and the error that they do not explain."""

    prefill: float  # steps with prefill
    decode: float  # steps that only decode
    rest: float = 0.0  # relative error of the latencies with these factors


class CorrectedSteps:
    """Step times multiplied by factors."""

    def __init__(self, cost: StepCost, prefill: float, decode: float) -> None:
        self._cost, self._prefill, self._decode = cost, prefill, decode

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        factor = self._prefill if prefill.tokens else self._decode
        return factor * self._cost.seconds(prefill, decode)


def scaled(model: StepModel, factors: Factors) -> StepModel:
    return replace(model, cost=CorrectedSteps(model.cost, factors.prefill, factors.decode))


# ── from a check ────────────────────────────────────────────────────────────────────────────────


def step_factors(
    model: StepModel, measured: Json, simulated: Callable[[StepModel], Json]
) -> Factors:
    """Return the factors of the step times with which the simulation comes closest to the measured
    latencies. `model`: without a correction. `simulated`: the latencies with a step model."""
    names = [name for name in FITTED if measured.get(name, 0.0) > 0.0]

    @cache
    def error(place: tuple[float, float]) -> float:
        found = simulated(scaled(model, Factors(*map(math.exp, place))))
        return fmean(abs(math.log(found[name] / measured[name])) for name in names)

    at, step = (0.0, 0.0), FIRST_STEP
    best, limit = error(at), 2 * math.log(MAX_FACTOR)
    while step >= LAST_STEP:
        nearer = False
        for one, other in DIRECTIONS:
            place = at[0] + step * one, at[1] + step * other
            if max(map(abs, place)) < limit and (found := error(place)) < best:
                at, best, nearer = place, found, True
        if not nearer:
            step /= 2
    return Factors(math.exp(at[0]), math.exp(at[1]), best)


# ── the file ────────────────────────────────────────────────────────────────────────────────────


class KeptChecks:
    """The checks in a file. `server`: the model, the machine and the settings of a server; checks
    count for servers that are equal in all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, server: Json) -> list[Json]:
        return [one for one in self._read() if one["server"] == server]

    def keep(self, server: Json, factors: Factors, requests: int, date: str) -> None:
        """Append a check. Raise `ConfigError` if it is of another server than the planned one."""
        for phase, factor in (("prefill", factors.prefill), ("decode", factors.decode)):
            if not 1 / MAX_FACTOR <= factor <= MAX_FACTOR:
                raise ConfigError(
                    f"steps with {phase} took {factor:.2g} times as long as planned: is this the "
                    "server that was planned?"
                )
        check = {"server": server, "date": date, "requests": requests, **factors._asdict()}
        checks = [*self._read(), check]
        same = [one for one in checks if one["server"] == server]
        for old in same[:-MAX_OF_SERVER]:
            checks.remove(old)
        text = json.dumps({"schema_version": 1, "checks": checks[-MAX_IN_FILE:]}, indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from None

    def _read(self) -> list[Json]:
        """Return all checks; none if there is no file, or a damaged one."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path.read_text(encoding="utf-8"))["checks"]
            return [one for one in found if _is_check(one)]
        return []


def _is_check(one: Any) -> bool:
    numbers = (one["prefill"], one["decode"], one["rest"])
    valid = all(isinstance(n, int | float) and 0 <= n < math.inf for n in numbers)
    return valid and min(numbers[:2]) > 0 and isinstance(one["server"], dict)


# ── into step times ─────────────────────────────────────────────────────────────────────────────


def corrected(model: StepModel, checks: Sequence[Json]) -> StepModel:
    """Return the model with the factors of these checks, and with the error that is left."""
    if not checks:
        return model
    own_error = math.log1p(model.drift) / OF_INTERVAL
    prefill, decode = (
        _expected([math.log(one[phase]) for one in checks], own_error)
        for phase in ("prefill", "decode")
    )
    rest = fmean(one["rest"] for one in checks)
    deviation = math.hypot(max(prefill[1], decode[1]), rest)
    factors = Factors(math.exp(prefill[0]), math.exp(decode[0]))
    correction = Correction(
        model, factors.prefill, factors.decode, len(checks), max(str(one["date"]) for one in checks)
    )
    return replace(
        scaled(model, factors),
        drift=max(MIN_DRIFT, math.expm1(OF_INTERVAL * deviation)),
        correction=correction,
    )


def _expected(logs: Sequence[float], own_error: float) -> tuple[float, float]:
    """Return the expected logarithm of the next factor, and its standard deviation."""
    count, mean = len(logs), fmean(logs)
    squares = SPREAD_CHECKS * SPREAD**2 + sum((one - mean) ** 2 for one in logs)
    spread = squares / (SPREAD_CHECKS + count - 1)  # a variance
    weight = count / (count + spread / own_error**2)
    return weight * mean, math.sqrt(spread * (1 + weight / count))
