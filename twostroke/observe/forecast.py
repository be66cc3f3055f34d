"""`Forecast`: predicts TTFT, TPOT and memory of requests from the steps that have run.

A forecast simulates the schedule of requests that arrive together at an idle engine. Each simulated
step has all decode slots and then prefill chunks in order, up to the token budget of a step. The
step-time model (`sched/steptime.py`) predicts the time of each step. It learns from the server's
step records, which are read only when a forecast is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from twostroke.observe.record import PhaseRecord, Records, RequestRecord, StepRecord
from twostroke.plan import PhaseWork
from twostroke.sched.steptime import StepTimes
from twostroke.sched.work import visible_positions

RECENT_STEPS = 256  # newest steps, for the host time of a step
RECENT_REQUESTS = 16  # newest requests, for the time before the first step


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` requests that arrive together."""

    prompt_tokens: int
    output_tokens: int
    streams: int = 1


class ForecastStep(NamedTuple):
    prefill_tokens: int
    decode_rows: int
    seconds: float


class Prediction(NamedTuple):
    """Means over the streams, in seconds."""

    ttft_s: float
    tpot_s: float
    total_s: float
    kv_tokens: int  # in the KV cache at the end
    start_s: float  # the part of TTFT before the first step and outside of steps
    host_s: float  # time of the host between two steps
    steps: list[ForecastStep]


class Forecast:
    """Learns from the new `records` before each prediction. Not thread-safe."""

    def __init__(self, records: Records, token_budget: int) -> None:
        self._records, self._budget = records, token_budget
        self._times = StepTimes()
        self._learnt_until_s = 0.0  # commit time of the newest step that was used

    def predict(self, workload: Workload) -> Prediction | None:
        """Predict the times of a workload; None until there are records of both phases."""
        steps = list(self._records.steps)
        self._learn(steps)
        host_s = _host_s(steps)
        start_s = _start_s(list(self._records.requests), steps, host_s)
        simulated = self._simulate(workload, host_s)
        if simulated is None:
            return None
        simulated_steps, firsts, lasts = simulated
        ttft_s = start_s + sum(firsts) / len(firsts)
        gaps = max(1, workload.output_tokens - 1)
        spans = [last - first for first, last in zip(firsts, lasts, strict=True)]
        tpot_s = sum(spans) / len(spans) / gaps
        kv_tokens = workload.streams * (workload.prompt_tokens + workload.output_tokens - 1)
        return Prediction(
            ttft_s, tpot_s, start_s + max(lasts), kv_tokens, start_s, host_s, simulated_steps
        )

    def _learn(self, steps: Sequence[StepRecord]) -> None:
        for step in steps:
            is_cold = step.step == 0  # an engine's first step takes several times as long
            if step.committed_s > self._learnt_until_s and step.device_s > 0.0 and not is_cold:
                self._times.add(_work(step.prefill), _work(step.decode), step.device_s)
        if steps:
            self._learnt_until_s = max(self._learnt_until_s, steps[-1].committed_s)

    def _simulate(
        self, workload: Workload, host_s: float
    ) -> tuple[list[ForecastStep], list[float], list[float]] | None:
        """Simulate the steps. Return the steps, and the times of each stream's first and last
        token."""
        streams = range(workload.streams)
        computed, generated = [0] * workload.streams, [0] * workload.streams
        firsts, lasts = [0.0] * workload.streams, [0.0] * workload.streams
        steps: list[ForecastStep] = []
        now = 0.0
        while any(count < workload.output_tokens for count in generated):
            decoding = [n for n in streams if 0 < generated[n] < workload.output_tokens]
            decode = PhaseWork()
            for stream in decoding:
                position = workload.prompt_tokens + generated[stream]
                decode = decode.with_chunk(1, (position, position))
            with_token = [*decoding]  # the streams that get a token in this step
            prefill, budget = PhaseWork(), self._budget - decode.tokens
            for stream in streams:
                start = computed[stream]
                size = min(budget, workload.prompt_tokens - start)
                if size <= 0:
                    continue
                attended = visible_positions(start, size, None)
                prefill = prefill.with_chunk(size, (attended, start + size))
                budget -= size
                computed[stream] += size
                if computed[stream] == workload.prompt_tokens:
                    with_token.append(stream)
            seconds = self._times.predict(prefill, decode)
            if seconds is None:
                return None
            # `start_s` already contains the host time before the first step.
            now += seconds + (host_s if steps else 0.0)
            steps.append(ForecastStep(prefill.tokens, decode.rows, seconds))
            for stream in with_token:
                firsts[stream] = firsts[stream] if generated[stream] else now
                lasts[stream] = now
                generated[stream] += 1
        return steps, firsts, lasts


def _work(phase: PhaseRecord) -> PhaseWork:
    # A decode slot attends to each cached position once, so that it reads as many positions as it
    # attends to. The step-time model ignores the positions that prefill reads.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)


def _host_s(steps: Sequence[StepRecord]) -> float:
    """Return the mean time from the end of a step's work to the start of the next step. The longest
    tenth of these times is left out, because it contains stalls of the machine."""
    gaps = sorted(step.since_s.host for step in steps[-RECENT_STEPS:] if step.regular)
    kept = gaps[: max(1, len(gaps) * 9 // 10)]
    return sum(kept) / len(kept) if kept else 0.0


def _start_s(
    requests: Sequence[RequestRecord], steps: Sequence[StepRecord], host_s: float
) -> float:
    """Return the median of the part of TTFT that is outside of steps: tokenising, messages between
    processes and scheduling. The time in which a request waited for steps of other requests is not
    included."""
    spans = [(step.committed_s - step.device_s, step.committed_s) for step in steps]
    outside = []
    for record in requests[-RECENT_REQUESTS:]:
        if not record.token_s or not spans or record.received_s < spans[0][0]:
            continue
        in_steps = [
            min(end_s, record.first_token_s) - max(begin_s, record.received_s)
            for begin_s, end_s in spans
            if end_s > record.received_s and begin_s < record.first_token_s
        ]
        in_steps_s = sum(in_steps) + host_s * (len(in_steps) - 1)
        outside.append(max(0.0, record.ttft_s - in_steps_s))
    return median(outside) if outside else 0.0
