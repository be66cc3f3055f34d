"""`SchedulerConfig`: the limits of a schedule. `StepBuilder`: a step while it is planned.
`StepInFlight`: a step from its plan to its commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter

from twostroke.draft.settings import SpeculationConfig
from twostroke.draft.speculator import StepDrafts
from twostroke.kv.cache import GroupLimits, KVSequence, KVUsage
from twostroke.kv.eviction import Eviction
from twostroke.plan import (
    NO_WORK,
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

# `Slot(*fields)` without a Python call: a slot is made for every token that is written.
new_slot: Callable[[tuple[int, int, int]], Slot] = partial(tuple.__new__, Slot)
row_of: Callable[[ScheduledRequest], int] = attrgetter("row")
num_computed_of: Callable[[KVSequence], int] = attrgetter("num_computed")
num_evicted_of: Callable[[KVSequence], int] = attrgetter("num_evicted")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a schedule, already validated (`config.py`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    groups: tuple[GroupLimits, ...]  # the KV groups, in the model's order
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    lookahead: int = 128  # tokens of growth that admission keeps free for each running request
    ttft_slo_s: float | None = None  # None: no goal
    itl_slo_s: float | None = None  # None: no goal
    max_decode_stall: float | None = None  # in steady gaps; used without an itl_slo_s
    receives: bool = False  # other engines may hand over streams at any time
    eviction: Eviction | None = None
    speculation: SpeculationConfig | None = None  # None: no drafts; needs steps one at a time


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step from its plan to its commit."""

    plan: StepPlan
    sampled: list[ScheduledRequest]  # slots first, then last chunks: the order of the result
    chunked: list[ScheduledRequest]  # in the order of plan.prefill
    planned_s: float  # when planning began
    predicted_s: float  # expected time on the device; 0: unknown
    preempted: int  # requests preempted since the step before was planned
    recomputed: int  # tokens that were computed before and are no longer cached
    waiting: int
    running: int
    kv: KVUsage  # with the blocks of this step taken and filled
    drafts: StepDrafts | None = None  # None: no row had an offer
    launched_s: float = 0.0  # when the executor was given the plan
    pending: Pending | None = None  # the result, once the step is launched


class StepBuilder:
    """Collects the work of a step. The budget counts tokens: one for a slot, the length of a
    chunk."""

    def __init__(
        self,
        step: int,
        budget: int,
        work: AttentionWork,
        now: float,
        evicted: list[BlockEvict] | None = None,
    ) -> None:
        """`evicted`: evictions of earlier calls to `Scheduler.plan` that planned no step."""
        self.evicted = [] if evicted is None else evicted
        self.step = step
        self.budget = budget
        self.now = now
        self.slots: list[Slot] = []
        self.chunks: list[Chunk] = []
        self.new: list[NewRow] = []
        self.appended: list[BlockAppend] = []
        self.dropped: list[BlockDrop] = []
        self.sampled: list[ScheduledRequest] = []  # slots first, then last chunks
        self.last_chunks: list[ScheduledRequest] = []
        self.chunk_requests: list[ScheduledRequest] = []
        self.draft_tokens: list[int] = []  # of all slots
        self.recomputed = 0  # tokens that were computed before and are no longer cached
        self.allowance: Allowance | None = None  # prefill time, if streams have a goal
        self.prefill_work = self.decode_work = NO_WORK
        self._work = work

    @property
    def empty(self) -> bool:
        return not self.slots and not self.chunks

    @property
    def full(self) -> bool:
        """Return whether the step has no room for more prefill."""
        return self.budget <= 0 or (self.allowance is not None and self.allowance.spent)

    def fit(self, request: ScheduledRequest, start: int, max_tokens: int) -> int:
        """Return how many prompt tokens from `start` on the step has time for."""
        if self.allowance is None:
            return max_tokens
        return self.allowance.fit(self.prefill_work, start, max_tokens, len(request.tokens))

    def add_slots(
        self,
        requests: list[ScheduledRequest],
        sequences: Sequence[KVSequence],
        evicts: bool = False,
    ) -> None:
        """Add a slot for each request, at the first position of its sequence that is not computed.
        `evicts`: sequences may have fewer cache entries than positions."""
        positions = list(map(num_computed_of, sequences))
        fields = zip(map(row_of, requests), positions, repeat(0))
        self.slots = list(map(new_slot, fields))
        self.sampled = requests
        self.budget -= len(requests)
        if evicts:
            evicted = map(num_evicted_of, sequences)
            positions = [at - gone for at, gone in zip(positions, evicted, strict=True)]
        rows = len(requests)
        self.decode_work = PhaseWork(rows, rows, *self._work.of_slots(positions))

    def add_drafts(self, drafts: Sequence[Sequence[int]], sequences: Sequence[KVSequence]) -> None:
        """Add drafted tokens to the slots. `drafts` and `sequences`: of each slot."""
        rows, tokens, attended, read = len(self.slots), 0, 0, 0
        for n, (slot, drafted, seq) in enumerate(zip(self.slots, drafts, sequences, strict=True)):
            self.slots[n] = slot._replace(drafts=len(drafted))
            self.draft_tokens += drafted
            tokens += 1 + len(drafted)
            of_row = self._work.of_chunk(slot.position - seq.num_evicted, 1 + len(drafted))
            attended, read = attended + of_row[0], read + of_row[1]
        self.budget -= tokens - rows
        self.decode_work = PhaseWork(rows, tokens, attended, read)

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
        """Tell the executor about a request that has taken a row."""
        engine_request = request.engine_request
        self.new.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                tokens=tuple(request.tokens),
                num_prompt=request.num_prompt,
                params=engine_request.params,
                seed=engine_request.seed,
                stop_ids=engine_request.stop_ids,
                bad_words_ids=engine_request.bad_words_ids,
            )
        )

    def add_blocks(self, request: ScheduledRequest, grown: int) -> None:
        if grown:
            for group, table in enumerate(request.kv.tables):
                self.appended.append(BlockAppend(request.row, group, tuple(table[-grown:])))

    def add_drops(self, request: ScheduledRequest, changed: list[tuple[int, int]]) -> None:
        for group, upto in changed:
            self.dropped.append(BlockDrop(request.row, group, upto))

    def add_evictions(self, request: ScheduledRequest, evicted: list[range]) -> None:
        self.evicted += [BlockEvict(request.row, one.start, one.stop) for one in evicted]
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
            draft_tokens=tuple(self.draft_tokens),
        )
