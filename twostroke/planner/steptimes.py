"""Models of step times, fitted to measured steps or computed from a roofline, with their errors.

    FittedSteps     the scheduler's step-time model (`sched/steptime.py`), fitted to the records of
                    a server, with a correction for each size of step
    RooflineSteps   FLOPs and bytes of a step over a data sheet's rates and efficiencies

There are two errors, both measured on held-out steps. A single step differs from its expected time:
`NoisyCost` draws the ratios of measured steps. All steps together may be slower or faster than
during the measurement: `drift` widens the intervals of a prediction.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.measure.roofline.hardware import DECODE_EFFICIENCY, PREFILL_EFFICIENCY
from twostroke.measure.roofline.roofline import Roofline
from twostroke.plan import PhaseWork
from twostroke.planner.engine import StepCost
from twostroke.sched.steptime import StepTimes

MIN_MEASURED = 50  # steps with and without prefill
MIN_OF_PHASE = 10
INTERVALS, FOLDS = 16, 4  # of time; every fourth interval is predicted from the others
MIN_DRIFT = 0.03
PASSES = 3  # over the steps, because the model weights recent steps
MIN_OF_SIZE = 8  # steps of a size for its correction
NOISE_LIMITS = (0.3, 4.0)  # of the drawn ratios of measured to expected time
ROOFLINE_ERROR = 0.35  # assumed error of the efficiencies
HOST_S = 0.5e-3  # host time of a step without a measurement
SLACK = 1.25  # times the largest measured step: a larger step counts as outside


class MeasuredStep(NamedTuple):
    """The work and the time of one step."""

    prefill: PhaseWork
    decode: PhaseWork
    seconds: float


class MeasuredRange(NamedTuple):
    """The largest measured work of a step."""

    tokens: float  # prefill tokens
    rows: float  # decode rows
    positions: float  # KV positions that decode reads
    drafts: float = float("inf")  # drafted tokens

    def contains(self, prefill: PhaseWork, decode: PhaseWork) -> bool:
        return (
            prefill.tokens <= self.tokens
            and decode.rows <= self.rows
            and decode.kv_reads <= self.positions
            and decode.tokens - decode.rows <= self.drafts
        )


UNLIMITED = MeasuredRange(float("inf"), float("inf"), float("inf"))


@dataclass(frozen=True)
class StepModel:
    """A model of step times with its errors. Ratios are measured / expected seconds."""

    cost: StepCost
    source: str  # description for the report
    drift: float  # relative error that all steps have in common
    step_error: float  # mean absolute relative error of one step
    host_s: float = HOST_S
    start_s: float = 0.0  # from a request's arrival at the server to its scheduler
    client_s: float = 0.0  # part of TTFT that only a client sees
    range: MeasuredRange = UNLIMITED
    decode_ratios: tuple[float, ...] = (1.0,)
    prefill_ratios: tuple[float, ...] = (1.0,)
    correction: Correction | None = None  # by kept checks; `cost` and `drift` include it

    def as_json(self) -> dict[str, Any]:
        return {
            "correction": None if self.correction is None else self.correction.as_json(),
            "source": self.source,
            "drift": self.drift,
            "step_error": self.step_error,
            "host_ms": 1e3 * self.host_s,
            "start_ms": 1e3 * self.start_s,
            "outside_ms": 1e3 * self.client_s,
        }


@dataclass(frozen=True)
class Correction:
    """The correction of a step model by checks."""

    base: StepModel  # without the correction
    prefill: float
    decode: float
    checks: int
    last: str  # date of the newest check

    def as_json(self) -> dict[str, Any]:
        return {
            "checks": self.checks,
            "last": self.last,
            "prefill_factor": self.prefill,
            "decode_factor": self.decode,
        }


@dataclass(slots=True)
class NoisyCost:
    """The step times of one simulation: scaled, with drawn deviations. Counts the time in steps
    larger than all measured steps."""

    model: StepModel
    scale: float = 1.0
    seed: int = 0
    total_s: float = 0.0
    beyond_measured_s: float = 0.0  # time of steps larger than all measured steps
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        model = self.model
        ratios = model.prefill_ratios if prefill.tokens else model.decode_ratios
        ratio = ratios[int(self._rng.random() * len(ratios))]
        seconds = self.scale * ratio * model.cost.seconds(prefill, decode)
        self.total_s += seconds
        if not model.range.contains(prefill, decode):
            self.beyond_measured_s += seconds
        return seconds


# ── measured ────────────────────────────────────────────────────────────────────────────────────


class FittedSteps:
    """The scheduler's step-time model with a correction factor for each size of step. The size is
    the number of rows of a decode step, or the number of tokens of a step with prefill."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        self._times = StepTimes()
        self._factors: dict[tuple[bool, int], float] = {}
        self._has_drafts = any(one.decode.tokens > one.decode.rows for one in steps)
        shuffled, rng = list(steps), random.Random(0)
        for _ in range(PASSES):
            rng.shuffle(shuffled)
            for step in shuffled:
                self._times.add(*step)
        ratios: dict[tuple[bool, int], list[float]] = {}
        for step in steps:
            if (expected := self._times.predict(step.prefill, step.decode)) is not None:
                size = _size(step.prefill, step.decode)
                ratios.setdefault(size, []).append(step.seconds / expected)
        for size, found in ratios.items():
            if len(found) >= MIN_OF_SIZE:
                self._factors[size] = median(found)

    def predicts(self, prefill: bool) -> bool:
        """Return True if enough steps with, or without, prefill were measured."""
        work = PhaseWork(1, 1, 1, 1)
        pair = (work, PhaseWork()) if prefill else (PhaseWork(), work)
        return self._times.predict(*pair) is not None

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        if decode.tokens > decode.rows and not self._has_drafts:
            prefill, decode = _drafts_as_prompts(prefill, decode)
        expected = self._times.predict(prefill, decode)
        assert expected is not None, "both phases were measured"
        return expected * self._factors.get(_size(prefill, decode), 1.0)


def _drafts_as_prompts(prefill: PhaseWork, decode: PhaseWork) -> tuple[PhaseWork, PhaseWork]:
    """Return the work with drafted tokens as prompt tokens: the nearest work that was measured."""
    rows, drafts = decode.rows, decode.tokens - decode.rows
    attended = decode.kv_tokens * rows // decode.tokens
    return (
        PhaseWork(
            prefill.rows + rows,
            prefill.tokens + drafts,
            prefill.kv_tokens + decode.kv_tokens - attended,
            prefill.kv_reads,
        ),
        PhaseWork(rows, rows, attended, decode.kv_reads),
    )


def _size(prefill: PhaseWork, decode: PhaseWork) -> tuple[bool, int]:
    """Return the size class of a step by its tokens, in half powers of two."""
    if prefill.tokens:
        return True, (prefill.tokens + decode.tokens).bit_length()
    count = decode.tokens
    return False, count if count <= 4 else 2 * count.bit_length() + (
        count >> (count.bit_length() - 2)
    )


def measured_model(records: dict[str, Any], source: str) -> StepModel:
    """Fit a model to the steps of `/records` or of a file with the same content."""
    try:
        steps = [_step(one) for one in records["steps"] if one["device_s"] > 0]
        gaps = [one["since_s"]["host"] for one in records["steps"] if one["regular"]]
        starts = [
            one["queued_s"] - one["received_s"] for one in records["requests"] if one["queued_s"]
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{source} has no step records in the format of a twostroke server's /records "
            f"(missing: {error}); write a file with --calibrate URL --save-steps FILE"
        ) from None
    mixed = [one for one in steps if one.prefill.tokens]
    decode = [one for one in steps if not one.prefill.tokens]
    if len(steps) < MIN_MEASURED or min(len(mixed), len(decode)) < MIN_OF_PHASE:
        raise ConfigError(
            f"{source} has {len(mixed)} steps with prefill and {len(decode)} without; at least "
            f"{MIN_MEASURED} are needed, {MIN_OF_PHASE} of each kind; use --calibrate, which loads "
            "the server for a minute"
        )
    drift, ratios = _held_out(steps)
    return StepModel(
        cost=FittedSteps(steps),
        source=f"{len(steps):,} measured steps: {source}",
        drift=drift,
        step_error=fmean(
            abs(ratio - 1.0) for phase_ratios in ratios.values() for ratio in phase_ratios
        ),
        host_s=_trimmed_mean(gaps),
        start_s=_low_quartile(starts),
        client_s=float(records.get("outside_s") or 0.0),
        range=MeasuredRange(
            SLACK * max(one.prefill.tokens for one in steps),
            SLACK * max(one.decode.rows for one in steps),
            SLACK * max(one.decode.kv_reads for one in steps),
            SLACK * max(one.decode.tokens - one.decode.rows for one in steps),
        ),
        decode_ratios=_normalised(ratios[False]),
        prefill_ratios=_normalised(ratios[True]),
    )


def _held_out(steps: Sequence[MeasuredStep]) -> tuple[float, dict[bool, list[float]]]:
    """Predict every fourth interval of time from the others.

    Return the largest error of the total time of a fold, and the ratios of single steps by whether
    the steps have prefill.
    """
    drift, ratios = MIN_DRIFT, {False: [1.0], True: [1.0]}
    fold_of = [n * INTERVALS // len(steps) % FOLDS for n in range(len(steps))]
    for fold in range(FOLDS):
        held = [one for one, its_fold in zip(steps, fold_of, strict=True) if its_fold == fold]
        fitted = FittedSteps(
            [one for one, its_fold in zip(steps, fold_of, strict=True) if its_fold != fold]
        )
        for has_prefill in (True, False):
            selected = [one for one in held if bool(one.prefill.tokens) is has_prefill]
            if not fitted.predicts(has_prefill) or len(selected) < MIN_OF_PHASE:
                continue
            expected = [fitted.seconds(one.prefill, one.decode) for one in selected]
            pairs = zip(selected, expected, strict=True)
            ratios[has_prefill] += [one.seconds / seconds for one, seconds in pairs]
            drift = max(drift, abs(sum(one.seconds for one in selected) / sum(expected) - 1.0))
    return min(drift, 1.0), ratios


def _step(record: dict[str, Any]) -> MeasuredStep:
    prefill, decode = record["prefill"], record["decode"]
    work = [
        PhaseWork(one["rows"], one["tokens"], one["kv_tokens"], reads)
        for one, reads in (
            (prefill, prefill["kv_tokens"]),
            # A row with drafts reads each position once for all its tokens.
            (decode, decode["kv_tokens"] * decode["rows"] // max(1, decode["tokens"])),
        )
    ]
    return MeasuredStep(work[0], work[1], record["device_s"])


def _normalised(ratios: Sequence[float]) -> tuple[float, ...]:
    """Return the ratios scaled to a mean of 1, so that they do not change the total time."""
    low, high = NOISE_LIMITS
    kept = [min(max(ratio, low), high) for ratio in ratios]
    mean = fmean(kept)
    return tuple(ratio / mean for ratio in kept)


def _trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the largest tenth, which are stalls of the machine."""
    kept = sorted(values)[: max(1, len(values) * 9 // 10)]
    return fmean(kept) if kept else HOST_S


def _low_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile of waits, which excludes waits for a running step."""
    return max(0.0, sorted(values)[len(values) // 4]) if values else 0.0


# ── from a data sheet ───────────────────────────────────────────────────────────────────────────


class RooflineSteps:
    """The time of a step from a roofline: the longer of FLOPs / rate and bytes / bandwidth, plus
    the communication of ranks."""

    def __init__(self, roofline: Roofline) -> None:
        self.efficiencies = (PREFILL_EFFICIENCY, DECODE_EFFICIENCY)  # of FLOPs, of memory
        if roofline.hardware.measured:
            self.efficiencies = (1.0, 1.0)
        self._cost = roofline.cost
        self._rate = roofline.rate * self.efficiencies[0]
        self._bandwidth = roofline.bandwidth * self.efficiencies[1]
        self._comm_s = roofline.comm_s

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        cost = self._cost.for_step(prefill.tokens)
        samples = decode.tokens + prefill.rows
        flops = cost.prefill_flops(prefill, prefill.rows) + cost.decode_flops(decode)
        tokens = prefill.tokens + decode.tokens
        moved = cost.weight_bytes(samples, tokens) + cost.kv_bytes(prefill) + cost.kv_bytes(decode)
        return max(flops / self._rate, moved / self._bandwidth) + self._comm_s(tokens, samples)


def roofline_model(roofline: Roofline) -> StepModel:
    hardware = roofline.hardware
    if hardware.measured:
        rates = "rates measured on this machine"
    else:
        rates = (
            f"data sheet, of which kernels are assumed to reach {PREFILL_EFFICIENCY:.0%} (FLOPs) "
            f"and {DECODE_EFFICIENCY:.0%} (memory)"
        )
    return StepModel(
        RooflineSteps(roofline), f"roofline of {hardware.name}: {rates}", ROOFLINE_ERROR, 0.0
    )
