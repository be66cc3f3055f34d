"""Which tokens of a step are sampled from, in which order, and which prompt tokens are judged.

The order of a step's samples is the order of `StepResult.tokens`: every token of the decode slots
(a slot with drafts has several), then the last token of each chunk that ends its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.plan import Chunk, NewRow, Slot, StepPlan

LOGIT_SLICE = 64  # positions whose logits exist at one time while prompt log-probabilities are made

Ints = npt.NDArray[np.int64]


class DecodeTokens(NamedTuple):
    """The tokens of the decode slots, one after another."""

    rows: Ints
    positions: Ints
    slot_rows: Ints  # one a slot
    queries: int  # tokens of a slot; 0 where they differ


class Samples(NamedTuple):
    rows: Ints
    positions: Ints  # where each sampled token will stand
    tokens: Ints  # which token of the step its logits are of


def decode_tokens(slots: Sequence[Slot]) -> DecodeTokens:
    flat = np.fromiter(chain.from_iterable(slots), np.int64, 3 * len(slots)).reshape(-1, 3)
    rows, positions, drafts = flat[:, 0], flat[:, 1], flat[:, 2]
    if not drafts.any():
        return DecodeTokens(rows, positions, rows, 1)
    counts = drafts + 1
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    same = int(counts[0]) if (counts == counts[0]).all() else 0
    return DecodeTokens(np.repeat(rows, counts), np.repeat(positions, counts) + offsets, rows, same)


def samples_of(decode: DecodeTokens, chunks: Sequence[Chunk]) -> Samples:
    count = len(decode.rows)
    if not chunks:
        return Samples(decode.rows, decode.positions + 1, np.arange(count))
    table = np.array(chunks, np.int64)  # row, start, size, last
    last = table[:, 3].astype(bool)
    ends = count + np.cumsum(table[:, 2])
    return Samples(
        np.concatenate([decode.rows, table[last, 0]]),
        np.concatenate([decode.positions + 1, (table[:, 1] + table[:, 2])[last]]),
        np.concatenate([np.arange(count), ends[last] - 1]),
    )


class ChunkSlice(NamedTuple):
    """Some tokens of a chunk."""

    start: int  # positions [start, stop)
    stop: int
    first: int  # token of the step at position `start`


def chunk_slices(plan: StepPlan) -> Iterator[ChunkSlice]:
    """All tokens of all chunks, in slices of bounded size."""
    first = sum(1 + slot.drafts for slot in plan.decode)
    for chunk in plan.prefill:
        end = chunk.start + chunk.size
        for start in range(chunk.start, end, LOGIT_SLICE):
            yield ChunkSlice(start, min(start + LOGIT_SLICE, end), first + start - chunk.start)
        first += chunk.size


class PromptSlice(NamedTuple):
    """Some tokens of a chunk whose log-probabilities a request asked for."""

    row: int
    num_best: int  # how many of the most likely tokens each is to be told with
    start: int  # positions [start, stop): their logits judge the tokens one further
    stop: int
    first: int  # token of the step at position `start`


def prompt_slices(plan: StepPlan, rows: Mapping[int, NewRow]) -> Iterator[PromptSlice]:
    """For each prompt token after the first, slices of bounded size; a row whose chunk has none
    gives an empty slice."""
    if not wants_prompt_logprobs(plan, rows):
        return
    first = sum(1 + slot.drafts for slot in plan.decode)
    for chunk in plan.prefill:
        request = rows[chunk.row]
        count = request.params.prompt_logprobs
        if count is not None:
            end = min(chunk.start + chunk.size, request.num_prompt - 1)
            for start in range(chunk.start, max(end, chunk.start + 1), LOGIT_SLICE):
                stop = max(start, min(start + LOGIT_SLICE, end))
                yield PromptSlice(chunk.row, count, start, stop, first + start - chunk.start)
        first += chunk.size


def wants_prompt_logprobs(plan: StepPlan, rows: Mapping[int, NewRow]) -> bool:
    return any(rows[chunk.row].params.prompt_logprobs is not None for chunk in plan.prefill)
