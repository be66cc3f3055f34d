"""Masks, penalties, biases and bans on the device, in one launch for all samples that have any.

    each tile of each sample:  1. raw logits ─▶ masks ─▶ penalties ─▶ fp32
                               2. the tile's tokens with a bias are computed again, with the bias
                               3. the tile's banned tokens become -inf

Masks and bans set a logit to -inf, so the only order that matters is biases before penalties.
`kernels/reference_sampling.py` defines the functions, `kernels/sampling_table.py` the tables.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels import sampling_table
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div
from twostroke.kernels.sampling_table import SamplingState

TILE = 2048  # tokens of one program

SAMPLE = tl.constexpr(sampling_table.SAMPLE)
ROW = tl.constexpr(sampling_table.ROW)
POSITION = tl.constexpr(sampling_table.POSITION)
MASK = tl.constexpr(sampling_table.MASK)
FLAGS = tl.constexpr(sampling_table.FLAGS)
NUM_BIASES = tl.constexpr(sampling_table.NUM_BIASES)
NUM_BANS = tl.constexpr(sampling_table.NUM_BANS)
REPETITION = tl.constexpr(sampling_table.REPETITION)
FREQUENCY = tl.constexpr(sampling_table.FREQUENCY)
PRESENCE = tl.constexpr(sampling_table.PRESENCE)
PENALISED = tl.constexpr(sampling_table.PENALISED)
ALLOWED_IDS = tl.constexpr(sampling_table.ALLOWED_IDS)
MAX_WRITTEN = tl.constexpr(sampling_table.MAX_WRITTEN)
MAX_BIASES = tl.constexpr(sampling_table.MAX_BIASES)
MAX_BANS = tl.constexpr(sampling_table.MAX_BANS)
MAX_BAN_PREFIX = tl.constexpr(sampling_table.MAX_BAN_PREFIX)
BIAS_VALUES = tl.constexpr(sampling_table.BIAS_VALUES)
BAN_TOKEN = tl.constexpr(sampling_table.BAN_TOKEN)
BAN_FROM = tl.constexpr(sampling_table.BAN_FROM)
BAN_UNTIL = tl.constexpr(sampling_table.BAN_UNTIL)
BAN_LENGTH = tl.constexpr(sampling_table.BAN_LENGTH)
BAN_PREFIX = tl.constexpr(sampling_table.BAN_PREFIX)
LISTS_WIDTH = tl.constexpr(sampling_table.LISTS_WIDTH)


def adjust_logits(
    logits: torch.Tensor,
    samples: torch.Tensor,
    state: SamplingState,
    masks: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the adjusted logits of `samples` to `out`."""
    count, vocab = out.shape
    assert logits.stride(1) == 1
    assert all(each.is_contiguous() for each in (samples, masks, out, *state[1:]))
    _adjust_variant(vocab)(
        (ceil_div(vocab, TILE), count),
        (logits, samples, masks, *state, out),
        (count,),
        (logits.stride(0), state.tokens.stride(0)),
    )
    return out


def advance_tokens(
    samples: torch.Tensor, drawn: torch.Tensor, state: SamplingState, out: torch.Tensor
) -> None:
    """Write the drawn tokens to the step's tokens (`out`), and to the rows' tokens and counts."""
    tokens, counts = state.tokens, state.counts
    count = len(drawn)
    _advance_variant(counts.shape[1])(
        (count,), (samples, drawn, tokens, counts, out), (count,), (tokens.stride(0),)
    )


@cache
def _adjust_variant(vocab: int) -> Variant:
    # Without fused multiply-adds the results are bit-identical to the reference.
    return Variant(_adjust, VOCAB=vocab, TILE=TILE, num_warps=4, enable_fp_fusion=False)


@cache
def _advance_variant(vocab: int) -> Variant:
    return Variant(_advance, VOCAB=vocab, num_warps=1)


# The number of samples and the alignment of the views of rows differ from step to step.
UNSPECIALISED = {
    "do_not_specialize": ["count"],
    "do_not_specialize_on_alignment": ["samples", "tokens", "drawn", "step_tokens"],
}


@triton.jit(**UNSPECIALISED)
def _adjust(
    logits,
    samples,
    masks,
    tokens,
    counts,
    allowed,
    lists,
    out,
    count,
    logits_stride,
    tokens_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    WORDS: tl.constexpr = (VOCAB + 31) // 32
    first = tl.program_id(0) * TILE
    sample = tl.program_id(1).to(tl.int64)
    fields = samples + sample  # field n of this sample is at n · count
    row = tl.load(fields + ROW * count).to(tl.int64)
    flags = tl.load(fields + FLAGS * count)
    mask = tl.load(fields + MASK * count).to(tl.int64)
    line = logits + tl.load(fields + SAMPLE * count).to(tl.int64) * logits_stride
    result = out + sample * VOCAB
    token = first + tl.arange(0, TILE)
    inside = token < VOCAB
    logit = tl.load(line + token, mask=inside, other=0.0).to(tl.float32)
    logit = _masked_and_penalised(
        logit, token, inside, fields, count, flags, mask, row, masks, allowed, counts, VOCAB, WORDS
    )
    tl.store(result + token, logit, mask=inside)
    num_biases = tl.load(fields + NUM_BIASES * count)
    num_bans = tl.load(fields + NUM_BANS * count)
    listed = lists + row * LISTS_WIDTH
    if num_biases > 0:
        tl.debug_barrier()  # the stores of all threads must end before a token is stored again
        which = tl.arange(0, MAX_BIASES)
        biased = tl.load(listed + which, mask=which < num_biases, other=-1)
        mine = (biased >= first) & (biased < first + TILE)
        bias = tl.load(listed + BIAS_VALUES + which, mask=mine, other=0)
        biased_logit = tl.load(line + biased, mask=mine, other=0.0).to(tl.float32)
        biased_logit = _masked_and_penalised(
            biased_logit + bias.to(tl.float32, bitcast=True),
            biased,
            mine,
            fields,
            count,
            flags,
            mask,
            row,
            masks,
            allowed,
            counts,
            VOCAB,
            WORDS,
        )
        tl.store(result + biased, biased_logit, mask=mine)
    if num_bans > 0:
        tl.debug_barrier()
        position = tl.load(fields + POSITION * count)
        _ban(result, listed, num_bans, tokens + row * tokens_stride, position, first, first + TILE)


@triton.jit
def _ban(result, listed, num_bans, history, position, first, end):
    which = tl.arange(0, MAX_BANS)
    banned = tl.load(listed + BAN_TOKEN + which, mask=which < num_bans, other=-1)
    holds = (banned >= first) & (banned < end)
    holds = holds & (position >= tl.load(listed + BAN_FROM + which, mask=holds, other=0))
    holds = holds & (position < tl.load(listed + BAN_UNTIL + which, mask=holds, other=0))
    length = tl.load(listed + BAN_LENGTH + which, mask=holds, other=0)
    tail = history + position - length
    for n in range(MAX_BAN_PREFIX):
        compared = holds & (n < length)
        wanted = tl.load(listed + BAN_PREFIX + n * MAX_BANS + which, mask=compared, other=0)
        holds = holds & (tl.load(tail + n, mask=compared, other=0) == wanted)
    tl.store(result + banned, tl.full([MAX_BANS], float("-inf"), tl.float32), mask=holds)


@triton.jit
def _masked_and_penalised(
    logit,
    token,
    inside,
    fields,
    count,
    flags,
    mask,
    row,
    masks,
    allowed,
    counts,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
):
    if mask >= 0:
        words = tl.load(masks + mask * WORDS + token // 32, mask=inside, other=0)
        logit = tl.where((words >> (token % 32)) & 1 != 0, logit, float("-inf"))
    if flags & ALLOWED_IDS != 0:
        words = tl.load(allowed + row * WORDS + token // 32, mask=inside, other=0)
        logit = tl.where((words >> (token % 32)) & 1 != 0, logit, float("-inf"))
    if flags & PENALISED != 0:
        repetition = tl.load(fields + REPETITION * count).to(tl.float32, bitcast=True)
        frequency = tl.load(fields + FREQUENCY * count).to(tl.float32, bitcast=True)
        presence = tl.load(fields + PRESENCE * count).to(tl.float32, bitcast=True)
        # A count is nonzero for tokens of the prompt and the output; see `IN_PROMPT`.
        packed = tl.load(counts + row * VOCAB + token, mask=inside, other=0).to(tl.int32)
        written = packed & MAX_WRITTEN
        by = tl.zeros_like(logit) + repetition
        scaled = tl.where(logit > 0, tl.math.div_rn(logit, by), logit * repetition)
        logit = tl.where(packed != 0, scaled, logit)
        logit = logit - written.to(tl.float32) * frequency
        logit = logit - tl.where(written > 0, presence, 0.0)
    return logit


@triton.jit(**UNSPECIALISED)
def _advance(
    samples, drawn, tokens, counts, step_tokens, count, tokens_stride, VOCAB: tl.constexpr
):
    sample = tl.program_id(0)
    fields = samples + sample  # field n of this sample is at n · count
    row = tl.load(fields + ROW * count).to(tl.int64)
    token = tl.load(drawn + sample)
    tl.store(step_tokens + tl.load(fields + SAMPLE * count), token)
    position = tl.load(fields + POSITION * count)
    tl.store(tokens + row * tokens_stride + position, tl.maximum(token, 0))
    if (tl.load(fields + FLAGS * count) & PENALISED != 0) & (token >= 0):
        at = counts + row * VOCAB + token
        packed = tl.load(at)
        grown = (packed & MAX_WRITTEN) < MAX_WRITTEN
        tl.store(at, packed + grown.to(tl.int16))
