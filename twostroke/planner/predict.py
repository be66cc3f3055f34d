"""`predict`: the figures of a layout for a trace, each with an interval.

A trace is simulated with the expected step times, and with all step times shorter and longer by
their common error (`StepModel.drift`). Each simulation draws its own deviations of single steps. An
interval reaches from the smallest to the largest value of a figure. Steps larger than all measured
steps widen the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from twostroke.errors import RequestError
from twostroke.measure.load.definitions import Goals, Sample, engine_sample
from twostroke.measure.load.load_run import gc_disabled
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest
from twostroke.planner.engine import TIMELINE_S, EngineUsage
from twostroke.planner.layout import CapacityError, EngineLayout
from twostroke.planner.simulate import VirtualClock, request_of, simulate
from twostroke.planner.steptimes import NoisyCost, StepModel

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "itl", "tpot", "e2el")
MAX_DRIFT = 0.9  # keeps step times above 0
# Added to `drift`, times the share of the time in steps larger than all measured steps.
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
    # For each pool: use and held share of the KV cache in each interval of `TIMELINE_S`.
    timelines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.as_json(),
            "figures": {name: one._asdict() for name, one in self.figures.items()},
            "requests": self.requests,
            "simulated_s": self.simulated_s,
            "outside_share": self.beyond_measured_share,
            "notes": list(self.notes),
            "timelines": self.timelines,
        }


def predict(
    trace: Sequence[TraceRequest],
    layout: EngineLayout,
    model: StepModel,
    goals: Goals,
    block_tokens: int = MOONCAKE_BLOCK,
    seed: int = 0,
    interval: bool = True,
) -> LayoutForecast:
    """Predict the figures of a layout. Raise `CapacityError` if a request is too long for it.
    `interval`: also simulate the slowest and the fastest steps."""
    check_lengths(trace, layout, block_tokens)
    run = _Run(trace, layout, model, goals, block_tokens)
    expected = run.simulate(1.0, seed)
    simulated_s, beyond, timelines = run.duration_s, run.beyond_measured_share, run.timelines
    drift = min(MAX_DRIFT, model.drift + BEYOND_MEASURED_DRIFT * beyond)
    runs = [expected]
    for number, scale in enumerate((1.0 - drift, 1.0 + drift), 1):
        if interval:
            runs.append(run.simulate(scale, seed + number))
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
    return LayoutForecast(layout, figures, len(trace), simulated_s, beyond, tuple(notes), timelines)


def check_lengths(trace: Sequence[TraceRequest], layout: EngineLayout, block_tokens: int) -> None:
    """Raise `CapacityError`, which names the longest request, if an engine would refuse one."""
    engine = layout.simulated(_NoCost(), 0.0, VirtualClock())[0]
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
        raise CapacityError(
            f"{len(refused):,} of {len(trace):,} requests are longer than an engine can hold (the "
            f"longest: {longest.prompt_tokens:,} prompt and {longest.output_tokens:,} output "
            f"tokens; an engine accepts {layout.shape.max_model_len:,} in one request and has a KV "
            f"cache of {layout.shape.kv_tokens:,}); use other hardware or a higher "
            "--tensor-parallel-size, or shorten the trace with --trace-shrink"
        )


class _NoCost:
    """A step cost of 0."""

    def seconds(self, prefill: object, decode: object) -> float:
        return 0.0


class _Run:
    """The simulations of one layout."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        layout: EngineLayout,
        model: StepModel,
        goals: Goals,
        block_tokens: int,
    ) -> None:
        if not any(one.blocks for one in trace) and layout.shape.offload is None:
            # No prompt can be found in the prefix index.
            shape = layout.shape._replace(prefix_caching=False)
            layout = replace(layout, shape=shape)
        self._trace, self._layout, self._model = trace, layout, model
        self._goals, self._block_tokens = goals, block_tokens
        # Of the last simulation:
        self.duration_s = 0.0  # on the virtual clock
        self.beyond_measured_share = 0.0  # of the time, in steps larger than all measured steps
        self.timelines: dict[str, list[tuple[float, float]]] = {}

    def simulate(self, scale: float, seed: int) -> dict[str, float]:
        """Simulate the trace with scaled step times, and return the figures."""
        model, goals = self._model, self._goals
        clock, cost = VirtualClock(), NoisyCost(model, scale, seed)
        engines = self._layout.simulated(cost, model.host_s, clock)
        # The host time of the first step is already part of `start_s`.
        start_s = max(0.0, model.start_s - model.host_s)
        with gc_disabled():
            records = simulate(
                self._trace, clock, engines, block_tokens=self._block_tokens, start_s=start_s
            )
        samples = [engine_sample(one) for one in records]
        for sample in samples:
            sample.content_s = [at_s + model.client_s for at_s in sample.content_s]
        figures = latencies_ms(samples)
        duration_s = max(sample.ended_s for sample in samples)
        figures["requests_per_s"] = len(samples) / duration_s
        if goals.any_set:
            met = sum(map(goals.met, samples))
            figures["goodput"] = met / duration_s
            figures["met"] = met / len(samples)
        for role in self._layout.pools:
            pool = [one.usage for one in engines if one.state.role is role]
            engine_seconds = len(pool) * duration_s
            figures[f"{role}_utilisation"] = sum(one.device_s for one in pool) / engine_seconds
            figures[f"{role}_kv_mean"] = sum(one.kv_seconds for one in pool) / engine_seconds
            figures[f"{role}_kv_peak"] = max(one.kv_peak for one in pool)
            self.timelines[str(role)] = timeline(pool)
        figures["preempted"] = float(sum(one.usage.preempted for one in engines))
        prompts = sum(one.num_prompt for one in records)
        figures["cached"] = sum(one.num_cached for one in records) / prompts
        for part in ("queue", "prefill", "decode"):
            total_s = sum(getattr(one, f"{part}_s") for one in records)
            figures[f"mean_{part}_ms"] = 1e3 * total_s / len(records)
        self.duration_s = duration_s
        self.beyond_measured_share = cost.beyond_measured_s / cost.total_s if cost.total_s else 0.0
        return figures


def timeline(pool: Sequence[EngineUsage]) -> list[tuple[float, float]]:
    """Return a pool's share of time in use and of KV cache held, per `TIMELINE_S`."""
    last = max((number for one in pool for number in one.intervals), default=-1)
    rows = []
    for number in range(last + 1):
        sums = [one.intervals.get(number, (0.0, 0.0)) for one in pool]
        seconds = TIMELINE_S * len(pool)
        rows.append((sum(one[0] for one in sums) / seconds, sum(one[1] for one in sums) / seconds))
    return rows


def latencies_ms(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean and percentiles of every metric, of requests that succeeded."""
    good = [sample for sample in samples if sample.ok]
    values = {
        "ttft": np.array([sample.ttft_s for sample in good]),
        "itl": np.concatenate([np.diff(sample.content_s) for sample in good] or [np.array([])]),
        "tpot": np.array([tpot for sample in good if (tpot := sample.tpot_s) is not None]),
        "e2el": np.array([sample.e2el_s for sample in good]),
    }
    found = {}
    for metric in METRICS:
        metric_ms = 1e3 * values[metric]
        if not metric_ms.size:
            continue
        found[f"mean_{metric}_ms"] = float(metric_ms.mean())
        for share, value in zip(PERCENTILES, np.percentile(metric_ms, PERCENTILES), strict=True):
            found[f"p{share}_{metric}_ms"] = float(value)
    return found
