"""`predict` estimates the performance of a layout on a trace, with an interval for each figure.

The trace is simulated three times: with the expected step times, with all step times reduced, and
with all step times increased. The change is the relative error that all step times have in common
(`StepModel.drift`). Each simulation also adds random deviations to single steps, from a seed of its
own. An interval reaches from the smallest to the largest value of a figure. The change is larger if
the trace has steps larger than all measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import ConfigError, RequestError
from twostroke.measure.load.definitions import Goals, Sample, engine_sample
from twostroke.measure.load.load_run import gc_disabled
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.planner.layout import EngineLayout
from twostroke.planner.simulate import VirtualClock, request_of, simulate
from twostroke.planner.steptimes import NoisyCost, StepModel

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2el")
MAX_DRIFT = 0.9  # keeps step times above 0
# The drift that is added if all steps are larger than the measured steps; in proportion to the time
# in such steps otherwise.
BEYOND_MEASURED_DRIFT = 0.5


class Interval(NamedTuple):
    """An expected value with its range."""

    expected: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class LayoutForecast:
    """The figures of one layout for one trace. Latencies such as `p99_ttft_ms` are in milliseconds,
    `goodput` in requests a second, and shares from 0 to 1."""

    layout: EngineLayout
    figures: dict[str, Interval]
    requests: int
    simulated_s: float  # duration on the virtual clock
    beyond_measured_share: float  # share of the time in steps larger than all measured steps
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            "figures": {name: interval._asdict() for name, interval in self.figures.items()},
            "requests": self.requests,
            "simulated_s": self.simulated_s,
            "outside_share": self.beyond_measured_share,
            "notes": list(self.notes),
        }


def predict(
    trace: Sequence[TraceRequest],
    layout: EngineLayout,
    model: StepModel,
    goals: Goals,
    block_tokens: int = MOONCAKE_BLOCK,
    seed: int = 0,
) -> LayoutForecast:
    """Predict the figures of a layout. Raise `ConfigError` if a request is too long for it."""
    check_lengths(trace, layout, block_tokens)
    expected, simulated_s, beyond = _run(trace, layout, model, goals, block_tokens, 1.0, seed)
    drift = min(MAX_DRIFT, model.drift + BEYOND_MEASURED_DRIFT * beyond)
    runs = [expected]
    for number, scale in enumerate((1.0 - drift, 1.0 + drift), 1):
        figures_at_scale, _, _ = _run(
            trace, layout, model, goals, block_tokens, scale, seed + number
        )
        runs.append(figures_at_scale)
    figures = {
        name: Interval(value, min(run[name] for run in runs), max(run[name] for run in runs))
        for name, value in expected.items()
    }
    notes = []
    if beyond > 0.005:
        notes.append(
            f"steps larger than all measured steps take {beyond:.0%} of the time; intervals are "
            f"widened to ±{drift:.0%}"
        )
    return LayoutForecast(layout, figures, len(trace), simulated_s, beyond, tuple(notes))


def check_lengths(trace: Sequence[TraceRequest], layout: EngineLayout, block_tokens: int) -> None:
    """Raise `ConfigError` if the layout's engines would refuse a request of the trace. The message
    has the length of the longest such request."""
    engine = layout.simulated(_NoCost(), 0.0, VirtualClock())[0]
    refused = []
    for number, traced in enumerate(trace):
        length = traced.prompt_tokens + traced.output_tokens
        if length > layout.shape.max_model_len:
            refused.append(traced)
            continue
        # To save time, the scheduler checks only requests that take much of the KV cache.
        if length > layout.shape.kv_tokens // 2:
            try:
                engine.scheduler.check(request_of("check", number, traced, 0.0, block_tokens))
            except RequestError:
                refused.append(traced)
    if refused:
        longest = max(refused, key=lambda traced: traced.prompt_tokens + traced.output_tokens)
        raise ConfigError(
            f"{len(refused):,} of {len(trace):,} requests are longer than an engine can hold (the "
            f"longest: {longest.prompt_tokens:,} prompt and {longest.output_tokens:,} output "
            f"tokens; an engine accepts {layout.shape.max_model_len:,} in one request and has a KV "
            f"cache of {layout.shape.kv_tokens:,}); use other hardware or a higher "
            "--tensor-parallel-size, or shorten the trace with --trace-shrink"
        )


class _NoCost:
    """A cost model in which every step takes no time."""

    def seconds(self, prefill: object, decode: object) -> float:
        return 0.0


def _run(
    trace: Sequence[TraceRequest],
    layout: EngineLayout,
    model: StepModel,
    goals: Goals,
    block_tokens: int,
    scale: float,
    seed: int,
) -> tuple[dict[str, float], float, float]:
    """Run one simulation with all step times multiplied by `scale`. Return its figures, duration
    on the virtual clock, and share of the time in steps larger than all measured steps."""
    clock, cost = VirtualClock(), NoisyCost(model, scale, seed)
    engines = layout.simulated(cost, model.host_s, clock)
    # `model.start_s` includes the host time of the first step, which the simulation adds itself.
    start_s = max(0.0, model.start_s - model.host_s)
    with gc_disabled():
        records = simulate(trace, clock, engines, block_tokens=block_tokens, start_s=start_s)
    samples = [engine_sample(record) for record in records]
    for sample in samples:
        sample.content_s = [at_s + model.client_s for at_s in sample.content_s]
    figures = latencies_ms(samples)
    duration_s = max(sample.ended_s for sample in samples)
    figures["requests_per_s"] = len(samples) / duration_s
    if goals.any_set:
        num_met = sum(map(goals.met, samples))
        figures["goodput"] = num_met / duration_s
        figures["met"] = num_met / len(samples)
    for role in layout.pools:
        usages = [engine.usage for engine in engines if engine.state.role is role]
        pool_s = len(usages) * duration_s
        figures[f"{role}_utilisation"] = sum(usage.device_s for usage in usages) / pool_s
        figures[f"{role}_kv_mean"] = sum(usage.kv_seconds for usage in usages) / pool_s
        figures[f"{role}_kv_peak"] = max(usage.kv_peak for usage in usages)
    figures["preempted"] = float(sum(engine.usage.preempted for engine in engines))
    num_prompt_tokens = sum(record.num_prompt for record in records)
    figures["cached"] = sum(record.num_cached for record in records) / num_prompt_tokens
    beyond = cost.beyond_measured_s / cost.total_s if cost.total_s else 0.0
    return figures, duration_s, beyond


def latencies_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean and percentiles of every metric over the requests that succeeded."""
    succeeded = [sample for sample in samples if sample.ok]
    gaps_s = [np.diff(sample.content_s) for sample in succeeded]
    values = {
        "ttft": np.array([sample.ttft_s for sample in succeeded]),
        "itl": np.concatenate(gaps_s or [np.array([])]),
        "tpot": np.array([tpot for sample in succeeded if (tpot := sample.tpot_s) is not None]),
        "e2el": np.array([sample.e2el_s for sample in succeeded]),
    }
    latencies = {}
    for metric in METRICS:
        metric_ms = 1e3 * values[metric]
        if not metric_ms.size:
            continue
        latencies[f"mean_{metric}_ms"] = float(metric_ms.mean())
        for percent, value in zip(PERCENTILES, np.percentile(metric_ms, PERCENTILES), strict=True):
            latencies[f"p{percent}_{metric}_ms"] = float(value)
    return latencies
