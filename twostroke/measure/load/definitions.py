"""Definitions of the metrics that all commands, reports and tests use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from twostroke.observe.record import RequestRecord

DEFINITIONS = {
    "ttft": "time to first token: from the scheduled time of the request (not from the time at "
    "which the client sent the request) to the first event with content; the role, empty deltas "
    "and prefill progress are not content",
    "itl": "inter-token latency: time between two successive events with content of one request; "
    "an event that brings several tokens counts once",
    "tpot": "time per output token: (last content event - first content event) / (output tokens "
    "- 1), one value per request; a request with one token has no value",
    "e2el": "end-to-end latency: from the scheduled time to the last content event",
    "output tokens": "from the usage that the server reports, else the number of events with "
    "content",
    "throughput": "tokens of requests that succeeded, divided by the time from the first "
    "scheduled time of a request to the end of the last response",
    "goodput": "the number of requests per second that succeeded and met every goal",
    "cause of a gap": "a gap is the time between two successive events of a stream; its causes "
    "come from the server's step records: decode (the step that made the token), prefill (prompts "
    "of other requests in the same step), preemption (steps that the stream did not run in), host "
    "(the device was idle), communication (ranks in collectives), drafting (steps of a draft "
    "model), outside (the rest of the time that the client saw)",
}


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are seconds on one monotonic clock."""

    scheduled_s: float
    sent_s: float = 0.0
    content_s: list[float] = field(default_factory=list)  # arrival of each event with content
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None: not reported
    text: str = ""
    request_id: str = ""  # as the server named it
    finish_reason: str | None = None
    error: str = ""
    status: int | None = None  # HTTP status of an error
    timings: dict[str, Any] | None = None  # `timings` of llama.cpp and twostroke

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.content_s)

    @property
    def lag_s(self) -> float:
        """The delay between the scheduled time and the sending."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        return self.content_s[0] - self.scheduled_s

    @property
    def e2el_s(self) -> float:
        return self.content_s[-1] - self.scheduled_s

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.content_s)]

    @property
    def tpot_s(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.content_s[-1] - self.content_s[0]) / (self.output_tokens - 1)


def engine_sample(record: RequestRecord) -> Sample:
    """Return the sample of a request that did not come from a client. The scheduled time is the
    time at which the engine received the request. Each token counts as one event."""
    sample = Sample(record.received_s, record.received_s, record.token_s.tolist())
    sample.ended_s = record.finished_s
    sample.prompt_tokens, sample.output_tokens = record.num_prompt, len(record.token_s)
    return sample


@dataclass(frozen=True, slots=True)
class Goals:
    """Upper limits in seconds. A request that is within all limits counts for goodput. None: no
    limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @property
    def limits_ms(self) -> dict[str, float]:
        """The limits that are set, in milliseconds, by metric."""
        goals = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}
        return {name: 1e3 * goal for name, goal in goals.items() if goal is not None}

    @property
    def any_set(self) -> bool:
        return bool(self.limits_ms)

    def met(self, sample: Sample) -> bool:
        if not sample.ok:
            return False
        pairs = (
            (self.ttft_s, sample.ttft_s),
            (self.tpot_s, sample.tpot_s),
            (self.e2el_s, sample.e2el_s),
        )
        return all(goal is None or took is None or took <= goal for goal, took in pairs)


def goodput(samples: Sequence[Sample], goals: Goals, duration_s: float) -> float:
    """Return the number of requests per second that met the goals."""
    return sum(map(goals.met, samples)) / duration_s if duration_s else 0.0
