"""The two records everything that explains a run is made from, kept always, in ring buffers.

`StepRecord` says what a step did and took, by phase. `RequestRecord` says what happened to a
request and when. Metrics, timelines, dashboards and the step-time model read these and nothing
else, so that they cannot disagree. Times are seconds on the monotonic clock. No torch here.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from twostroke.kv.cache import KVUsage
from twostroke.plan import Chunk, Slot

# Where there are several engines, each has so many step numbers to itself in what the server tells.
ENGINE_STEPS = 10**9


class Causes(NamedTuple):
    """Where the time between two tokens of a stream went, in seconds. `blame.py` makes them.

    In a step with both phases, decode is what the same slots take alone, prefill is the rest:
    attributed, not measured.
    """

    decode: float = 0.0  # the stream's own work, and that of those it decodes with
    prefill: float = 0.0  # prompts that shared its steps
    # Steps in which it had no slot: sent back, recomputed, no block free, between two engines
    preemption: float = 0.0
    host: float = 0.0  # the executor had nothing to do: planning, committing, stalls
    communication: float = 0.0  # ranks summed, gathered, waited for each other

    @property
    def total_s(self) -> float:
        return self.decode + self.prefill + self.preemption + self.host + self.communication


NO_TIME = Causes()


class EngineSpan(NamedTuple):
    """A request's time in one of several engines, until the next or its end."""

    engine: str
    began_s: float  # when it was sent there
    num_written: int  # tokens that others had written before
    fetched_s: float = 0.0  # when the blocks that others computed were there; 0: there were none
    fetch_s: float = 0.0  # what copying them took
    fetched_bytes: int = 0


class FirstToken(NamedTuple):
    """A stream that began with a step."""

    ttft_s: float
    num_prompt: int
    num_cached: int


class PhaseRecord(NamedTuple):
    """One phase's share of a step: what it did, and what that needs at the least."""

    rows: int
    tokens: int
    kv_tokens: int  # cached positions attended to, summed over the tokens, mean over the layers
    flops: float
    num_bytes: float  # in a mixed step the weights are read once, and counted under decode


class StepRecord(NamedTuple):
    step: int
    planned_s: float  # when planning began
    launched_s: float  # when the executor was handed the plan
    committed_s: float  # when its tokens were known to the host, which is when they are dated
    device_s: float  # how long the executor's work took
    host_gap_s: float  # how long the executor had nothing to do before this step
    prefill: PhaseRecord
    decode: PhaseRecord
    chunks: tuple[Chunk, ...]  # which rows did what
    slots: tuple[Slot, ...]
    waiting: int
    running: int
    preempted: int  # requests preempted since the step before was planned
    kv: KVUsage
    recomputed: int = 0  # tokens of requests let in again that are now computed a second time
    since_s: Causes = NO_TIME  # since the step before committed: each regular gap (idleness too)
    regular: int = 0  # tokens whose stream's last one came with the step before
    late: tuple[Causes, ...] = ()  # the gaps of the other tokens that are not their stream's first
    first: tuple[FirstToken, ...] = ()
    predicted_s: float | None = None  # what the step-time model expected of `device_s`
    drafted: int = 0  # tokens beyond their stream's first in this step, which have no gap
    comm_s: float = 0.0  # of `device_s`, what rank 0 spent in collectives
    comm_bytes: float = 0.0  # that a rank sent for them, the mean over the ranks
    kv_evicted_tokens: int = 0  # that left the KV cache before this step
    engine: str = ""  # whose it was, where there are several

    @property
    def num_written(self) -> int:
        return self.regular + len(self.late) + len(self.first) + self.drafted


@dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: str
    num_prompt: int
    received_s: float  # by the front end, before its prompt is rendered and tokenised
    tokenised_s: float = 0.0
    queued_s: float = 0.0  # in the scheduler's queue
    scheduled_s: float = 0.0  # first token of it planned
    first_token_s: float = 0.0
    finished_s: float = 0.0
    sent_s: float = 0.0
    num_cached: int = 0  # prompt tokens taken from the prefix cache at first admission
    kv_evicted_tokens: int = 0  # that its later tokens could not see any more
    chunks: list[tuple[float, int, int, int]] = field(default_factory=list)  # when, step, start, n
    preempted: list[tuple[float, int]] = field(default_factory=list)  # when, tokens to recompute
    token_s: array[float] = field(default_factory=lambda: array("d"))
    token_step: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str = ""
    max_tokens: int = 0  # as asked for; 0: as many as there is room for
    n: int = 1  # continuations asked for, of which this is one
    family: str = ""  # what they have in common
    gaps: Causes = NO_TIME  # all gaps between its tokens together, once it has ended
    worst_gap_s: float = 0.0
    worst_gap: Causes | None = None  # None: there was no gap, or it is too long ago to tell
    # The causes of each gap, five numbers a gap in the order of `Causes`, once the request has
    # ended. NaN: the gap is too long ago. None: the request did not ask for them.
    gap_causes: array[float] | None = None
    # Digests of the prompt's first 64, 128, 256, … tokens: which requests begin alike, and how far.
    prefix_marks: tuple[str, ...] = ()
    route: str = ""  # where there are several engines: which had it, and why
    stays: list[EngineSpan] = field(default_factory=list)  # … and when
    owner: int | None = None  # the number of the API key it was sent with

    @property
    def queue_s(self) -> float:
        return self.scheduled_s - self.received_s

    @property
    def prefill_s(self) -> float:
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        return self.token_s[-1] - self.first_token_s if self.token_s else 0.0

    @property
    def ttft_s(self) -> float:
        """On the engine's side: received → first token."""
        return self.first_token_s - self.received_s

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (len(self.token_s) - 1) if len(self.token_s) > 1 else 0.0

    def gap_steps(self) -> list[tuple[float, int, int]]:
        """Each gap between two tokens: how long, and the steps [first, last] it spans."""
        times, steps = self.token_s, self.token_step
        return [(times[n] - times[n - 1], steps[n - 1] + 1, steps[n]) for n in range(1, len(times))]


def continued(record: RequestRecord, later: RequestRecord) -> RequestRecord:
    """One record of a request that two engines have worked on, one after the other."""
    between_s = 0.0
    if record.token_s and later.token_s:
        between_s = later.token_s[0] - record.token_s[-1]
    elif later.token_s:
        record.scheduled_s, record.num_cached = later.scheduled_s, later.num_cached
        record.first_token_s = later.token_s[0]
    worst = max((record, later), key=lambda one: one.worst_gap_s)
    record.worst_gap_s, record.worst_gap = worst.worst_gap_s, worst.worst_gap
    between = Causes(preemption=between_s)
    if between_s > record.worst_gap_s:
        record.worst_gap_s, record.worst_gap = between_s, between
    record.gaps = Causes(*map(sum, zip(record.gaps, later.gaps, between, strict=True)))
    if record.gap_causes is not None and later.gap_causes is not None:
        if record.token_s and later.token_s:
            record.gap_causes.extend(between)
        record.gap_causes.extend(later.gap_causes)
    record.kv_evicted_tokens = max(record.kv_evicted_tokens, later.kv_evicted_tokens)
    record.chunks += later.chunks
    record.preempted += later.preempted
    record.token_s.extend(later.token_s)
    record.token_step.extend(later.token_step)
    record.finished_s, record.finish_reason = later.finished_s, later.finish_reason
    return record


def steps_between(before: int, last: int) -> range:
    """Numbers of the steps after `before` up to `last`; none of two steps of different engines."""
    same = before // ENGINE_STEPS == last // ENGINE_STEPS
    return range(before + 1, last + 1) if same else range(0)


class Listener(Protocol):
    """Whoever is told of every record, such as `totals.Totals`."""

    def add_step(self, record: StepRecord) -> None: ...

    def add_request(self, record: RequestRecord) -> None: ...


class Records:
    """The ring buffers. `requests` holds finished ones; running ones are with the scheduler.

    Listeners hear of a step when it has committed, and of a request when the front end has had
    its last word on it: a stop string may have been found.
    """

    def __init__(self, steps: int = 2048, requests: int = 1024) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self.requests: deque[RequestRecord] = deque(maxlen=requests)
        self.listeners: list[Listener] = []

    def add_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        for listener in self.listeners:
            listener.add_step(record)

    def tell_request(self, record: RequestRecord) -> None:
        for listener in self.listeners:
            listener.add_request(record)
