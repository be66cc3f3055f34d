"""`StepBuilder`: one step while it is being planned, and `SchedulerConfig`, its limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from twostroke.plan import BlockAppend, BlockDrop, Chunk, NewRow, PhaseWork, Slot, StepPlan
from twostroke.request import Request

if TYPE_CHECKING:
    from twostroke.sched.slo import Allowance

# `Slot(*fields)`, without a call of Python's: one is made for every token that is written.
new_slot: Callable[[tuple[int, int, int]], Slot] = partial(tuple.__new__, Slot)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits a schedule keeps; already validated (`config.py`)."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)
    policy: str = "fcfs"
    chunked_prefill: bool = True
    prefix_caching: bool = True
    lookahead: int = 128  # tokens of growth that admission keeps free for each running request
    ttft_slo_s: float | None = None  # goals; None: none
    itl_slo_s: float | None = None
    max_decode_stall: float | None = None  # steady gaps; where there is no itl_slo_s


class StepBuilder:
    """Collects what a step does. The budget counts tokens: a slot is one, a chunk its length."""

    def __init__(self, step: int, budget: int, window: int | None, now: float) -> None:
        self.step = step
        self.budget = budget
        self.now = now
        self.slots: list[Slot] = []
        self.chunks: list[Chunk] = []
        self.new: list[NewRow] = []
        self.appended: list[BlockAppend] = []
        self.dropped: list[BlockDrop] = []
        self.sampled: list[Request] = []  # slots first, then last chunks: the result's order
        self.last_chunks: list[Request] = []
        self.chunk_requests: list[Request] = []
        self.recomputed = 0  # tokens that were computed before and are not cached any more
        self.allowance: Allowance | None = None  # of time, where streams have a goal
        self._window = window
        self._decode_kv = 0
        self._prefill_kv = 0
        self._prefill_reads = 0
        self._prefill_tokens = 0

    @property
    def empty(self) -> bool:
        return not self.slots and not self.chunks

    @property
    def full(self) -> bool:
        """Whether no prefill fits any more."""
        return self.budget <= 0 or (self.allowance is not None and self.allowance.spent)

    @property
    def prefill_work(self) -> PhaseWork:
        return PhaseWork(
            len(self.chunks), self._prefill_tokens, self._prefill_kv, self._prefill_reads
        )

    @property
    def decode_work(self) -> PhaseWork:
        slots = len(self.slots)
        return PhaseWork(slots, slots, self._decode_kv, self._decode_kv)

    def fit(self, request: Request, start: int, most: int) -> int:
        """How many tokens of a prompt, from `start` on, the step has time for; at most `most`."""
        if self.allowance is None:
            return most
        return self.allowance.fit(self.prefill_work, start, most, len(request.tokens))

    def add_slots(self, requests: list[Request]) -> None:
        """A slot each, for what has been computed of them so far."""
        positions = [request.kv.num_computed for request in requests]
        rows = [request.row for request in requests]
        self.slots = [new_slot((row, at, 0)) for row, at in zip(rows, positions, strict=True)]
        self.sampled = requests
        self.budget -= len(requests)
        self._decode_kv = sum(positions) + len(positions)
        if self._window is not None:
            self._decode_kv = sum(min(position + 1, self._window) for position in positions)

    def add_chunk(self, request: Request, count: int) -> None:
        start = request.kv.num_computed
        last = start + count == len(request.tokens)
        self.chunks.append(Chunk(request.row, start, count, last))
        self.chunk_requests.append(request)
        if last:
            self.last_chunks.append(request)
        self.budget -= count
        self._prefill_tokens += count
        self._prefill_kv += visible_positions(start, count, self._window)
        seen = start if self._window is None else min(start, self._window - 1)
        self._prefill_reads += seen + count

    def add_blocks(self, request: Request, grown: int) -> None:
        if grown:
            for group, table in enumerate(request.kv.tables):
                self.appended.append(BlockAppend(request.row, group, tuple(table[-grown:])))

    def add_drops(self, request: Request, changed: list[tuple[int, int]]) -> None:
        for group, upto in changed:
            self.dropped.append(BlockDrop(request.row, group, upto))

    def build(self, retired: tuple[int, ...]) -> StepPlan:
        slots, chunks = self.slots, self.chunks
        self.sampled += self.last_chunks
        return StepPlan(
            step=self.step,
            new=tuple(self.new),
            retired=retired,
            appended=tuple(self.appended),
            dropped=tuple(self.dropped),
            prefill=tuple(chunks),
            decode=tuple(slots),
            prefill_work=self.prefill_work,
            decode_work=self.decode_work,
        )


def visible_positions(start: int, count: int, window: int | None) -> int:
    """Positions seen by the queries [start, start + count), themselves included, summed."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    growing = max(0, min(count, window - start))  # queries that still see everything
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window
