"""Reports of an A/B comparison: JSON, and Markdown for a pull request."""

from __future__ import annotations

from typing import Any

from twostroke.measure.compare.ab import Trial
from twostroke.measure.compare.prediction import PredictionOutcome
from twostroke.measure.load.bench import ServeOptions
from twostroke.measure.load.result import environment

SCHEMA_VERSION = 2
# metric → its name in the table
METRIC_TITLES = {
    "ttft": "mean TTFT",
    "tpot": "mean TPOT",
    "itl_p99": "p99 ITL",
    "throughput": "output tokens/s",
}


def arm_title(options: str) -> str:
    """Return the title of an arm in a report: its options, or "defaults"."""
    return options or "defaults"


def workload(options: ServeOptions) -> dict[str, Any]:
    if options.dataset_name == "trace":
        return {"trace": options.dataset_path, "max_concurrency": options.max_concurrency}
    return {
        "num_prompts": options.num_prompts,
        "input_len": options.random_input_len,
        "prefix_len": options.random_prefix_len,
        "output_len": options.random_output_len,
        "range_ratio": options.random_range_ratio,
        "max_concurrency": options.max_concurrency,
        "request_rate": str(options.request_rate),
        "seed": options.seed,
    }


def trial_json(
    trial: Trial,
    arms: tuple[str, str],
    options: ServeOptions,
    prediction: PredictionOutcome | None = None,
) -> dict[str, Any]:
    """Return the comparison as JSON, with the result of the pilot runs if there were any."""
    pilot = None
    if trial.pilot is not None:
        pilot = {
            "runs": trial.pilot.runs,
            "spread": trial.pilot.spread,
            "detectable": trial.pilot.detectable(len(trial.a)),
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "a": arm_title(arms[0]),
        "b": arm_title(arms[1]),
        "verdict": trial.verdict,
        "pairs": len(trial.a),
        "workload": workload(options),
        "pilot": pilot,
        "metrics": [comparison.as_json() for comparison in trial.comparisons],
        "prediction": prediction and prediction.as_json(),
        "runs": {"a": [run._asdict() for run in trial.a], "b": [run._asdict() for run in trial.b]},
        "environment": environment(),
    }


def markdown(
    trial: Trial,
    arms: tuple[str, str],
    options: ServeOptions,
    prediction: PredictionOutcome | None = None,
) -> str:
    """Return the comparison as Markdown for a pull request."""
    a, b = map(arm_title, arms)
    lines = [f"**{trial.verdict}**: B (`{b}`) against A (`{a}`), {len(trial.a)} pairs of runs", ""]
    if prediction is not None:
        lines += [prediction.sentence, ""]
    lines += [
        "| metric | A | B | B / A | 99% interval | detects | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in trial.comparisons:
        lines.append(
            f"| {METRIC_TITLES[row.metric]} | {_mean(trial.a, row.metric)} | "
            f"{_mean(trial.b, row.metric)} | {row.ratio:.3f} | {row.low:.3f} to {row.high:.3f} | "
            f"{row.detectable:.1%} | {row.verdict} |"
        )
    settings = ", ".join(f"{key} {value}" for key, value in workload(options).items())
    lines += ["", f"Each run: {settings}. The 99% is for all intervals together."]
    lines += [f"{problem}." for problem in problems(trial)]
    return "\n".join(lines) + "\n"


def problems(trial: Trial) -> list[str]:
    """Return a list with one sentence if some runs are not certified, otherwise an empty list."""
    uncertified = [run for run in trial.runs if run.problems]
    if not uncertified:
        return []
    first = uncertified[0].problems[0]
    return [f"{len(uncertified)} of {len(trial.runs)} runs are not certified: {first}"]


def _mean(runs: Any, metric: str) -> str:
    values = [getattr(run, metric) for run in runs]
    unit = "" if metric == "throughput" else " ms"
    return f"{sum(values) / len(values):,.1f}{unit}"
