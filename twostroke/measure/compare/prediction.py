"""The doctor's experiment as a comparison, and whether what it predicted came true."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.errors import ConfigError
from twostroke.measure.compare.ab import Figures
from twostroke.measure.compare.arms import PORT, is_url
from twostroke.measure.compare.paired_comparison import METRICS, Comparison, compare
from twostroke.measure.doctor.verdict import Experiment, Verdict

NAMES = {"itl": "itl_p99"}  # the doctor's → ours, where they differ


def read_experiment(path: str) -> Experiment:
    try:
        verdict = Verdict.from_json(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"--from-doctor {path}: {error.strerror}") from None
    experiment = verdict.experiment
    if experiment is None:
        raise ConfigError(f"{path}: the verdict is {verdict.verdict}, and proposes no experiment")
    ratio = experiment.predicted_ratio
    if not isinstance(ratio, int | float) or not (math.isfinite(ratio) and ratio > 0):
        raise ConfigError(f"{path}: predicted_ratio must be a number above 0, not {ratio!r}")
    if _metric(experiment) not in METRICS:
        raise ConfigError(
            f"{path}: {experiment.metric!r} is not measured here; the metrics are "
            f"{', '.join(METRICS)}"
        )
    return experiment


def arms_of(experiment: Experiment, a: str) -> tuple[str, str]:
    """`a`: options that the server had when the doctor saw it; B has the doctor's over them."""
    if is_url(a) or PORT in a:
        raise ConfigError(
            "--from-doctor changes options of `twostroke serve`, and starts both servers: give "
            "those that the server has now as --a, such as --a '--max-num-seqs 2'"
        )
    words: list[str] = []
    for flag, value in experiment.setting.items():
        if not flag.startswith("--") or PORT in f"{flag} {value}":
            raise ConfigError(f"the experiment sets {flag!r}, which is no option of serve")
        words += [flag] if value is True else [flag, str(value)]
    return a, f"{a} {shlex.join(words)}".strip()


class Outcome(NamedTuple):
    """A prediction beside what was measured."""

    name: str
    metric: str
    predicted: float  # ratio B / A
    measured: Comparison | None  # None: the runs have no such figure

    @property
    def verdict(self) -> str:
        """CONFIRMED: the metric got better, as said. REFUTED: it stayed or got worse."""
        if self.measured is None:
            return "INCONCLUSIVE"
        return {"WIN": "CONFIRMED", "INCONCLUSIVE": "INCONCLUSIVE"}.get(
            self.measured.verdict, "REFUTED"
        )

    @property
    def sentence(self) -> str:
        if self.measured is None:
            return f"{self.verdict}: the runs have no {self.metric}"
        one = self.measured
        if one.low <= self.predicted <= one.high:
            size = "the prediction lies in the interval"
        else:
            # Ratios below 1 of a latency are gains, and so are ratios above 1 of throughput.
            more = (one.ratio > self.predicted) == METRICS[self.metric]
            size = f"the gain was {'larger' if more else 'smaller'} than predicted"
        return (
            f"{self.verdict}: {self.name}: {self.metric} predicted × {self.predicted:.2f}, "
            f"measured × {one.ratio:.2f} ({one.low:.2f} to {one.high:.2f}); {size}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "metric": self.metric,
            "predicted_ratio": self.predicted,
            "measured": None if self.measured is None else self.measured.as_json(),
            "verdict": self.verdict,
        }


def outcome(experiment: Experiment, a: Sequence[Figures], b: Sequence[Figures]) -> Outcome:
    """Of the runs of both arms. The metric was named before they began, and is judged alone: its
    interval needs no correction for the others, which might have shown something by chance."""
    metric = _metric(experiment)
    before, after = ([getattr(one, metric) for one in runs] for runs in (a, b))
    measured = None
    if min(*before, *after) > 0:
        measured = compare(metric, before, after, num_metrics=1)
    return Outcome(experiment.name, metric, experiment.predicted_ratio, measured)


def _metric(experiment: Experiment) -> str:
    return NAMES.get(experiment.metric, experiment.metric)
