"""A trial as JSON, and as a table for a pull request."""

from __future__ import annotations

from typing import Any

from twostroke.measure.compare.ab import Trial
from twostroke.measure.compare.prediction import Outcome
from twostroke.measure.load.bench import ServeOptions
from twostroke.measure.load.result import environment

SCHEMA = 2
WORDS = {
    "ttft": "mean TTFT",
    "tpot": "mean TPOT",
    "itl_p99": "p99 ITL",
    "throughput": "output tokens/s",
}


def named(arm: str) -> str:
    return arm or "defaults"


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
    trial: Trial, arms: tuple[str, str], options: ServeOptions, prediction: Outcome | None = None
) -> dict[str, Any]:
    pilot = trial.pilot
    return {
        "schema_version": SCHEMA,
        "a": named(arms[0]),
        "b": named(arms[1]),
        "verdict": trial.verdict,
        "pairs": len(trial.a),
        "workload": workload(options),
        "pilot": pilot
        and {
            "runs": pilot.runs,
            "spread": pilot.spread,
            "detectable": pilot.detectable(len(trial.a)),
        },
        "metrics": [one.as_json() for one in trial.comparisons],
        "prediction": prediction and prediction.as_json(),
        "runs": {"a": [one._asdict() for one in trial.a], "b": [one._asdict() for one in trial.b]},
        "environment": environment(),
    }


def markdown(
    trial: Trial, arms: tuple[str, str], options: ServeOptions, prediction: Outcome | None = None
) -> str:
    """For a pull request."""
    a, b = map(named, arms)
    lines = [f"**{trial.verdict}**: B (`{b}`) against A (`{a}`), {len(trial.a)} pairs of runs", ""]
    if prediction is not None:
        lines += [prediction.sentence, ""]
    lines += [
        "| metric | A | B | B / A | 99% interval | finds | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in trial.comparisons:
        lines.append(
            f"| {WORDS[one.metric]} | {_middle(trial.a, one.metric)} | "
            f"{_middle(trial.b, one.metric)} | {one.ratio:.3f} | {one.low:.3f} to {one.high:.3f} | "
            f"{one.detectable:.1%} | {one.verdict} |"
        )
    sent = ", ".join(f"{key} {value}" for key, value in workload(options).items())
    lines += ["", f"Each run: {sent}. Intervals hold for all metrics together."]
    lines += [f"{problem}." for problem in problems(trial)]
    return "\n".join(lines) + "\n"


def problems(trial: Trial) -> list[str]:
    """What is wrong with the runs, one sentence for all of them."""
    bad = [one for one in trial.runs if one.problems]
    if not bad:
        return []
    return [f"{len(bad)} of {len(trial.runs)} runs are not certified: {bad[0].problems[0]}"]


def _middle(runs: Any, metric: str) -> str:
    values = [getattr(one, metric) for one in runs]
    unit = "" if metric == "throughput" else " ms"
    return f"{sum(values) / len(values):,.1f}{unit}"
