"""Step times of a device: learnt from measured steps, or from a roofline; each with its error.

    MeasuredSteps   the engine's own step-time model (`sched/steptime.py`), fitted to the records of
                    a server, corrected where steps of a size differ from it
    RooflineSteps   FLOPs and bytes of a step over a data sheet's rates, by stated efficiencies

Two kinds of error are told apart. A single step differs from its expected time: simulated steps do
so too, by ratios drawn from those that were measured (`NoisyCost`). All steps together may be
slower or quicker than they were when they were measured: `drift`, by which a prediction's interval
is widened. Both are of steps that the fit had not seen.
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

MIN_MEASURED = 50  # steps, of which some have prefill and some have none
MIN_OF_PHASE = 10
STRETCHES, FOLDS = 16, 4  # of time; each fourth stretch is predicted from the others
MIN_DRIFT = 0.03  # however well the stretches agree
PASSES = 3  # over the steps: the model's past fades
MIN_OF_SIZE = 8  # steps of a size before its correction counts
NOISE_LIMITS = (0.3, 4.0)  # ratios of measured to expected that are drawn
ROOFLINE_ERROR = 0.35  # of efficiencies that nobody has measured
HOST_S = 0.5e-3  # of a step, where it was not measured
SLACK = 1.25  # beyond the largest measured step, before a step counts as outside


class MeasuredStep(NamedTuple):
    prefill: PhaseWork
    decode: PhaseWork
    seconds: float


class Range(NamedTuple):
    """The largest work that was measured."""

    tokens: float  # of prefill, in a step
    rows: float  # of decode
    positions: float  # that the rows read

    def holds(self, prefill: PhaseWork, decode: PhaseWork) -> bool:
        return (
            prefill.tokens <= self.tokens
            and decode.rows <= self.rows
            and decode.kv_reads <= self.positions
        )


EVERYTHING = Range(float("inf"), float("inf"), float("inf"))


@dataclass(frozen=True)
class StepModel:
    """Step times with what is known of them. Ratios are of measured to expected seconds."""

    cost: StepCost
    source: str  # for people
    drift: float  # by which all steps may be off together, as a share
    step_error: float  # the mean absolute error of one step, as a share
    host_s: float = HOST_S
    start_s: float = 0.0  # from a request's arrival at the server to its scheduler
    outside_s: float = 0.0  # of TTFT, what a client sees beyond that
    range: Range = EVERYTHING
    decode_ratios: tuple[float, ...] = (1.0,)
    prefill_ratios: tuple[float, ...] = (1.0,)

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "drift": self.drift,
            "step_error": self.step_error,
            "host_ms": 1e3 * self.host_s,
            "start_ms": 1e3 * self.start_s,
            "outside_ms": 1e3 * self.outside_s,
        }


@dataclass(slots=True)
class NoisyCost:
    """A model's step times in one simulation: scaled, with drawn deviations. Counts the time of
    steps larger than any that was measured."""

    model: StepModel
    scale: float = 1.0
    seed: int = 0
    total_s: float = 0.0
    outside_s: float = 0.0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        model = self.model
        ratios = model.prefill_ratios if prefill.tokens else model.decode_ratios
        ratio = ratios[int(self._rng.random() * len(ratios))]
        seconds = self.scale * ratio * model.cost.seconds(prefill, decode)
        self.total_s += seconds
        if not model.range.holds(prefill, decode):
            self.outside_s += seconds
        return seconds


# ── measured ────────────────────────────────────────────────────────────────────────────────────


class FittedSteps:
    """The step-time model of the scheduler, with a factor for each size of step: a decode step's
    by its rows, one with prefill by its tokens."""

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        self._times = StepTimes()
        self._factors: dict[tuple[bool, int], float] = {}
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

    def knows(self, prefill: bool) -> bool:
        """Whether enough steps of a kind were measured."""
        work = PhaseWork(1, 1, 1, 1)
        pair = (work, PhaseWork()) if prefill else (PhaseWork(), work)
        return self._times.predict(*pair) is not None

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        expected = self._times.predict(prefill, decode)
        assert expected is not None, "both phases were measured"
        return expected * self._factors.get(_size(prefill, decode), 1.0)


def _size(prefill: PhaseWork, decode: PhaseWork) -> tuple[bool, int]:
    """A class of steps that cost alike beyond what the model tells: to the next half power of
    two."""
    if prefill.tokens:
        return True, (prefill.tokens + decode.tokens).bit_length()
    rows = decode.rows
    return False, rows if rows <= 4 else 2 * rows.bit_length() + (rows >> (rows.bit_length() - 2))


def measured_model(records: dict[str, Any], source: str) -> StepModel:
    """Fit the steps of `/records`, or of a file with the same content."""
    try:
        steps = [_step(one) for one in records["steps"] if one["device_s"] > 0]
        gaps = [one["since_s"]["host"] for one in records["steps"] if one["regular"]]
        starts = [
            one["queued_s"] - one["received_s"] for one in records["requests"] if one["queued_s"]
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{source} has no step records as a twostroke server's /records has them (missing: "
            f"{error}); write one with --calibrate URL --save-steps FILE"
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
        FittedSteps(steps),
        f"{len(steps):,} measured steps: {source}",
        drift,
        fmean(abs(ratio - 1.0) for for_phase in ratios.values() for ratio in for_phase),
        _trimmed_mean(gaps),
        _low_quartile(starts),
        float(records.get("outside_s") or 0.0),
        Range(
            SLACK * max(one.prefill.tokens for one in steps),
            SLACK * max(one.decode.rows for one in steps),
            SLACK * max(one.decode.kv_reads for one in steps),
        ),
        _normalised(ratios[False]),
        _normalised(ratios[True]),
    )


def _held_out(steps: Sequence[MeasuredStep]) -> tuple[float, dict[bool, list[float]]]:
    """Predict each fourth stretch of time from the others: the largest error of a fold's whole
    time, of either kind of step, and the ratios of single steps, by whether they have prefill."""
    drift, ratios = MIN_DRIFT, {False: [1.0], True: [1.0]}
    fold_of = [n * STRETCHES // len(steps) % FOLDS for n in range(len(steps))]
    for fold in range(FOLDS):
        held = [one for one, of in zip(steps, fold_of, strict=True) if of == fold]
        fitted = FittedSteps([one for one, of in zip(steps, fold_of, strict=True) if of != fold])
        for kind in (True, False):
            of_kind = [one for one in held if bool(one.prefill.tokens) is kind]
            if not fitted.knows(kind) or len(of_kind) < MIN_OF_PHASE:
                continue
            expected = [fitted.seconds(one.prefill, one.decode) for one in of_kind]
            pairs = zip(of_kind, expected, strict=True)
            ratios[kind] += [one.seconds / seconds for one, seconds in pairs]
            drift = max(drift, abs(sum(one.seconds for one in of_kind) / sum(expected) - 1.0))
    return min(drift, 1.0), ratios


def _step(record: dict[str, Any]) -> MeasuredStep:
    prefill, decode = (
        # A decode slot reads each position that it attends to once.
        PhaseWork(one["rows"], one["tokens"], one["kv_tokens"], one["kv_tokens"])
        for one in (record["prefill"], record["decode"])
    )
    return MeasuredStep(prefill, decode, record["device_s"])


def _normalised(ratios: Sequence[float]) -> tuple[float, ...]:
    """Ratios whose mean is 1, so that drawing them lengthens no run."""
    low, high = NOISE_LIMITS
    kept = [min(max(ratio, low), high) for ratio in ratios]
    mean = fmean(kept)
    return tuple(ratio / mean for ratio in kept)


def _trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the longest tenth, which are stalls of the machine."""
    kept = sorted(values)[: max(1, len(values) * 9 // 10)]
    return fmean(kept) if kept else HOST_S


def _low_quartile(values: Sequence[float]) -> float:
    """Of waits: a request that waits for a running step is not slow to start."""
    return max(0.0, sorted(values)[len(values) // 4]) if values else 0.0


# ── from a data sheet ───────────────────────────────────────────────────────────────────────────


class RooflineSteps:
    """The time of a step at shares of the hardware's rates: products for FLOPs, memory for bytes,
    whichever takes longer, and what ranks send each other."""

    def __init__(self, roofline: Roofline) -> None:
        measured = roofline.hardware.measured
        self._cost = roofline.cost
        self._rate = roofline.rate * (1.0 if measured else PREFILL_EFFICIENCY)
        self._bandwidth = roofline.bandwidth * (1.0 if measured else DECODE_EFFICIENCY)
        self._comm_s = roofline.comm_s

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        cost = self._cost.of_step(prefill.tokens)
        samples = decode.rows + prefill.rows
        flops = cost.prefill_flops(prefill, prefill.rows) + cost.decode_flops(decode)
        tokens = prefill.tokens + decode.tokens
        moved = cost.weight_bytes(samples, tokens) + cost.kv_bytes(prefill) + cost.kv_bytes(decode)
        return max(flops / self._rate, moved / self._bandwidth) + self._comm_s(tokens, samples)


def roofline_model(roofline: Roofline) -> StepModel:
    hardware = roofline.hardware
    if hardware.measured:
        said = "rates measured on this machine"
    else:
        said = (
            f"data sheet, of which kernels are taken to reach {PREFILL_EFFICIENCY:.0%} (products) "
            f"and {DECODE_EFFICIENCY:.0%} (memory)"
        )
    return StepModel(
        RooflineSteps(roofline), f"roofline of {hardware.name}: {said}", ROOFLINE_ERROR, 0.0
    )
