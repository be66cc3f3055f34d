"""`SchedulerConfig`: the settings of the scheduler. `StepBuilder`: a step that is being planned.
`StepInFlight`: a planned step that is not committed yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import attrgetter

from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.draft.speculator import StepDrafts
from twostroke.kv.cache import GroupLimits, KVSequence
from twostroke.kv.eviction import Eviction
from twostroke.kv.prefix import seed_digest
from twostroke.kv.usage import KVUsage
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
from twostroke.request import EngineRequest
from twostroke.sched.allowance import Allowance
from twostroke.sched.scheduled_request import ScheduledRequest
from twostroke.sched.work import AttentionWork

# `Slot(*fields)` without a Python call, because each decoded token needs a new slot.
new_slot: Callable[[tuple[int, int, int]], Slot] = partial(tuple.__new__, Slot)
row_of: Callable[[ScheduledRequest], int] = attrgetter("row")
num_computed_of: Callable[[KVSequence], int] = attrgetter("num_computed")
num_evicted_of: Callable[[KVSequence], int] = attrgetter("num_evicted")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The settings of the scheduler, already validated (`config.py`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    groups: tuple[GroupLimits, ...]  # the KV groups, in the model's order
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    # Admission keeps KV blocks free for this many further tokens of each running request.
    # vLLM's `num_lookahead_slots` is something else: room for drafts.
    lookahead: int = 128
    ttft_slo_s: float | None = None  # None: no goal
    itl_slo_s: float | None = None  # None: no goal
    # The longest gap between two tokens of a request, as a multiple of the time of a step without
    # prefill. Used only if `itl_slo_s` is None.
    max_decode_stall: float | None = None
    receives_requests: bool = False  # from prefill engines, at any time
    eviction: Eviction | None = None
    speculation: SpeculationConfig | None = None  # with drafts, steps do not overlap


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A planned step that is not committed yet."""

    plan: StepPlan
    # Requests that sample a token, in the order of the result: the requests of the slots, then the
    # requests whose last chunk this is.
    sampled_requests: list[ScheduledRequest]
    chunk_requests: list[ScheduledRequest]  # in the order of plan.prefill
    planned_s: float  # time (`monotonic`) at which planning began
    predicted_device_s: float  # expected duration on the device; 0: unknown
    preempted: int  # number of requests preempted since the previous step was planned
    recomputed: int  # number of tokens that were computed before and are no longer cached
    waiting: int  # number of requests
    running: int  # number of requests
    kv: KVUsage  # including the blocks and tokens of this step
    drafts: StepDrafts | None = None  # None: the step was planned without drafts
    launched_s: float = 0.0  # time (`monotonic`) at which the executor was given the plan
    pending: Pending | None = None  # the result, once the step is launched


@dataclass(slots=True)
class RowChanges:
    """Changes of rows since the newest step was planned, which the next step will contain."""

    new: list[NewRow] = field(default_factory=list)
    appended: list[BlockAppend] = field(default_factory=list)
    dropped: list[BlockDrop] = field(default_factory=list)
    evicted: list[BlockEvict] = field(default_factory=list)

    def forget(self, row: int) -> bool:
        """Remove the changes of a released row. Return True if no step contained its request."""
        is_new = any(one.row == row for one in self.new)
        if is_new:
            self.new[:] = [one for one in self.new if one.row != row]
        self.appended[:] = [one for one in self.appended if one.row != row]
        self.dropped[:] = [one for one in self.dropped if one.row != row]
        self.evicted[:] = [one for one in self.evicted if one.row != row]
        return is_new

    def clear(self) -> None:
        self.new.clear()
        self.appended.clear()
        self.dropped.clear()
        self.evicted.clear()


def prefix_seed(config: SchedulerConfig, request: EngineRequest) -> bytes | None:
    """Return the start of a request's chain of block digests. It contains the salt. Without prefix
    caching only the continuations of one `n > 1` request share blocks."""
    if config.prefix_caching:
        return seed_digest("salt", request.salt)
    return seed_digest("family", request.family) if request.family else None


class StepBuilder:
    """Collects the work of a step. The budget counts the tokens of slots and chunks."""

    def __init__(
        self,
        step: int,
        budget: int,
        work: AttentionWork,
        now: float,
        changes: RowChanges | None = None,
    ) -> None:
        """`changes`: from calls of `Scheduler.plan` that returned None. The builder appends to
        them."""
        self.changes = changes or RowChanges()
        self.step = step
        self.budget = budget
        self.now = now
        self.slots: list[Slot] = []
        self.chunks: list[Chunk] = []
        self.sampled_requests: list[ScheduledRequest] = []  # of slots; `build` adds last chunks
        self.last_chunks: list[ScheduledRequest] = []
        self.chunk_requests: list[ScheduledRequest] = []
        self.draft_tokens: list[int] = []  # of all slots, in their order
        self.model_s = 0.0  # time that a draft model ran for this step
        self.recomputed = 0  # number of tokens that were computed before and are no longer cached
        self.allowance: Allowance | None = None  # time for prefill; None: unlimited
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
        """Return the number of prompt tokens, beginning at `start`, that the step has time for."""
        if self.allowance is None:
            return max_tokens
        return self.allowance.fit(self.prefill_work, start, max_tokens, len(request.tokens))

    def add_slots(
        self,
        requests: list[ScheduledRequest],
        sequences: Sequence[KVSequence],
        uses_eviction: bool = False,
    ) -> None:
        """Add a slot for each request, at the first position of its sequence that is not computed.
        `uses_eviction`: sequences may have fewer cache entries than positions."""
        positions = list(map(num_computed_of, sequences))
        fields = zip(map(row_of, requests), positions, repeat(0))
        self.slots = list(map(new_slot, fields))
        self.sampled_requests = requests
        self.budget -= len(requests)
        if uses_eviction:
            num_evicted = map(num_evicted_of, sequences)
            positions = [at - count for at, count in zip(positions, num_evicted, strict=True)]
        rows = len(requests)
        self.decode_work = PhaseWork(rows, rows, *self._work.of_slots(positions))

    def add_drafts(self, drafts: Sequence[Sequence[int]], sequences: Sequence[KVSequence]) -> None:
        """Add drafted tokens to the slots. `drafts` and `sequences` have an entry for each slot."""
        # Positions that the slots attend to and that they read from the cache (`AttentionWork`).
        attended, read = 0, 0
        rows, tokens = len(self.slots), 0
        for n, (slot, drafted, seq) in enumerate(zip(self.slots, drafts, sequences, strict=True)):
            self.slots[n] = slot._replace(drafts=len(drafted))
            self.draft_tokens += drafted
            tokens += 1 + len(drafted)
            cached = slot.position - seq.num_evicted
            row_attended, row_read = self._work.of_chunk(cached, 1 + len(drafted))
            attended, read = attended + row_attended, read + row_read
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
        self.changes.new.append(
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

    def add_blocks(self, request: ScheduledRequest, num_blocks: int) -> None:
        """Report the newest `num_blocks` blocks of each table of a request."""
        if num_blocks:
            for group, table in enumerate(request.kv.tables):
                new = tuple(table[-num_blocks:])
                self.changes.appended.append(BlockAppend(request.row, group, new))

    def add_drops(self, request: ScheduledRequest, drops: list[tuple[int, int]]) -> None:
        """Report blocks that a sliding window has passed. `drops`: pairs of a KV group and the
        number of leading table entries that are dropped in it."""
        for group, num_entries in drops:
            self.changes.dropped.append(BlockDrop(request.row, group, num_entries))

    def add_evictions(self, request: ScheduledRequest, evicted: list[range]) -> None:
        """Report ranges of table entries that a request evicts."""
        spans = [BlockEvict(request.row, span.start, span.stop) for span in evicted]
        self.changes.evicted += spans
        request.record.kv_evicted_tokens = request.kv.num_evicted

    def build(self, retired: tuple[int, ...]) -> StepPlan:
        changes = self.changes
        self.sampled_requests += self.last_chunks
        return StepPlan(
            step=self.step,
            new=tuple(changes.new),
            retired=retired,
            appended=tuple(changes.appended),
            dropped=tuple(changes.dropped),
            prefill=tuple(self.chunks),
            decode=tuple(self.slots),
            prefill_work=self.prefill_work,
            decode_work=self.decode_work,
            evicted=tuple(changes.evicted),
            draft_tokens=tuple(self.draft_tokens),
        )
