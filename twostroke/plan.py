"""`StepPlan`: the work of one step. It is the only message from the scheduler to an executor.

A plan is frozen, self-contained and made of plain data, so the same plan can go to every
tensor-parallel rank or to another machine. The phase is a type: prefill work is a list of `Chunk`,
decode work a list of `Slot`. A row is the index of a request's state, which the executor keeps
between steps (`exec/rows.py`). A plan contains only the changes of this state.
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
    """A request that gets a row, with all that the executor needs."""

    row: int
    request_id: str
    tokens: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]


class BlockAppend(NamedTuple):
    """Blocks appended to a row's table in one KV group. Only `BlockEvict` shortens a table."""

    row: int
    group: int
    blocks: tuple[int, ...]


class BlockDrop(NamedTuple):
    """The first `upto` entries of a row's table become null: the sliding window has passed them."""

    row: int
    group: int
    upto: int


class BlockEvict(NamedTuple):
    """Entries [start, stop) are removed from a row's table after the step's appends, and the later
    entries move up. Only for models with one KV group."""

    row: int
    start: int
    stop: int


class TokenWrite(NamedTuple):
    """Tokens that replace the tokens of a row from `position` on, before the step runs. A draft
    model needs this, because the model that verifies its drafts decides the text."""

    row: int
    position: int
    tokens: tuple[int, ...]


class PhaseWork(NamedTuple):
    """The work of a phase in a step, in the units of the cost model."""

    rows: int = 0
    tokens: int = 0
    # Means over the layers, because windows make layers differ (`sched/work.py`):
    kv_tokens: int = 0  # cached positions attended to, summed over the tokens
    kv_reads: int = 0  # cached positions that must be read at least once

    def with_chunk(self, tokens: int, positions: tuple[int, int]) -> PhaseWork:
        """Return the work plus a row of `tokens` tokens. `positions`: its `kv_tokens` and its
        `kv_reads`."""
        attended, read = positions
        return PhaseWork(
            self.rows + 1, self.tokens + tokens, self.kv_tokens + attended, self.kv_reads + read
        )


NO_WORK = PhaseWork()


class StepPlan(NamedTuple):
    step: int
    new: tuple[NewRow, ...]
    retired: tuple[int, ...]  # rows that are free from this step on; `new` may reuse them
    appended: tuple[BlockAppend, ...]
    dropped: tuple[BlockDrop, ...]
    prefill: tuple[Chunk, ...]
    decode: tuple[Slot, ...]
    prefill_work: PhaseWork
    decode_work: PhaseWork
    evicted: tuple[BlockEvict, ...] = ()
    draft_tokens: tuple[int, ...] = ()  # `Slot.drafts` tokens for each slot, in order
    written: tuple[TokenWrite, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.prefill_work.tokens + self.decode_work.tokens


class TokenLogprobs(NamedTuple):
    """Token ids and their log-probabilities: the sampled token, then the most likely tokens. `rank`
    is the rank of the sampled token; 1 is the most likely."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


BROKEN_LOGITS = (
    "the model computed NaN or infinite logits; its weights are damaged, or its numbers are too "
    "large for the dtype (try --dtype float32)"
)


class StepResult(NamedTuple):
    """The output of a step, in the plan's order: the decode slots, then the chunks that are the
    last of their prompts.

    Each slot and each such chunk has one token, or as many as `counts` says: a slot with drafts has
    the accepted drafts and the token after them, at most `1 + drafts`.
    """

    tokens: list[int]  # -1: the logits were NaN or infinite
    logprobs: dict[int, TokenLogprobs]  # by index into `tokens`, if requested
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # by row: one per position, in order
    device_s: float
    idle_s: float | None = None  # idle time of the device before the step, if known
    counts: list[int] | None = None  # tokens of each slot and last chunk; None: one each
    comm_s: float = 0.0  # part of `device_s` in collectives with other ranks
    comm_bytes: float = 0.0  # bytes sent for collectives by a rank, the mean over the ranks
    # For each slot, the attention that each segment of its cache got. Empty unless KV eviction
    # chooses segments by their attention (`kv/eviction.py`).
    shares: Sequence[Sequence[float]] = ()


class Pending(Protocol):
    """A launched step."""

    def wait(self) -> StepResult: ...
