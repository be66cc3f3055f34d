"""Sampling without sorting the vocabulary. `reference_sampling` defines which tokens are kept.

    scan     for each tile of each row: maximum of logit + noise, maximum logit, sum of exponentials
    choose   for each row: the token with the maximum of logit + noise, if min-p, top-k and top-p
             keep it; otherwise the same among the tokens ranked above it, until a token is kept

The drawn token is the kept token with the largest logit + Gumbel noise. Tokens are ranked by logit,
equal logits by id, the lower id first. The kept tokens are the first ones of this ranking, so if a
token is not kept, all tokens ranked below it are not kept either. With top-p 0.9, nine draws of ten
end with the first token. Most top-k limits keep a few hundred tokens; `top_k_candidates.py` gathers
these tokens and reads no others.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.noise import exponential_noise, load_logits, uniform_noise
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.top_k_candidates import CANDIDATES, PART, draw_from_candidates
from twostroke.kernels.records import DrawParams

TILE = 2048  # tokens of one program of the scan
STEP = 4  # tiles that an iteration of `choose` reads
MAX_TURNS = tl.constexpr(96)  # iterations of a search: about ten, but with NaNs it must end too
LOWEST = tl.constexpr(-3.0e38)


def sample(
    logits: torch.Tensor,
    params: DrawParams[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    cells: torch.Tensor | None = None,
    write_at: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row of [B, V]; -1 where the largest logit is NaN or infinite."""
    batch, vocab = logits.shape
    keys, min_p = (params.key0, params.key1), params.min_p
    limits = (params.temperature, params.top_k, params.top_p)
    assert logits.stride(1) == 1
    assert all(each.is_contiguous() for each in (*limits, min_p, *keys))
    tiles = ceil_div(vocab, TILE)
    device = logits.device
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=device)
    found = torch.empty(3, batch, tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(batch, tiles, dtype=torch.int32, device=device)
    tile_score, tile_max, tile_mass = found.unbind(0)
    part_maxima = torch.empty(batch, tiles * (TILE // PART), dtype=torch.float32, device=device)
    candidate_logits = torch.empty(batch, CANDIDATES, dtype=torch.float32, device=device)
    candidate_ids, hit_parts = torch.empty(
        2, batch, CANDIDATES, dtype=torch.int32, device=device
    ).unbind(0)
    scan, choose = _variants(vocab)
    scratch, stride = (candidate_logits, candidate_ids, hit_parts), (logits.stride(0),)
    found_in_tiles = (tile_score, tile_max, tile_mass, tokens, part_maxima)
    scan((tiles, batch), (logits, *limits, *keys, *found_in_tiles), (), stride)
    written = (out, cells, write_at)
    choose(
        (batch,), (logits, *limits, min_p, *keys, *found_in_tiles, *scratch, *written), (), stride
    )
    return out


@cache
def _variants(vocab: int) -> tuple[Variant, Variant]:
    tiles = ceil_div(vocab, TILE)
    scan = Variant(_scan_tiles, VOCAB=vocab, TILES=tiles, TILE=TILE, PART=PART, num_warps=4)
    choose = Variant(
        _choose,
        VOCAB=vocab,
        TILES=tiles,
        BLOCK=power_of_two(tiles),
        TILE=TILE,
        STEP=STEP,
        PART=PART,
        CANDIDATES=CANDIDATES,
        num_warps=16,
    )
    return scan, choose


# Tensors with one number for each row.
PER_ROW = ["temperature", "top_k", "top_p", "min_p", "key0", "key1", "out", "cells", "write_at"]
# Tensors with one number for each tile, or for each part of a tile.
PER_TILE = ["tile_score", "tile_max", "tile_mass", "tokens", "part_maxima"]


@triton.jit(do_not_specialize_on_alignment=PER_ROW + PER_TILE)
def _scan_tiles(
    logits,
    temperature,
    top_k,
    top_p,
    key0,
    key1,
    tile_score,
    tile_max,
    tile_mass,
    tokens,
    part_maxima,
    stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    logit = load_logits(logits + row * stride, token, VOCAB)
    # NaN becomes +inf, so that the maximum shows whether the row has an invalid logit.
    logit = tl.where(logit < float("inf"), logit, float("inf"))
    temp = tl.load(temperature + row)
    at = row * TILES + tile
    if temp == 0:
        best = tl.max(logit, axis=0)
        tl.store(tile_max + at, best)
        tl.store(tile_score + at, best)
        tl.store(tokens + at, tl.min(tl.where(logit == best, token, VOCAB), axis=0))
    else:
        scaled = logit * (1.0 / temp)
        top = tl.max(scaled, axis=0)
        tl.store(tile_max + at, top)
        if tl.load(top_k + row) > 0:
            part_max = tl.max(tl.reshape(scaled, [TILE // PART, PART]), axis=1)
            tl.store(part_maxima + at * (TILE // PART) + tl.arange(0, TILE // PART), part_max)
        # The token with the largest s − log(e), where e = −log1p(−u) ≥ u, has the smallest
        # e · exp(−s). To avoid a logarithm for each token, first find the smallest u · exp(−s).
        # That token wins unless another u · exp(−s) is below the e · exp(−s) of that token.
        top = tl.maximum(top, LOWEST)
        first, second = tl.load(key0 + row), tl.load(key1 + row)
        uniform = uniform_noise(first, second, token)
        weight = tl.exp(top - scaled)
        bound = uniform * weight
        smallest = tl.min(bound, axis=0)
        winner = tl.min(tl.where(bound == smallest, token, VOCAB), axis=0)
        chance = uniform_noise(first, second, winner)
        smallest = smallest * (exponential_noise(chance) / chance)
        if tl.sum((bound <= smallest).to(tl.int32), axis=0) > 1:
            wait = exponential_noise(uniform) * weight
            smallest = tl.min(wait, axis=0)
            winner = tl.min(tl.where(wait == smallest, token, VOCAB), axis=0)
        tl.store(tile_score + at, top - tl.log(smallest))
        tl.store(tokens + at, winner)
        if tl.load(top_p + row) < 1:
            tl.store(tile_mass + at, tl.sum(tl.exp(scaled - top), axis=0))


@triton.jit(do_not_specialize_on_alignment=PER_ROW + PER_TILE)
def _choose(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    key0,
    key1,
    tile_score,
    tile_max,
    tile_mass,
    tokens,
    part_maxima,
    candidate_logits,
    candidate_ids,
    hit_parts,
    out,
    cells,
    write_at,
    stride,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PART: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = row * TILES + tl.arange(0, BLOCK)
    real = tl.arange(0, BLOCK) < TILES
    tile_scores = tl.load(tile_score + at, mask=real, other=float("-inf"))
    winner = tl.argmax(tile_scores, axis=0)
    token = tl.load(tokens + row * TILES + tl.minimum(winner, TILES - 1))
    token = tl.minimum(token, VOCAB - 1)
    temp = tl.load(temperature + row)
    top = tl.load(tile_max + at, mask=real, other=float("-inf"))
    max_logit = tl.max(top, axis=0)
    if max_logit == float("inf"):
        token = -1
    elif temp != 0:
        inv_temp = 1.0 / temp
        k = tl.load(top_k + row).to(tl.int32)
        p = tl.load(top_p + row)
        smallest = tl.load(min_p + row)
        k = tl.where((k > 0) & (k < VOCAB), k, VOCAB)
        if (k < VOCAB) | (p < 1) | (smallest > 0):
            row_logits = logits + row * stride
            tile_maxima = tile_max + row * TILES
            fraction = tl.log(tl.where(smallest > 0, smallest, 1.0))
            min_logit = tl.where(smallest > 0, max_logit + fraction, float("-inf"))
            candidate = -1
            if k * 2 <= CANDIDATES:
                candidate = draw_from_candidates(
                    row_logits,
                    part_maxima + row * TILES * (TILE // PART),
                    candidate_logits + row * CANDIDATES,
                    candidate_ids + row * CANDIDATES,
                    hit_parts + row * CANDIDATES,
                    inv_temp,
                    max_logit,
                    min_logit,
                    k,
                    p,
                    tl.load(key0 + row),
                    tl.load(key1 + row),
                    VOCAB,
                    TILES * (TILE // PART),
                    BLOCK * (TILE // PART),
                    PART,
                    CANDIDATES,
                )
            if candidate >= 0:
                token = candidate
            else:
                total = 0.0
                if p < 1:
                    if k < VOCAB:
                        total = _top_k_mass(
                            row_logits,
                            tile_maxima,
                            inv_temp,
                            max_logit,
                            min_logit,
                            k,
                            VOCAB,
                            TILES,
                            TILE,
                            STEP,
                        )
                    elif smallest > 0:
                        above_min = _above(
                            row_logits,
                            tile_maxima,
                            inv_temp,
                            max_logit,
                            min_logit,
                            VOCAB,
                            VOCAB,
                            TILES,
                            TILE,
                            STEP,
                        )
                        total = above_min[1]
                    else:
                        each = tl.load(tile_mass + at, mask=real, other=0.0)
                        total = tl.sum(each * tl.exp(top - max_logit), axis=0)
                token = _first_within_limits(
                    row_logits,
                    tile_maxima,
                    inv_temp,
                    max_logit,
                    min_logit,
                    k,
                    p,
                    total,
                    token,
                    tl.load(key0 + row),
                    tl.load(key1 + row),
                    VOCAB,
                    TILES,
                    TILE,
                    STEP,
                )
    tl.store(out + row, token.to(out.dtype.element_ty))
    if cells is not None:  # the next step reads the cells, and -1 has no embedding
        tl.store(cells + tl.load(write_at + row), tl.maximum(token, 0).to(cells.dtype.element_ty))


@triton.jit
def _first_within_limits(
    row_logits,
    tile_maxima,
    inv_temp,
    max_logit,
    min_logit,
    k,
    p,
    total,
    token,
    key0,
    key1,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Repeat the draw among the tokens ranked above the drawn token, until a drawn token is within
    the limits."""
    turn = 0
    while turn < MAX_TURNS:
        value = tl.load(row_logits + token).to(tl.float32) * inv_temp
        count, before = _above(
            row_logits, tile_maxima, inv_temp, max_logit, value, token, VOCAB, TILES, TILE, STEP
        )
        kept = (value >= min_logit) & (count < k) & ((p >= 1) | (before < p * total) | (count == 0))
        if kept:
            turn = MAX_TURNS
        else:
            turn += 1
            # Of a token below `min_logit`, the next candidates are all tokens that reach
            # `min_logit`.
            low = value < min_logit
            value = tl.where(low, min_logit, value)
            bound = tl.where(low, VOCAB, token)
            token = _draw_above(
                row_logits,
                tile_maxima,
                inv_temp,
                value,
                bound,
                key0,
                key1,
                VOCAB,
                TILES,
                TILE,
                STEP,
            )
    return token


@triton.jit
def _above(
    row_logits,
    tile_maxima,
    inv_temp,
    max_logit,
    value,
    token,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the number of tokens ranked above (value, token), and the sum of their
    exponentials."""
    count = tl.zeros([TILE * STEP], tl.int32)
    tile_mass = tl.zeros([TILE * STEP], tl.float32)
    for tile in range(0, TILES, STEP):
        if _top(tile_maxima, tile, TILES, STEP) >= value:
            ids = tile * TILE + tl.arange(0, TILE * STEP)
            scaled = load_logits(row_logits, ids, VOCAB) * inv_temp
            above = (scaled > value) | ((scaled == value) & (ids < token))
            count += above.to(tl.int32)
            tile_mass += tl.where(above, tl.exp(scaled - max_logit), 0.0)
    return tl.sum(count, axis=0), tl.sum(tile_mass, axis=0)


@triton.jit
def _draw_above(
    row_logits,
    tile_maxima,
    inv_temp,
    value,
    token,
    key0,
    key1,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the token with the largest logit + noise among those ranked above (value, token)."""
    best = tl.full([TILE * STEP], float("-inf"), tl.float32)
    where = tl.zeros([TILE * STEP], tl.int32)
    for tile in range(0, TILES, STEP):
        if _top(tile_maxima, tile, TILES, STEP) >= value:
            ids = tile * TILE + tl.arange(0, TILE * STEP)
            scaled = load_logits(row_logits, ids, VOCAB) * inv_temp
            above = (scaled > value) | ((scaled == value) & (ids < token))
            noisy = tl.where(
                above,
                scaled - tl.log(exponential_noise(uniform_noise(key0, key1, ids))),
                float("-inf"),
            )
            where = tl.where(noisy > best, ids, where)
            best = tl.maximum(best, noisy)
    top = tl.max(best, axis=0)
    return tl.min(tl.where(best == top, where, VOCAB - 1), axis=0)


@triton.jit
def _top_k_mass(
    row_logits,
    tile_maxima,
    inv_temp,
    max_logit,
    min_logit,
    k,
    VOCAB: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the sum of exponentials over those of the k largest logits that reach `min_logit`.

    The k-th largest logit is in [low, high], and both ends are logits that occur. Each iteration
    counts the logits above a pivot. Either the pivot is the k-th largest logit, or one end moves to
    the next logit that occurs.
    """
    low = float("-inf")
    high = max_logit
    distance = 2.0
    total = 0.0
    turn = 0
    while turn < MAX_TURNS:
        pivot = tl.where(low == float("-inf"), max_logit - distance, low * 0.5 + high * 0.5)
        pivot = tl.minimum(pivot, high)
        greater = tl.zeros([TILE * STEP], tl.int32)
        equal = tl.zeros([TILE * STEP], tl.int32)
        tile_mass = tl.zeros([TILE * STEP], tl.float32)
        next_up = tl.full([TILE * STEP], float("inf"), tl.float32)
        next_down = tl.full([TILE * STEP], float("-inf"), tl.float32)
        for tile in range(0, TILES, STEP):
            top = _top(tile_maxima, tile, TILES, STEP)
            if top >= pivot:
                ids = tile * TILE + tl.arange(0, TILE * STEP)
                scaled = load_logits(row_logits, ids, VOCAB) * inv_temp
                above = scaled > pivot
                greater += above.to(tl.int32)
                equal += (scaled == pivot).to(tl.int32)
                tile_mass += tl.where(
                    above & (scaled >= min_logit), tl.exp(scaled - max_logit), 0.0
                )
                next_up = tl.where(above, tl.minimum(next_up, scaled), next_up)
                below = tl.where(scaled < pivot, scaled, float("-inf"))
                next_down = tl.maximum(next_down, below)
            else:
                next_down = tl.maximum(next_down, top)
        num_greater = tl.sum(greater, axis=0)
        num_equal = tl.sum(equal, axis=0)
        turn += 1
        if num_greater >= k:
            low = tl.min(next_up, axis=0)
        elif num_greater + num_equal < k:
            high = tl.max(next_down, axis=0)
            distance = distance * 4.0
        else:
            turn = MAX_TURNS
        ties = tl.where(pivot >= min_logit, (k - num_greater) * tl.exp(pivot - max_logit), 0.0)
        total = tl.sum(tile_mass, axis=0) + tl.where(k > num_greater, ties, 0.0)
    return total


@triton.jit
def _top(tile_maxima, tile, TILES: tl.constexpr, STEP: tl.constexpr):
    at = tile + tl.arange(0, STEP)
    return tl.max(tl.load(tile_maxima + at, mask=at < TILES, other=float("-inf")), axis=0)
