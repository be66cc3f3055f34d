"""`Forecast`: predicts TTFT, TPOT and memory of requests from the steps that have run.

The step-time model (`sched/steptime.py`) learns here from the records of the server. A forecast
simulates the schedule of requests that arrive together at an idle engine: decode slots first, then
chunks in order, within the budget of a step. Records are read only when a forecast is made. No
torch here.
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

RECENT_STEPS = 256  # for the host time of a step
RECENT_REQUESTS = 16


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
    start_s: float  # part of TTFT outside of steps
    host_s: float  # host time of every step
    steps: list[ForecastStep]


class Forecast:
    """Learns from `records` with each prediction. Not thread-safe."""

    def __init__(self, records: Records, token_budget: int) -> None:
        self._records, self._budget = records, token_budget
        self._times = StepTimes()
        self._seen_s = 0.0  # when the newest step that it has learnt from committed

    def predict(self, workload: Workload) -> Prediction | None:
        """Return None until steps of both phases have been seen."""
        steps = list(self._records.steps)
        self._learn(steps)
        host_s = _host_s(steps)
        start_s = _start_s(list(self._records.requests), steps, host_s)
        found = self._play(workload, host_s)
        if found is None:
            return None
        played, firsts, lasts = found
        ttft_s = start_s + sum(firsts) / len(firsts)
        gaps = max(1, workload.output_tokens - 1)
        spans = [last - first for first, last in zip(firsts, lasts, strict=True)]
        tpot_s = sum(spans) / len(spans) / gaps
        kv_tokens = workload.streams * (workload.prompt_tokens + workload.output_tokens - 1)
        return Prediction(ttft_s, tpot_s, start_s + max(lasts), kv_tokens, start_s, host_s, played)

    def _learn(self, steps: Sequence[StepRecord]) -> None:
        for step in steps:
            is_cold = step.step == 0  # an engine's first step takes several times as long
            if step.committed_s > self._seen_s and step.device_s > 0.0 and not is_cold:
                self._times.add(_work(step.prefill), _work(step.decode), step.device_s)
        if steps:
            self._seen_s = max(self._seen_s, steps[-1].committed_s)

    def _play(
        self, load: Workload, host_s: float
    ) -> tuple[list[ForecastStep], list[float], list[float]] | None:
        """Simulate the steps; return them and the times of each stream's first and last token."""
        computed, written = [0] * load.streams, [0] * load.streams
        firsts, lasts = [0.0] * load.streams, [0.0] * load.streams
        played: list[ForecastStep] = []
        now = 0.0
        while any(count < load.output_tokens for count in written):
            decode = PhaseWork()
            for stream in range(load.streams):
                if 0 < written[stream] < load.output_tokens:
                    position = load.prompt_tokens + written[stream]
                    decode = decode.with_chunk(1, (position, position))
            ended = [n for n in range(load.streams) if 0 < written[n] < load.output_tokens]
            prefill, budget = PhaseWork(), self._budget - decode.tokens
            for stream in range(load.streams):
                size = min(budget, load.prompt_tokens - computed[stream])
                if size <= 0:
                    continue
                start = computed[stream]
                attended = visible_positions(start, size, None)
                prefill = prefill.with_chunk(size, (attended, start + size))
                budget -= size
                computed[stream] += size
                if computed[stream] == load.prompt_tokens:
                    ended.append(stream)
            seconds = self._times.predict(prefill, decode)
            if seconds is None:
                return None
            now += seconds + (
                host_s if played else 0.0
            )  # for the first step, `start_s` contains it
            played.append(ForecastStep(prefill.tokens, decode.rows, seconds))
            for stream in ended:
                firsts[stream] = firsts[stream] if written[stream] else now
                lasts[stream] = now
                written[stream] += 1
        return played, firsts, lasts


def _work(phase: PhaseRecord) -> PhaseWork:
    # A decode slot reads each position that it attends to, once. For chunks it does not matter.
    return PhaseWork(phase.rows, phase.tokens, phase.kv_tokens, phase.kv_tokens)


def _host_s(steps: Sequence[StepRecord]) -> float:
    """The mean time from the end of a step's work to the start of the next step, without the
    longest tenth, which are stalls of the machine."""
    gaps = sorted(one.since_s.host for one in steps[-RECENT_STEPS:] if one.regular)
    kept = gaps[: max(1, len(gaps) * 9 // 10)]
    return sum(kept) / len(kept) if kept else 0.0


def _start_s(
    requests: Sequence[RequestRecord], steps: Sequence[StepRecord], host_s: float
) -> float:
    """The median part of TTFT outside of steps: tokenising, messages, planning. Steps of other
    requests that a request waited for do not count."""
    spans = [(one.committed_s - one.device_s, one.committed_s) for one in steps]
    rests = []
    for record in requests[-RECENT_REQUESTS:]:
        if not record.token_s or not spans or record.received_s < spans[0][0]:
            continue
        worked = [
            min(end_s, record.first_token_s) - max(begin_s, record.received_s)
            for begin_s, end_s in spans
            if end_s > record.received_s and begin_s < record.first_token_s
        ]
        worked_s = sum(worked) + host_s * (len(worked) - 1)
        rests.append(max(0.0, record.ttft_s - worked_s))
    return median(rests) if rests else 0.0
