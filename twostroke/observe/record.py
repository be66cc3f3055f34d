"""`StepRecord` and `RequestRecord`: the records of each step and each request, in ring buffers.

`StepRecord` has the work and the time of a step, by phase. `RequestRecord` has the events of a
request and their times. Metrics, timelines, dashboards and the step-time model read only these
records, so they agree. Times are seconds on the monotonic clock. This module imports no torch.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from twostroke.kv.usage import KVUsage
from twostroke.plan import Chunk, Slot

# With several engines, each engine process numbers its steps from another multiple of this.
ENGINE_STEPS = 10**9


class Causes(NamedTuple):
    """The time between two tokens of a stream by cause, in seconds (`blame.py`).

    In a mixed step, decode is the predicted time of the same slots without prefill, and prefill is
    the rest. So these two are attributed, not measured.
    """

    decode: float = 0.0  # decoding of the stream, and of the other streams in its steps
    prefill: float = 0.0  # prompts in the same steps
    # Steps without a slot for the stream: preempted, recomputed, no free block, between two engines
    preemption: float = 0.0
    host: float = 0.0  # the executor was idle: planning, committing, stalls
    communication: float = 0.0  # collectives of ranks, and waiting for other ranks
    drafting: float = 0.0  # steps of a draft model

    @property
    def total_s(self) -> float:
        return sum(self)


NO_TIME = Causes()


class EngineSpan(NamedTuple):
    """The time of a request in one of several engines, until the next span or its end."""

    engine: str
    began_s: float  # when the request was sent to the engine
    num_written: int  # tokens that other engines had generated before
    fetched_s: float = 0.0  # when its blocks had been fetched from another engine; 0: never
    fetch_s: float = 0.0  # the duration of that fetch
    fetched_bytes: int = 0


class TierFetchRecord(NamedTuple):
    """A prefix that a request found in the tiers (`kv/tiers/`), and whether it was fetched."""

    tokens: int  # tokens found in the tiers after those in the device's cache
    num_bytes: int
    fetch_expected_s: float
    compute_expected_s: float  # to compute these tokens at the load of that time; 0: unknown
    outcome: str = "computed"  # computed (expected to be faster), fetched, failed (then computed)
    seconds: float = 0.0  # duration of the fetch, also of one that failed
    tiers: str = ""  # the tiers that had the prefix
    problem: str = ""  # why the fetch failed


class FirstToken(NamedTuple):
    """The first token of a stream, which a step generated."""

    ttft_s: float
    num_prompt: int
    num_cached: int
    num_fetched: int = 0  # part of `num_cached` that came from tiers


class PhaseRecord(NamedTuple):
    """The work of one phase in a step, and the minimum of FLOPs and bytes for this work."""

    rows: int
    tokens: int
    kv_tokens: int  # cached positions attended to, summed over the tokens, mean over the layers
    flops: float
    num_bytes: float  # in a mixed step the weights are read once and count as decode


class DraftRecord(NamedTuple):
    """The speculative decoding of a step: the drafts, the expected result, and the result."""

    offers: int  # rows for which a drafter offered drafts
    rows: int  # rows with drafts
    tokens: int  # drafted tokens
    accepted: tuple[int, ...]  # rows whose draft was accepted at least up to each position
    expected: float  # drafted tokens that were expected to be accepted
    gain: float  # expected token rate divided by the rate without drafts, minus 1
    model_s: float = 0.0  # time that the draft model ran before the step


class StepRecord(NamedTuple):
    step: int
    planned_s: float  # when planning began
    launched_s: float  # when the executor got the plan
    committed_s: float  # when the host got the tokens, which is the time of the tokens
    device_s: float  # the time of the executor's work
    host_gap_s: float  # the idle time of the executor before this step
    prefill: PhaseRecord
    decode: PhaseRecord
    chunks: tuple[Chunk, ...]
    slots: tuple[Slot, ...]
    waiting: int
    running: int
    preempted: int  # requests preempted since the previous step was planned
    kv: KVUsage
    recomputed: int = 0  # tokens of preempted requests that are computed a second time
    since_s: Causes = NO_TIME  # since the last commit: the gap of each regular token
    regular: int = 0  # tokens whose stream also got a token from the previous step
    late: tuple[Causes, ...] = ()  # gaps before tokens of streams that skipped steps
    first: tuple[FirstToken, ...] = ()
    predicted_s: float | None = None  # the step-time model's prediction of `device_s`
    drafted: int = 0  # accepted drafts: tokens after the first of their stream, without a gap
    comm_s: float = 0.0  # part of `device_s` that rank 0 spent in collectives
    comm_bytes: float = 0.0  # bytes that a rank sent in collectives, the mean over the ranks
    kv_evicted_tokens: int = 0  # tokens evicted from the KV cache before this step
    engine: str = ""  # the name of the engine, if there are several
    drafts: DraftRecord | None = None  # None: no drafter offered drafts, and no draft model ran

    @property
    def num_written(self) -> int:
        return self.regular + len(self.late) + len(self.first) + self.drafted


@dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: str
    num_prompt: int
    # Times; 0: it has not happened.
    received_s: float  # by the front end, before the prompt is rendered and tokenised
    tokenised_s: float = 0.0
    queued_s: float = 0.0  # added to the scheduler's queue
    scheduled_s: float = 0.0  # its first prompt token was planned
    first_token_s: float = 0.0
    finished_s: float = 0.0
    sent_s: float = 0.0
    num_cached: int = 0  # prompt tokens taken from the prefix cache at first admission
    num_fetched: int = 0  # part of `num_cached` that was fetched from tiers
    tier_fetch: TierFetchRecord | None = None  # the newest; None: the tiers had no more tokens
    kv_evicted_tokens: int = 0  # tokens evicted before its end
    # Chunks: time, step, first token, number of tokens. Preemptions: time, tokens to recompute.
    chunks: list[tuple[float, int, int, int]] = field(default_factory=list)
    preempted: list[tuple[float, int]] = field(default_factory=list)
    token_s: array[float] = field(default_factory=lambda: array("d"))
    token_step: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str = ""
    max_tokens: int = 0  # as requested; 0: no limit but max_model_len
    n: int = 1  # number of completions of the user's request; this record is of one of them
    family: str = ""  # the common name of these completions
    gaps: Causes = NO_TIME  # the sum of all gaps between its tokens, once it has ended
    worst_gap_s: float = 0.0
    worst_gap: Causes | None = None  # None: there was no gap, or it is too long ago
    # The causes of each gap, six numbers for a gap in the order of `Causes`, once the request has
    # ended. NaN: the gap is too long ago. None: not requested.
    gap_causes: array[float] | None = None
    # Digests of the first 64, 128, 256, … prompt tokens, which show which prompts begin alike.
    prefix_marks: tuple[str, ...] = ()
    route: str = ""  # with several engines: the engines that got the request, and why
    stays: list[EngineSpan] = field(default_factory=list)  # the times in these engines
    owner: int | None = None  # the number of its API key
    # Drafted tokens that were verified and that were accepted, of all drafters and of the predicted
    # output alone.
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0

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
        """Time to first token on the server's side: received → first token."""
        return self.first_token_s - self.received_s

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (len(self.token_s) - 1) if len(self.token_s) > 1 else 0.0

    def gap_steps(self) -> list[tuple[float, int, int]]:
        """Return each gap between two tokens: its duration, and the first and last step of it."""
        times, steps = self.token_s, self.token_step
        return [(times[n] - times[n - 1], steps[n - 1] + 1, steps[n]) for n in range(1, len(times))]


def continued(record: RequestRecord, later: RequestRecord) -> RequestRecord:
    """Return the joined record of a request that two engines have run, one after the other."""
    between_s = 0.0
    if record.token_s and later.token_s:
        between_s = later.token_s[0] - record.token_s[-1]
    elif later.token_s:
        record.scheduled_s, record.num_cached = later.scheduled_s, later.num_cached
        record.num_fetched, record.tier_fetch = later.num_fetched, later.tier_fetch
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
    for name in ("drafted", "accepted", "predicted", "predicted_accepted"):
        setattr(record, name, getattr(record, name) + getattr(later, name))
    record.chunks += later.chunks
    record.preempted += later.preempted
    record.token_s.extend(later.token_s)
    record.token_step.extend(later.token_step)
    record.finished_s, record.finish_reason = later.finished_s, later.finish_reason
    return record


def steps_between(before: int, last: int) -> range:
    """Return the step numbers after `before` up to `last`, or none if the steps are of different
    engines."""
    same = before // ENGINE_STEPS == last // ENGINE_STEPS
    return range(before + 1, last + 1) if same else range(0)


class Listener(Protocol):
    """An object that gets every record, for example `totals.Totals`."""

    def add_step(self, record: StepRecord) -> None: ...

    def add_request(self, record: RequestRecord) -> None: ...


class Records:
    """The ring buffers. `requests` has finished requests; the scheduler has the running requests.

    Listeners get a step when it has committed. They get a request when the front end has processed
    its end, because a stop string may have ended it.
    """

    def __init__(self, steps: int = 2048, requests: int = 1024) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self.requests: deque[RequestRecord] = deque(maxlen=requests)
        self.listeners: list[Listener] = []

    def add_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        for listener in self.listeners:
            listener.add_step(record)

    def add_request(self, record: RequestRecord) -> None:
        """Store the record of a finished request and pass it to the listeners."""
        self.requests.append(record)
        self.notify_listeners(record)

    def notify_listeners(self, record: RequestRecord) -> None:
        for listener in self.listeners:
            listener.add_request(record)
