"""`StepBuilder`: one step while it is planned; `StepInFlight`: the same until it commits; and
`SchedulerConfig`, the limits of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twostroke.kv.cache import GroupLimits, KVUsage
from twostroke.kv.eviction import Eviction
from twostroke.plan import (
    BlockAppend,
    BlockDrop,
    BlockEvict,
    Chunk,
    NewRow,
    Pending,
    PhaseWork,
    Slot,
    StepPlan,
)
from twostroke.sched.allowance import Allowance
from twostroke.sched.scheduled_request import ScheduledRequest
from twostroke.sched.work import AttentionWork

# `Slot(*fields)`, without a call of Python's: one is made for every token that is written.
new_slot: Callable[[tuple[int, int, int]], Slot] = partial(tuple.__new__, Slot)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits a schedule keeps; already validated (`config.py`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    groups: tuple[GroupLimits, ...]  # the KV groups, in the model's order
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    lookahead: int = 128  # tokens of growth that admission keeps free for each running request
    ttft_slo_s: float | None = None  # goals; None: none
    itl_slo_s: float | None = None
    max_decode_stall: float | None = None  # steady gaps; where there is no itl_slo_s
    receives: bool = False  # streams of other engines may come at any time
    eviction: Eviction | None = None


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step from its plan to its commit."""

    plan: StepPlan
    sampled: list[ScheduledRequest]  # slots first, then last chunks: the result's order
    chunked: list[ScheduledRequest]  # in the order of plan.prefill
    planned_s: float  # when planning began
    predicted_s: float  # on the device; 0 if it could not be told
    preempted: int  # requests, since the step before was planned
    recomputed: int  # tokens that were computed before and are not cached any more
    waiting: int
    running: int
    kv: KVUsage  # with this step's blocks taken and filled
    launched_s: float = 0.0  # when the executor was handed the plan
    pending: Pending | None = None  # its result, once it is launched


class StepBuilder:
    """Collects what a step does. The budget counts tokens: a slot is one, a chunk its length."""

    def __init__(
        self,
        step: int,
        budget: int,
        work: AttentionWork,
        now: float,
        evicted: list[BlockEvict] | None = None,
    ) -> None:
        """`evicted`: that no executor has heard of yet, since nothing could run with them."""
        self.evicted = [] if evicted is None else evicted
        self.step = step
        self.budget = budget
        self.now = now
        self.slots: list[Slot] = []
        self.chunks: list[Chunk] = []
        self.new: list[NewRow] = []
        self.appended: list[BlockAppend] = []
        self.dropped: list[BlockDrop] = []
        self.sampled: list[
            ScheduledRequest
        ] = []  # slots first, then last chunks: the result's order
        self.last_chunks: list[ScheduledRequest] = []
        self.chunk_requests: list[ScheduledRequest] = []
        self.recomputed = 0  # tokens that were computed before and are not cached any more
        self.allowance: Allowance | None = None  # of time, where streams have a goal
        self.prefill_work = self.decode_work = PhaseWork()
        self._work = work

    @property
    def empty(self) -> bool:
        return not self.slots and not self.chunks

    @property
    def full(self) -> bool:
        """Whether no prefill fits any more."""
        return self.budget <= 0 or (self.allowance is not None and self.allowance.spent)

    def fit(self, request: ScheduledRequest, start: int, most: int) -> int:
        """How many tokens of a prompt, from `start` on, the step has time for; at most `most`."""
        if self.allowance is None:
            return most
        return self.allowance.fit(self.prefill_work, start, most, len(request.tokens))

    def add_slots(self, requests: list[ScheduledRequest], evicts: bool = False) -> None:
        """A slot each, for what has been computed of them so far; `evicts`: some may have fewer
        cache entries than positions."""
        positions = [request.kv.num_computed for request in requests]
        rows = [request.row for request in requests]
        self.slots = [new_slot((row, at, 0)) for row, at in zip(rows, positions, strict=True)]
        self.sampled = requests
        self.budget -= len(requests)
        if evicts:
            positions = [request.kv.num_computed - request.kv.num_evicted for request in requests]
        self.decode_work = PhaseWork(len(rows), len(rows), *self._work.of_slots(positions))

    def add_chunk(self, request: ScheduledRequest, count: int) -> None:
        start = request.kv.num_computed
        last = start + count == len(request.tokens)
        self.chunks.append(Chunk(request.row, start, count, last))
        self.chunk_requests.append(request)
        if last:
            self.last_chunks.append(request)
        self.budget -= count
        self.prefill_work = self.prefill_work.with_chunk(
            count, self._work.of_chunk(start - request.kv.num_evicted, count)
        )

    def add_row(self, request: ScheduledRequest) -> None:
        """The request has taken its row."""
        engine_request = request.engine_request
        self.new.append(
            NewRow(
                request.row,
                request.request_id,
                tuple(request.tokens),
                request.num_prompt,
                engine_request.params,
                engine_request.seed,
                engine_request.stop_ids,
                engine_request.bad_words_ids,
            )
        )

    def add_blocks(self, request: ScheduledRequest, grown: int) -> None:
        if grown:
            for group, table in enumerate(request.kv.tables):
                self.appended.append(BlockAppend(request.row, group, tuple(table[-grown:])))

    def add_drops(self, request: ScheduledRequest, changed: list[tuple[int, int]]) -> None:
        for group, upto in changed:
            self.dropped.append(BlockDrop(request.row, group, upto))

    def add_evictions(self, request: ScheduledRequest, gone: list[range]) -> None:
        self.evicted += [BlockEvict(request.row, one.start, one.stop) for one in gone]
        request.record.kv_evicted_tokens = request.kv.num_evicted

    def build(self, retired: tuple[int, ...]) -> StepPlan:
        self.sampled += self.last_chunks
        return StepPlan(
            step=self.step,
            new=tuple(self.new),
            retired=retired,
            appended=tuple(self.appended),
            dropped=tuple(self.dropped),
            prefill=tuple(self.chunks),
            decode=tuple(self.slots),
            prefill_work=self.prefill_work,
            decode_work=self.decode_work,
            evicted=tuple(self.evicted),
        )
