"""What one step does, decided before it runs: the only thing the scheduler says to an executor.

A `StepPlan` is frozen, self-contained and made of plain data, so that the same plan can go to
every tensor-parallel rank or to another machine. The phase is a type: prefill work is a list of
`Chunk`, decode work a list of `Slot`. Rows index state that the executor keeps from step to step
(`exec/rows.py`); a plan says only what changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from twostroke.request import SamplingParams


class Chunk(NamedTuple):
    """Prefill: compute positions [start, start + size) of a row; sample after the last chunk."""

    row: int
    start: int
    size: int
    last: bool


class Slot(NamedTuple):
    """Decode: feed the token at `position` (an upper bound while drafts are in flight)."""

    row: int
    position: int
    drafts: int = 0


class NewRow(NamedTuple):
    """A request takes a row: everything the executor must know of it, tokens so far included."""

    row: int
    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]


class BlockAppend(NamedTuple):
    """Blocks put at the end of a row's table in one KV group. Tables only grow."""

    row: int
    group: int
    blocks: tuple[int, ...]


class BlockDrop(NamedTuple):
    """The first `upto` entries of a row's table are null now: a window has passed them."""

    row: int
    group: int
    upto: int


class BlockEvict(NamedTuple):
    """Entries [start, stop) leave a row's table, after all that the step appends, and the table
    closes up. Rows of models with one KV group only."""

    row: int
    start: int
    stop: int


class PhaseWork(NamedTuple):
    """How much a phase does in a step, in the units the cost model counts in."""

    rows: int = 0
    tokens: int = 0
    # Means over the layers, since a window makes them differ (`sched/work.py`):
    kv_tokens: int = 0  # cached positions attended to, summed over the tokens
    kv_reads: int = 0  # cached positions that must be read at least once

    def with_chunk(self, tokens: int, positions: tuple[int, int]) -> PhaseWork:
        """With one row more, of so many tokens, which attends to and reads these positions."""
        attended, read = positions
        return PhaseWork(
            self.rows + 1, self.tokens + tokens, self.kv_tokens + attended, self.kv_reads + read
        )


class StepPlan(NamedTuple):
    step: int
    new: tuple[NewRow, ...]
    retired: tuple[int, ...]  # rows given up before this step; a new row may reuse one
    appended: tuple[BlockAppend, ...]
    dropped: tuple[BlockDrop, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[Slot, ...]
    prefill_work: PhaseWork
    decode_work: PhaseWork
    evicted: tuple[BlockEvict, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.prefill_work.tokens + self.decode_work.tokens


class TokenLogprobs(NamedTuple):
    """The chosen token first, then the most likely ones: ids, log-probabilities, rank of the
    chosen one (1 is the most likely)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


BROKEN_LOGITS = (
    "the model computed NaN or infinite logits; its weights are damaged, or its numbers are too "
    "large for the dtype (try --dtype float32)"
)


class StepResult(NamedTuple):
    """What came out, in the plan's order: the decode slots, then the last chunks.

    Each of them brings one token, or as many as `counts` says: a slot with drafts brings those that
    were accepted and the token after them, at most `1 + drafts`.
    """

    tokens: list[int]  # -1: the logits were NaN or infinite
    logprobs: dict[int, TokenLogprobs]  # by index into `tokens`; only where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # by row: one per position, in order
    device_s: float
    idle_s: float | None = None  # what the device had waited before, where it can tell
    counts: list[int] | None = None  # tokens of each slot and last chunk; None: one of each
    comm_s: float = 0.0  # of `device_s`, what went to collectives with other ranks
    comm_bytes: float = 0.0  # that a rank sent for these, the mean over the ranks
    # Of each slot's attention, to each stretch of its cache, where they decide what is evicted
    shares: Sequence[Sequence[float]] = ()


class Pending(Protocol):
    """A step that was launched."""

    def wait(self) -> StepResult: ...
