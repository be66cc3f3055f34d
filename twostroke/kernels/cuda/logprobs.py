"""Log-probabilities of chosen tokens and of the best tokens, without a softmax of the vocabulary.

scan    for each tile of each row of logits: the sum of exponentials, the number of tokens with a
        larger logit than the chosen token, and the best tokens
merge   for each row: the sums over all tiles, and the best tokens of all tiles
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels import reference_sampling
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two

TILE = 2048  # tokens of one program of the scan
MAX_BEST = 32  # maximum number of best tokens; for more, a sort is faster
LOWEST = tl.constexpr(-3.0e38)  # smallest logit of a token that has not been taken


def token_logprobs(
    logits: torch.Tensor, which: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if count > MAX_BEST:
        return reference_sampling.token_logprobs(logits, which, tokens, count)
    assert logits.stride(1) == 1
    lines, vocab = len(which), logits.shape[1]
    tiles, device = ceil_div(vocab, TILE), logits.device
    sums = torch.empty(lines, 3, tiles, dtype=torch.float32, device=device)
    best = torch.empty(lines, tiles, MAX_BEST, dtype=torch.float32, device=device)
    best_ids = torch.empty(lines, tiles, MAX_BEST, dtype=torch.int32, device=device)
    ids = torch.empty(lines, 1 + count, dtype=torch.int32, device=device)
    values = torch.empty(lines, 1 + count, dtype=torch.float32, device=device)
    ranks = torch.empty(lines, dtype=torch.int32, device=device)
    scan, merge = _variants(vocab)
    given, found, stride = (logits, which, tokens), (sums, best, best_ids), (logits.stride(0),)
    scan((tiles, lines), (*given, *found), (count,), stride)
    merge((lines,), (*given, *found, ids, values, ranks), (count,), stride)
    return ids, values, ranks


@cache
def _variants(vocab: int) -> tuple[Variant, Variant]:
    tiles = ceil_div(vocab, TILE)
    shape = {"VOCAB": vocab, "TILES": tiles, "MAX_BEST": MAX_BEST}
    scan = Variant(_scan, **shape, TILE=TILE, num_warps=4)
    merge = Variant(_merge, **shape, BLOCK=power_of_two(tiles), num_warps=8)
    return scan, merge


UNSPECIALISED = {
    "do_not_specialize": ["count"],
    "do_not_specialize_on_alignment": [
        *("which", "tokens", "sums", "best", "best_ids", "ids", "values", "ranks")
    ],
}


@triton.jit(**UNSPECIALISED)
def _scan(
    logits,
    which,
    tokens,
    sums,
    best,
    best_ids,
    count,
    stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    MAX_BEST: tl.constexpr,
    TILE: tl.constexpr,
):
    tile = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    at = tl.load(which + n).to(tl.int64)
    line = logits + at * stride
    own = tl.load(line + tl.maximum(tl.load(tokens + at), 0)).to(tl.float32)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < VOCAB
    logit = tl.load(line + token, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(logit, axis=0), LOWEST)
    to = sums + n * 3 * TILES + tile
    tl.store(to, top)
    tl.store(to + TILES, tl.sum(tl.exp(logit - top), axis=0))
    tl.store(to + 2 * TILES, tl.sum((logit > own).to(tl.float32), axis=0))
    logit = tl.where(inside, tl.maximum(logit, LOWEST), float("-inf"))
    place = (n * TILES + tile) * MAX_BEST
    for k in range(count):
        value, index = tl.max(logit, axis=0, return_indices=True)
        tl.store(best + place + k, value)
        tl.store(best_ids + place + k, tile * TILE + index)
        logit = tl.where(tl.arange(0, TILE) == index, float("-inf"), logit)


@triton.jit(**UNSPECIALISED)
def _merge(
    logits,
    which,
    tokens,
    sums,
    best,
    best_ids,
    ids,
    values,
    ranks,
    count,
    stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    MAX_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    at = tl.load(which + n).to(tl.int64)
    chosen = tl.maximum(tl.load(tokens + at), 0)
    tile = tl.arange(0, BLOCK)
    of = sums + n * 3 * TILES + tile
    top = tl.load(of, mask=tile < TILES, other=float("-inf"))
    part = tl.load(of + TILES, mask=tile < TILES, other=0.0)
    above = tl.load(of + 2 * TILES, mask=tile < TILES, other=0.0)
    peak = tl.max(top, axis=0)
    total = peak + tl.log(tl.sum(part * tl.exp(top - peak), axis=0))
    to = n * (count + 1)
    own = tl.load(logits + at * stride + chosen).to(tl.float32)
    tl.store(ids + to, chosen.to(tl.int32))
    tl.store(values + to, own - total)
    tl.store(ranks + n, tl.sum(above.to(tl.int32), axis=0) + 1)
    # The best tokens of a tile are in order; of equal logits the lower id is first.
    entry = tl.arange(0, BLOCK * MAX_BEST)
    there = (entry < TILES * MAX_BEST) & (entry % MAX_BEST < count)
    rest = tl.load(best + n * TILES * MAX_BEST + entry, mask=there, other=float("-inf"))
    for k in range(count):
        value, index = tl.max(rest, axis=0, return_indices=True)
        tl.store(ids + to + 1 + k, tl.load(best_ids + n * TILES * MAX_BEST + index))
        tl.store(values + to + 1 + k, tl.where(value > LOWEST, value - total, float("-inf")))
        rest = tl.where(entry == index, float("-inf"), rest)
