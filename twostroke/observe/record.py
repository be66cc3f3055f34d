"""The two records everything that explains a run is made from, kept always, in ring buffers.

`StepRecord` says what a step did and took, by phase. `RequestRecord` says what happened to a
request and when. Metrics, timelines, dashboards and the step-time model read these and nothing
else, so that they cannot disagree. Times are seconds on the monotonic clock. No torch here.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from twostroke.kv.cache import KVUsage

if TYPE_CHECKING:
    from twostroke.plan import Chunk, Slot


class PhaseRecord(NamedTuple):
    """One phase's share of a step: what it did, and what that needs at the least."""

    rows: int
    tokens: int
    kv_tokens: int  # cached positions attended to, summed over the tokens
    flops: float
    num_bytes: float  # in a mixed step the weights are read once, and counted under decode


class StepRecord(NamedTuple):
    step: int
    planned_s: float  # when planning began
    launched_s: float  # when the executor was handed the plan
    committed_s: float  # when its tokens were known to the host
    device_s: float  # how long the executor's work took
    comm_s: float  # of that, waiting for other ranks
    host_gap_s: float  # how long the executor had nothing to do before this step
    prefill: PhaseRecord
    decode: PhaseRecord
    chunks: tuple[Chunk, ...]  # which rows did what
    slots: tuple[Slot, ...]
    waiting: int
    running: int
    preempted: int  # requests preempted while planning this step
    kv: KVUsage
    predicted_s: float = 0.0  # what device_s was expected to be; 0 if it could not be told


@dataclass(slots=True, eq=False)
class RequestRecord:
    request_id: str
    num_prompt: int
    received_s: float  # by the engine's front end
    tokenised_s: float = 0.0
    queued_s: float = 0.0  # in the scheduler's queue
    scheduled_s: float = 0.0  # first token of it planned
    first_token_s: float = 0.0
    finished_s: float = 0.0
    sent_s: float = 0.0
    num_cached: int = 0  # prompt tokens taken from the prefix cache at first admission
    chunks: list[tuple[float, int, int, int]] = field(default_factory=list)  # when, step, start, n
    preempted: list[tuple[float, int]] = field(default_factory=list)  # when, tokens to recompute
    token_s: array[float] = field(default_factory=lambda: array("d"))
    token_step: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str = ""

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

    def gaps(self) -> list[tuple[float, int, int]]:
        """Each gap between two tokens: how long, and the steps [first, last] it spans."""
        times, steps = self.token_s, self.token_step
        return [(times[n] - times[n - 1], steps[n - 1] + 1, steps[n]) for n in range(1, len(times))]


class Records:
    """The ring buffers. `requests` holds finished ones; running ones are with the scheduler."""

    def __init__(self, steps: int = 2048, requests: int = 1024) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self.requests: deque[RequestRecord] = deque(maxlen=requests)
