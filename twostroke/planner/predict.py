"""`predict`: a layout's figures for a trace, each with an interval.

A trace is simulated several times: with the step times as expected, and with all of them quicker
and slower by what they may be off together (`StepModel.drift`), each with its own drawn deviations
of single steps. A figure's interval reaches from its least to its largest value. Steps beyond what
was measured widen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import ConfigError, RequestError
from twostroke.measure.load.definitions import Goals, Sample, engine_sample
from twostroke.measure.load.load_run import no_collections
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.planner.layout import Layout
from twostroke.planner.simulate import Clock, request_of, simulate
from twostroke.planner.steptimes import NoisyCost, StepModel

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2el")
MAX_DRIFT = 0.9  # a step takes some time
# Beyond what was measured, a step's time is worth less: so much is added to `drift` for the share
# of the time that such steps took.
OUTSIDE_DRIFT = 0.5


class Interval(NamedTuple):
    expected: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Forecast:
    """The figures of one layout for one trace. Latencies in milliseconds, by names such as
    `p99_ttft_ms`; `goodput` in requests a second; shares from 0 to 1."""

    layout: Layout
    figures: dict[str, Interval]
    requests: int
    simulated_s: float  # how long the trace takes
    outside_share: float  # of the time of steps, those beyond what was measured
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            "figures": {name: one._asdict() for name, one in self.figures.items()},
            "requests": self.requests,
            "simulated_s": self.simulated_s,
            "outside_share": self.outside_share,
            "notes": list(self.notes),
        }


def predict(
    trace: Sequence[TraceRequest],
    layout: Layout,
    model: StepModel,
    goals: Goals,
    block_tokens: int = MOONCAKE_BLOCK,
    seed: int = 0,
) -> Forecast:
    """Raises `ConfigError` if the layout cannot hold a request of the trace."""
    check_lengths(trace, layout, block_tokens)
    expected, simulated_s, outside = _run(trace, layout, model, goals, block_tokens, 1.0, seed)
    drift = min(MAX_DRIFT, model.drift + OUTSIDE_DRIFT * outside)
    runs = [expected]
    for number, scale in enumerate((1.0 - drift, 1.0 + drift), 1):
        found, _, _ = _run(trace, layout, model, goals, block_tokens, scale, seed + number)
        runs.append(found)
    figures = {
        name: Interval(value, min(run[name] for run in runs), max(run[name] for run in runs))
        for name, value in expected.items()
    }
    notes = []
    if outside > 0.005:
        notes.append(
            f"{outside:.0%} of the time is in steps larger than any that was measured; intervals "
            f"are widened to ±{drift:.0%} for them"
        )
    return Forecast(layout, figures, len(trace), simulated_s, outside, tuple(notes))


def check_lengths(trace: Sequence[TraceRequest], layout: Layout, block_tokens: int) -> None:
    """Raise `ConfigError` if the layout's engines would refuse a request, with the longest one."""
    engine = layout.simulated(_Instant(), 0.0, Clock())[0]
    refused = []
    for number, one in enumerate(trace):
        if one.prompt_tokens + one.output_tokens > layout.shape.max_model_len:
            refused.append(one)
            continue
        if one.prompt_tokens + one.output_tokens > layout.shape.kv_tokens // 2:
            try:
                engine.scheduler.check(request_of("check", number, one, 0.0, block_tokens))
            except RequestError:
                refused.append(one)
    if refused:
        longest = max(refused, key=lambda one: one.prompt_tokens + one.output_tokens)
        raise ConfigError(
            f"{len(refused):,} of {len(trace):,} requests are longer than an engine can hold (the "
            f"longest: {longest.prompt_tokens:,} prompt and {longest.output_tokens:,} output "
            f"tokens; an engine takes {layout.shape.max_model_len:,} in one request and has a KV "
            f"cache of {layout.shape.kv_tokens:,}); take other hardware or a higher "
            "--tensor-parallel-size, or shorten the trace with --trace-shrink"
        )


class _Instant:
    def seconds(self, prefill: object, decode: object) -> float:
        return 0.0


def _run(
    trace: Sequence[TraceRequest],
    layout: Layout,
    model: StepModel,
    goals: Goals,
    block_tokens: int,
    scale: float,
    seed: int,
) -> tuple[dict[str, float], float, float]:
    """One simulation: its figures, how long it took on its clock, and the share of the steps'
    time that is beyond what was measured."""
    clock, cost = Clock(), NoisyCost(model, scale, seed)
    engines = layout.simulated(cost, model.host_s, clock)
    # A step's host part comes before its first token in any case: it is not counted twice.
    start_s = max(0.0, model.start_s - model.host_s)
    with no_collections():
        records = simulate(trace, clock, engines, block_tokens=block_tokens, start_s=start_s)
    samples = [engine_sample(one) for one in records]
    for sample in samples:
        sample.content_s = [at_s + model.outside_s for at_s in sample.content_s]
    figures = latencies_ms(samples)
    duration_s = max(sample.ended_s for sample in samples)
    figures["requests_per_s"] = len(samples) / duration_s
    if goals.given:
        met = sum(map(goals.met, samples))
        figures["goodput"] = met / duration_s
        figures["met"] = met / len(samples)
    for role in layout.pools:
        pool = [one.use for one in engines if one.state.role is role]
        of_all = len(pool) * duration_s
        figures[f"{role}_utilisation"] = sum(one.device_s for one in pool) / of_all
        figures[f"{role}_kv_mean"] = sum(one.kv_seconds for one in pool) / of_all
        figures[f"{role}_kv_peak"] = max(one.kv_peak for one in pool)
    figures["preempted"] = float(sum(one.use.preempted for one in engines))
    prompts = sum(one.num_prompt for one in records)
    figures["cached"] = sum(one.num_cached for one in records) / prompts
    outside = cost.outside_s / cost.total_s if cost.total_s else 0.0
    return figures, duration_s, outside


def latencies_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean and percentiles of every metric, of requests that succeeded."""
    good = [sample for sample in samples if sample.ok]
    values = {
        "ttft": np.array([sample.ttft_s for sample in good]),
        "itl": np.concatenate([np.diff(sample.content_s) for sample in good] or [np.array([])]),
        "tpot": np.array([tpot for sample in good if (tpot := sample.tpot_s) is not None]),
        "e2el": np.array([sample.e2el_s for sample in good]),
    }
    found = {}
    for metric in METRICS:
        of_metric = 1e3 * values[metric]
        if not of_metric.size:
            continue
        found[f"mean_{metric}_ms"] = float(of_metric.mean())
        for share, value in zip(PERCENTILES, np.percentile(of_metric, PERCENTILES), strict=True):
            found[f"p{share}_{metric}_ms"] = float(value)
    return found
