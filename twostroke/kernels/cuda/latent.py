"""Latent attention (MLA) for decode rows, with the norm, rope and KV store before it.

    kv_a's row ─┬─ latent   ─▶ norm ─▶ kv, keys[slot]          one launch: `latent_rope_store`
                └─ rope key ─▶ rope ─▶ kv, keys[slot]
    q ─ the channels with rope ─▶ rope ─▶ q

    program (tile of heads, split, sequence):   tables[row] ─▶ pages ─▶ latents, rope keys
                                                ─▶ softmax ─▶ the same latents, as values
    program (channels, head, token):            the splits' results ─▶ one

All heads share the cached vectors, so a query tile has many heads, and a tile of the cache in
shared memory serves as keys and as values. With few heads the time is bound by the bytes of the
cache; with 128 heads by the products: 2 · (2R + rope) operations a head for R + rope elements. The
result of a split is large (fp32, R channels a head), so a separate launch merges the splits, with
enough programs to read them. All launches read lengths on the device, so one captured launch serves
every context length. Cache elements are converted to the queries' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import times_weight
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.scores import capped, unit_of
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.splits import num_sms, query_at
from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    KVView,
    Rope,
    StepContext,
)

MAX_SPLITS = 128
SETUP_TILES = 2  # fixed cost of a program (start, writing results), in the time of tiles
HEADS = 8  # queries of one program of `latent_rope_store`


# ── norm, rope and store ────────────────────────────────────────────────────────────────────


def latent_rope_store(
    q: torch.Tensor,
    projected: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    kv: KVView,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor,
) -> None:
    """Rotate the last channels of q, [T, H, D], in place. Normalise the first R channels of
    `projected`, [T, R + rope], and rotate its other channels. Write the result to `out`, which may
    be `projected`, and to the cache slots that are ≥ 0."""
    (tokens, num_heads, dim), keys, norm = q.shape, kv.keys, rope.k_norm
    assert norm is not None
    assert q.stride(2) == projected.stride(1) == out.stride(1) == keys.stride(3) == 1
    assert rope.cos.stride() == rope.sin.stride()
    _store_variant(num_heads, dim, len(norm), rope.cos.shape[1], keys.shape[1])(
        (tokens, 1 + ceil_div(num_heads, HEADS)),
        (q, projected, norm, rope.cos, rope.sin, positions, kv.slots, out, keys),
        (),
        (
            rope.norm_eps,
            *q.stride()[:2],
            projected.stride(0),
            out.stride(0),
            rope.cos.stride(0),
            *keys.stride()[:2],
        ),
        context,
    )


@cache
def _store_variant(num_heads: int, dim: int, rank: int, half: int, page: int) -> Variant:
    return Variant(
        _latent_rope_store,
        NUM_HEADS=num_heads,
        NOPE=dim - 2 * half,
        RANK=rank,
        BLOCK_RANK=power_of_two(rank),
        HALF=half,
        PAIRS=power_of_two(half),
        PAGE=page,
        HEADS=HEADS,
        num_warps=2,
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _latent_rope_store(
    q,
    projected,
    kv_norm,
    cos,
    sin,
    positions,
    slots,
    kv,
    keys,
    eps,
    q_stride,
    q_head_stride,
    projected_stride,
    kv_stride,
    angle_stride,
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angle = tl.load(positions + token).to(tl.int64) * angle_stride
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < HALF
    cosine = tl.load(cos + angle + pair, mask=inside, other=0.0)
    sine = tl.load(sin + angle + pair, mask=inside, other=0.0)
    if part == 0:
        from_ = projected + token * projected_stride
        to = kv + token * kv_stride
        slot = tl.load(slots + token).to(tl.int64)
        stored = slot >= 0
        cached = keys + (slot // PAGE) * block_stride + (slot % PAGE) * slot_stride
        cache_dtype = keys.dtype.element_ty
        channel = tl.arange(0, BLOCK_RANK)
        is_channel = channel < RANK
        x = tl.load(from_ + channel, mask=is_channel, other=0.0).to(tl.float32)
        scale = tl.load(kv_norm + channel, mask=is_channel, other=0.0)
        key_first, key_second = _rotated(from_ + RANK + pair, inside, cosine, sine, HALF)
        inverse = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
        latent = times_weight(x * inverse, scale, kv.dtype.element_ty)
        tl.store(to + channel, latent, mask=is_channel)
        tl.store(cached + channel, latent.to(cache_dtype), mask=is_channel & stored)
        tl.store(to + RANK + pair, key_first, mask=inside)
        tl.store(to + RANK + HALF + pair, key_second, mask=inside)
        tl.store(cached + RANK + pair, key_first.to(cache_dtype), mask=inside & stored)
        tl.store(cached + RANK + HALF + pair, key_second.to(cache_dtype), mask=inside & stored)
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = inside & (head < NUM_HEADS)
        at = q + token * q_stride + head * q_head_stride + NOPE + pair
        first, second = _rotated(at, mask, cosine, sine, HALF)
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)


@triton.jit
def _rotated(at, mask, cosine, sine, HALF: tl.constexpr):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = at.dtype.element_ty
    back = second * cosine + first * sine
    return (first * cosine - second * sine).to(dtype), back.to(dtype)


# ── decode ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LatentDecodeTuning:
    members: int  # of a query tile; a member is one head of one token, see `query_at`
    tile: int  # cached positions of one iteration
    # Positions are the rows of both products, and members the columns. Hopper's tensor cores need
    # at least 64 rows, but few columns.
    positions_first: bool
    num_warps: int
    num_stages: int
    per_sm: int  # programs that fit on a multiprocessor


def tuning(members: int, width: int, itemsize: int) -> LatentDecodeTuning:
    """Choose the tuning for `width` cached channels. `itemsize`: the maximum of the item sizes of
    queries and cache."""
    if itemsize == 4:
        return LatentDecodeTuning(16, 16, False, 8, 2, 1)
    if members <= 16:
        return LatentDecodeTuning(16, 64, True, 4, 2, 1)
    if members <= 32:
        return LatentDecodeTuning(32, 64, True, 8, 2, 1)
    return LatentDecodeTuning(64, 64, False, 8, 2, 1)


@lru_cache(maxsize=4096)
def latent_decode_splits(batch: int, members: int, width: int, max_len: int, num_sms: int) -> int:
    """Return the number of splits of each of `batch` contexts that gives the shortest time if every
    context has `max_len` entries. `members`: heads times the tokens of a row."""
    tuned = tuning(members, width, 2)
    programs, places = batch * ceil_div(members, tuned.members), tuned.per_sm * num_sms
    tiles = ceil_div(max_len, tuned.tile)

    def rounds(splits: int) -> int:
        return ceil_div(programs * splits, places) * (ceil_div(tiles, splits) + SETUP_TILES)

    return min(range(1, max(1, min(MAX_SPLITS, tiles)) + 1), key=rounds)


def latent_decode_attention(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: DecodeWork,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor,
    tuned: LatentDecodeTuning | None = None,
) -> torch.Tensor:
    """Write the attention of the decode rows to `out`, [rows · queries, H, R]; zeros for a row of
    length 0. `q`: queries in the space of the latents, [.., H, R]. `q_rope`: the rotated channels
    of the queries, [.., H, rope]. The cache is [blocks, block_size, 1, R + rope]. `work` is the
    same as for `decode_attention`."""
    keys, queries, splits, scratch = kv.keys, work.queries, work.splits, work.scratch
    (tokens, num_heads, rank), rope, page = q.shape, q_rope.shape[2], keys.shape[1]
    batch, members = work.rows.shape[0], num_heads * queries
    assert tokens == batch * queries
    assert q.stride(2) == q_rope.stride(2) == out.stride(2) == keys.stride(3) == 1
    assert kv.tables.stride(1) == 1
    assert splits <= MAX_SPLITS
    tuned = tuned or tuning(members, rank + rope, max(q.itemsize, keys.itemsize))
    sizes, has_window = _LatentSizes(num_heads, queries, rank), rule.window is not None
    varying = (rule.window or 0, splits)
    features = (splits > 1, has_window, rule.softcap > 0)
    where = (q, q_rope, keys, kv.tables, work.rows, work.lengths, out)
    _decode_variant(sizes, rope, page, tuned, *features)(
        (ceil_div(members, tuned.members), splits, batch),
        (*where, scratch.partial, scratch.lse),
        varying,
        (
            float(rule.scale),
            float(rule.softcap),
            *q.stride()[:2],
            *q_rope.stride()[:2],
            *out.stride()[:2],
            kv.tables.stride(0),
            *keys.stride()[:2],
        ),
        context,
    )
    if splits > 1:
        channels = 128 if tokens * num_heads <= 2 * num_sms(q.device) else 512
        _merge_variant(sizes, channels, tuned.tile, has_window)(
            (ceil_div(rank, channels), num_heads, tokens),
            (scratch.partial, scratch.lse, work.lengths, out),
            varying,
            out.stride()[:2],
            context,
        )
    return out


class _LatentSizes(NamedTuple):
    num_heads: int
    queries: int
    rank: int


@cache
def _decode_variant(
    sizes: _LatentSizes,
    rope: int,
    page: int,
    tuned: LatentDecodeTuning,
    split: bool,
    has_window: bool,
    has_softcap: bool,
) -> Variant:
    return Variant(
        _latent_decode,
        NUM_HEADS=sizes.num_heads,
        QUERIES=sizes.queries,
        RANK=sizes.rank,
        BLOCK_RANK=max(16, power_of_two(sizes.rank)),
        ROPE=rope,
        BLOCK_ROPE=max(16, power_of_two(rope)),
        PAGE=page,
        BLOCK_M=tuned.members,
        TILE=tuned.tile,
        POSITIONS_FIRST=tuned.positions_first,
        SPLIT=split,
        WINDOW=has_window,
        SOFTCAP=has_softcap,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )


@cache
def _merge_variant(sizes: _LatentSizes, block: int, tile: int, has_window: bool) -> Variant:
    return Variant(
        _merge,
        NUM_HEADS=sizes.num_heads,
        QUERIES=sizes.queries,
        RANK=sizes.rank,
        BLOCK=min(block, power_of_two(sizes.rank)),
        TILE=tile,
        MAX_SPLITS=MAX_SPLITS,
        TOGETHER=4096 // block,
        WINDOW=has_window,
        num_warps=4,
    )


@triton.jit
def _tiles(length, window, splits, QUERIES: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first visible position of a context, the tile of this position, the number of
    visible tiles, and the number of tiles of each split."""
    first = 0
    if WINDOW:
        first = tl.maximum(length - (QUERIES - 1) - window, 0)
    first_tile = first // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    return first, first_tile, tiles, tl.maximum(tl.cdiv(tiles, splits), 1)


@triton.jit(
    do_not_specialize=["splits", "window"],
    do_not_specialize_on_alignment=["rows", "lengths"],
)
def _latent_decode(
    q,
    q_rope,
    keys,
    tables,
    rows,
    lengths,
    out,
    partial,
    lse,
    window,
    splits,
    scale,
    softcap,
    q_stride,
    q_head_stride,
    rope_stride,
    rope_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    block_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    MEMBERS: tl.constexpr = NUM_HEADS * QUERIES  # see `query_at`
    # Scores and sums are [positions, members] and [channels, members], or the other way round.
    AXIS: tl.constexpr = 0 if POSITIONS_FIRST else 1
    split, sequence = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first, first_tile, tiles, share = _tiles(length, window, splits, QUERIES, TILE, WINDOW)
    begin = first_tile + split * share
    end = first_tile + tl.minimum((split + 1) * share, tiles)

    member = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_RANK)
    rope = tl.arange(0, BLOCK_ROPE)
    is_member = (member < MEMBERS)[:, None]
    line = sequence.to(tl.int64)
    out_at = query_at(line, 0, member, out_stride, out_head_stride, NUM_HEADS, QUERIES)
    out_at = out + out_at[:, None] + channel[None, :]
    is_out = is_member & (channel < RANK)[None, :]
    if not SPLIT and length == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_RANK], out.dtype.element_ty), mask=is_out)
    if begin < end:
        # The page numbers of a tile are loaded one tile ahead, so that the compiler uses all
        # pipeline stages for the cached vectors.
        position = begin * TILE + tl.arange(0, TILE)
        page = tl.load(table + position // PAGE, mask=position < length, other=0)
        q_at = query_at(line, 0, member, q_stride, q_head_stride, NUM_HEADS, QUERIES)
        query = tl.load(q + q_at[:, None] + channel[None, :], mask=is_out, other=0.0)
        q_at = query_at(line, 0, member, rope_stride, rope_head_stride, NUM_HEADS, QUERIES)
        is_rope = is_member & (rope < ROPE)[None, :]
        query_rope = tl.load(q_rope + q_at[:, None] + rope[None, :], mask=is_rope, other=0.0)
        max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if POSITIONS_FIRST:
            sums = tl.zeros([BLOCK_RANK, BLOCK_M], tl.float32)
        else:
            sums = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
        unit = unit_of(scale, SOFTCAP)
        seen = length - (QUERIES - 1) + member // NUM_HEADS
        for tile in tl.range(begin, end):
            position = tile * TILE + tl.arange(0, TILE)
            inside = position < length
            if WINDOW:
                inside = inside & (position >= first)
            visible = tl.expand_dims(inside, 1 - AXIS)
            if QUERIES > 1:
                at, until = tl.expand_dims(position, 1 - AXIS), tl.expand_dims(seen, AXIS)
                visible = visible & (at < until)
                if WINDOW:
                    visible = visible & (at >= until - window)
            at = page.to(tl.int64) * block_stride + (position % PAGE) * slot_stride
            position += TILE
            page = tl.load(table + position // PAGE, mask=position < length, other=0)
            at = keys + at[:, None]
            mask, rope_mask = inside[:, None], inside[:, None]
            if RANK != BLOCK_RANK:
                mask = mask & (channel < RANK)[None, :]
            if ROPE != BLOCK_ROPE:
                rope_mask = rope_mask & (rope < ROPE)[None, :]
            latent = tl.load(at + channel[None, :], mask=mask, other=0.0).to(query.dtype)
            key = tl.load(at + RANK + rope[None, :], mask=rope_mask, other=0.0).to(query.dtype)
            if POSITIONS_FIRST:
                score = tl.dot(latent, tl.trans(query), input_precision="tf32x3")
                score = tl.dot(key, tl.trans(query_rope), score, input_precision="tf32x3")
            else:
                score = tl.dot(query, tl.trans(latent), input_precision="tf32x3")
                score = tl.dot(query_rope, tl.trans(key), score, input_precision="tf32x3")
            score = capped(score, scale, softcap, SOFTCAP)
            score = tl.where(visible, score, float("-inf"))
            # A single query sees a position of each tile, so `new_max` is finite. One of several
            # queries may see no position of the first or the last tiles.
            new_max = tl.maximum(max_score, tl.max(score, axis=AXIS) * unit)
            finite_max = new_max
            if QUERIES > 1:
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(score * unit - tl.expand_dims(finite_max, AXIS))
            rescale = tl.exp2(max_score - finite_max)
            total = total * rescale + tl.sum(weights, axis=AXIS)
            sums = sums * tl.expand_dims(rescale, AXIS)
            weights = weights.to(query.dtype)
            if POSITIONS_FIRST:
                sums = tl.dot(tl.trans(latent), weights, sums, input_precision="tf32x3")
            else:
                sums = tl.dot(weights, latent, sums, input_precision="tf32x3")
            max_score = new_max
        divisor = total
        if QUERIES > 1:
            divisor = tl.where(total == 0.0, 1.0, total)
        sums = sums / tl.expand_dims(divisor, AXIS)
        if POSITIONS_FIRST:
            sums = tl.trans(sums)
        if SPLIT:
            # The members of a row are stored in the order of `out`.
            into = (line * MEMBERS + member) * splits + split
            tl.store(partial + into[:, None] * RANK + channel[None, :], sums, mask=is_out)
            tl.store(lse + into, max_score + tl.log2(total), mask=member < MEMBERS)
        else:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["splits", "window"], do_not_specialize_on_alignment=["lengths"])
def _merge(
    partial,
    lse,
    lengths,
    out,
    window,
    splits,
    out_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the results of the splits. The weight of a split is its part of the softmax
    denominator of the whole context."""
    wait_for_previous(DEPENDENT)
    head, token = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + token // QUERIES).to(tl.int32)
    _, _, tiles, share = _tiles(length, window, splits, QUERIES, TILE, WINDOW)
    active = tl.cdiv(tiles, share)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = (token * NUM_HEADS + head) * splits
    all_splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(lse + line + all_splits, mask=all_splits < active, other=float("-inf"))
    max_lse = tl.max(all_lse, axis=0)
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)  # for a row of length 0
    total = tl.sum(tl.exp2(all_lse - max_lse), axis=0)
    sums = tl.zeros([TOGETHER, BLOCK], tl.float32)
    for start in range(0, active, TOGETHER):
        split = start + tl.arange(0, TOGETHER)
        is_active = split < active
        some_lse = tl.load(lse + line + split, mask=is_active, other=float("-inf"))
        mask = is_active[:, None] & (channel < RANK)[None, :]
        at = partial + (line + split)[:, None] * RANK + channel[None, :]
        sums += tl.load(at, mask=mask, other=0.0) * tl.exp2(some_lse - max_lse)[:, None]
    result = tl.sum(sums, axis=0) / tl.where(total == 0.0, 1.0, total)
    to = out + token * out_stride + head * out_head_stride + channel
    tl.store(to, result.to(out.dtype.element_ty), mask=channel < RANK)
