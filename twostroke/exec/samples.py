"""The samples of a step, in order, and the prompt tokens with log-probabilities.

The order of a step's samples is the order of `StepResult.tokens`: every token of the decode slots
(a slot with drafts has several), then the last token of each chunk that ends its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.plan import Chunk, NewRow, Slot, StepPlan, TokenLogprobs

LOGIT_SLICE = 64  # positions whose logits are in memory at one time, for prompt log-probabilities

Ints = npt.NDArray[np.int64]


class DecodeTokens(NamedTuple):
    """The tokens of the decode slots, in order."""

    rows: Ints
    positions: Ints
    slot_rows: Ints  # one per slot
    queries: int  # tokens per slot; 0 if slots differ


class Samples(NamedTuple):
    """The samples of a step."""

    rows: Ints
    positions: Ints  # position of each sampled token
    tokens: Ints  # the token of the step whose logits are sampled


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


class Kept(NamedTuple):
    """The samples of a step that become text."""

    samples: list[int]  # indices, in order
    counts: list[int]  # of each slot and each last chunk

    def of(
        self, tokens: Sequence[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Return the tokens of these samples, and their log-probabilities by their new index."""
        found = {n: logprobs[index] for n, index in enumerate(self.samples) if index in logprobs}
        return [tokens[index] for index in self.samples], found


def keep_accepted(plan: StepPlan, drawn: Sequence[int]) -> Kept | None:
    """Verify the drafts of a step. `drawn`: the token of every sample. None: there are no drafts.

        input   t   d1   d2   d3          the newest token, and three drafts
        drawn   d1  d2   x    y           d3 ≠ x: the new tokens are d1, d2, x

    Each sample is drawn from the distribution after the input token above it, with the random
    numbers of its position. A draft is accepted if it equals the sample of the previous column and
    all drafts before it are accepted. The sample after the last accepted draft is valid too. So the
    tokens are equal to the tokens of steps without drafts, and not only equally distributed. This
    is rejection sampling for drafts with probability 1: draft d is accepted with probability p(d);
    otherwise a token is drawn from p without d.
    """
    if not plan.draft_tokens:
        return None
    samples: list[int] = []
    counts = []
    first = draft = 0
    for slot in plan.decode:
        count = 0
        while count < slot.drafts and plan.draft_tokens[draft + count] == drawn[first + count]:
            count += 1
        samples += range(first, first + count + 1)
        counts.append(count + 1)
        first += 1 + slot.drafts
        draft += slot.drafts
    samples += range(first, len(drawn))
    return Kept(samples, counts + [1] * (len(drawn) - first))


def draft_cells(plan: StepPlan) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
    """Return the row, the position and the token of every draft."""
    rows = [slot.row for slot in plan.decode for _ in range(slot.drafts)]
    positions = [slot.position + 1 + n for slot in plan.decode for n in range(slot.drafts)]
    tokens = np.array(plan.draft_tokens, np.int32)
    return np.array(rows, np.int64), np.array(positions, np.int64), tokens


class ChunkSlice(NamedTuple):
    """Consecutive tokens of a chunk."""

    start: int  # positions [start, stop)
    stop: int
    first: int  # token of the step at position `start`


def chunk_slices(plan: StepPlan) -> Iterator[ChunkSlice]:
    """Yield all tokens of all chunks, in slices of bounded size."""
    first = sum(1 + slot.drafts for slot in plan.decode)
    for chunk in plan.prefill:
        end = chunk.start + chunk.size
        for start in range(chunk.start, end, LOGIT_SLICE):
            yield ChunkSlice(start, min(start + LOGIT_SLICE, end), first + start - chunk.start)
        first += chunk.size


class PromptSlice(NamedTuple):
    """Tokens of a chunk whose request wants prompt log-probabilities."""

    row: int
    num_best: int  # number of best tokens
    start: int  # positions [start, stop): their logits predict the next tokens
    stop: int
    first: int  # token of the step at position `start`


def prompt_slices(plan: StepPlan, rows: Mapping[int, NewRow]) -> Iterator[PromptSlice]:
    """Yield slices of bounded size of the prompt tokens after the first. A chunk without such
    tokens yields an empty slice."""
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
