"""Decode attention: one query a sequence or a few, split along the context.

    program (KV head, split, sequence):  tables[row] ─▶ pages ─▶ keys ─▶ softmax ─▶ values
                                         the last split to finish merges them all

The query heads of a KV head share one tile, so that keys and values are read once; so do the tokens
of a row that has several. Each program reads its sequence's length on the device: one captured
launch serves every context. What is read of the cache is converted to the queries' type; the scales
of int8 multiply the scores and the softmax's weights, which are fewer.

`rope_decode_attention` begins one launch earlier, with what the QKV product has left: see
`new_token.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.kv_types import (
    operand_of,
    pair_to_operands,
    pair_unit,
    scale_at,
    to_operand,
)
from twostroke.kernels.cuda.launch import Launch, Variant
from twostroke.kernels.cuda.new_token import NewToken, queries_of_new
from twostroke.kernels.cuda.pdl import launch_options, wait_for_previous
from twostroke.kernels.cuda.scores import capped, sink_of, unit_of
from twostroke.kernels.cuda.sizes import power_of_two
from twostroke.kernels.cuda.splits import (
    MOST_SPLITS,
    PROGRAMS_PER_SM,
    DecodeScratch,
    merge,
    num_sms,
    query_at,
)
from twostroke.kernels.cuda.tiles import shared_bytes
from twostroke.kernels.reference import Attend

ONE_TILE_SPLITS = 32  # from here on a split of a short context is one tile


@dataclass(frozen=True, slots=True)
class Tuning:
    tile: int  # cached positions of one step of the loop
    num_warps: int
    num_stages: int
    least: int = 2  # tiles of a split, where the context has as many


def tiles_held(tile: int, head_bytes: int) -> int:
    """Of keys and values, in a multiprocessor's shared memory."""
    return shared_bytes() // (2 * tile * head_bytes)


def tuning(head_bytes: int, programs: int, splits: int, num_sms: int) -> Tuning:
    """Few programs have more tiles under way each; many share a multiprocessor, where one computes
    and the others load. Where a short context has a program for every tile, the smallest programs
    are the fastest, as they begin beside the product in front."""
    few = programs <= PROGRAMS_PER_SM * num_sms
    if head_bytes <= 256:
        if not few:
            return Tuning(64, 4, 2, 2)
        if splits >= ONE_TILE_SPLITS:
            return Tuning(64, 2, 2, 1)
        return Tuning(64, 2, min(4, tiles_held(64, head_bytes)), 2)
    if few:
        return Tuning(32, 4, 4 if head_bytes <= 512 else 3, 4)
    return Tuning(32, 4, 2, 4)


def tuning_8_bit(head_bytes: int, programs: int, splits: int, num_sms: int, queries: int) -> Tuning:
    """Of 8-bit heads of at most 128 channels, where conversions and what warps exchange take the
    time: many programs of two warps, or few that have more positions a step. Several queries leave
    no registers for that."""
    if queries > 1:
        return Tuning(64, 4, 3, 2)
    if programs <= PROGRAMS_PER_SM * num_sms and splits < ONE_TILE_SPLITS:
        return Tuning(128, 4, min(4, tiles_held(128, head_bytes)), 1)
    return Tuning(64, 2, 3, 2)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
    splits: int,
    scratch: DecodeScratch,
    *,
    out: torch.Tensor,
    queries: int = 1,
    pdl: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out`: [rows · queries, H, D] against the first `lengths` cache entries of table rows `rows`;
    zeros where the length is 0.

    A length counts the entries of all the row's queries: query j sees `length` − (queries − 1 − j),
    of these the last `window`. `scratch` is of as many tokens or more, of these splits or more.
    `sinks`: [H] in fp32, a score more in the softmax of each head.
    """
    where = (q, keys, values, sinks, tables, rows, lengths)
    make_launch(*where, scale, window, softcap, splits, scratch, out, queries, pdl)()
    return out


def bind_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
    splits: int,
    scratch: DecodeScratch,
    *,
    out: torch.Tensor,
    queries: int = 1,
    sinks: torch.Tensor | None = None,
) -> Attend:
    """`decode_attention` over the keys and values of any layer whose cache is like this one, and
    with its sinks."""
    where = (q, keys, values, sinks, tables, rows, lengths)
    return make_launch(*where, scale, window, softcap, splits, scratch, out, queries).over


def rope_decode_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
    splits: int,
    scratch: DecodeScratch,
    *,
    out: torch.Tensor,
    pdl: bool = False,
    sinks: torch.Tensor | None = None,
    query_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_store` and `decode_attention` of [B, (H + 2K) · D] in one launch: each token is the
    last of its row's `lengths` cache entries, in a block that is in no other table, and its slot
    says where; nothing is stored where that is < 0."""
    made = (qkv, q_norm, k_norm, eps, cos, sin, positions, slots, keys)
    q, new = new_token_of(*made, query_scales)
    where = (q, keys, values, sinks, tables, rows, lengths)
    make_launch(*where, scale, window, softcap, splits, scratch, out, 1, pdl, new)()
    return out


def new_token_of(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    query_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, NewToken]:
    """Where the QKV product has left the queries, and what makes them."""
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    heads = qkv.unflatten(1, (-1, keys.shape[-1]))
    q = heads[:, : heads.shape[1] - 2 * keys.shape[2]]
    return q, NewToken(q_norm, k_norm, cos, sin, query_scales, positions, slots, eps)


def make_launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
    splits: int,
    scratch: DecodeScratch,
    out: torch.Tensor,
    queries: int = 1,
    pdl: bool = False,
    new: NewToken | None = None,
    tuned: Tuning | None = None,
) -> Launch:
    """`new`: the queries are not made yet, see `new_token_of`."""
    (tokens, num_heads, dim), (_, page, num_kv_heads, _) = q.shape, keys.shape
    q_strides, out_strides, strides = q.stride(), out.stride(), keys.stride()
    batch = rows.shape[0]
    assert tokens == batch * queries
    assert strides == values.stride()
    assert strides[3] == q_strides[2] == out_strides[2] == tables.stride(1) == 1
    assert splits <= MOST_SPLITS
    if tuned is None:
        head_bytes, programs = dim * max(q.itemsize, keys.itemsize), batch * num_kv_heads * splits
        if keys.itemsize == 1 and head_bytes <= 256:
            tuned = tuning_8_bit(dim, programs, splits, num_sms(q.device), queries)
        else:
            tuned = tuning(head_bytes, programs, splits, num_sms(q.device))
    *made, eps = new or (None, None, None, None, None, None, None, 0.0)
    variant = _variant(
        num_heads // num_kv_heads,
        queries,
        dim,
        page,
        0 if new is None else new.cos.shape[-1],
        tuned,
        splits > 1,
        window is not None,
        softcap > 0,
        sinks is not None,
        new is not None,
        new is not None and new.q_norm is not None,
        new is not None and new.query_scales is not None,
        pdl,
    )
    return Launch(
        variant,
        (num_kv_heads, splits, batch),
        (q, keys, values, sinks, tables, rows, lengths, out, *scratch, *made),
        (window or 0, splits),
        (
            eps,
            float(scale),
            float(softcap),
            *q_strides[:2],
            *out_strides[:2],
            tables.stride(0),
            *strides[:3],
        ),
    )


@cache
def _variant(
    group: int,
    queries: int,
    dim: int,
    page: int,
    half: int,
    tuned: Tuning,
    split: bool,
    has_window: bool,
    has_softcap: bool,
    has_sinks: bool,
    is_new: bool,
    normed: bool,
    scaled: bool,
    pdl: bool,
) -> Variant:
    members = group * queries
    block_m = max(16, power_of_two(members + 1 if is_new else members))
    block_members, block_dim = power_of_two(members), max(16, power_of_two(dim))
    # So that a thread's registers hold its part of the result, and what is merged at one time.
    num_warps, merged = tuned.num_warps, 128
    if queries > 1:
        num_warps, merged = max(num_warps, min(16, block_m * block_dim // 1024)), 32
    together = num_warps * 32 * merged // (block_members * block_dim)
    return Variant(
        _decode,
        GROUP=group,
        QUERIES=queries,
        BLOCK_M=block_m,
        DIM=dim,
        BLOCK_DIM=block_dim,
        HALF=half,
        PAGE=page,
        TILE=tuned.tile,
        LEAST=tuned.least,
        MOST_SPLITS=MOST_SPLITS,
        MERGE=max(1, min(16, together)),
        BLOCK_MEMBERS=block_members,
        SPLIT=split,
        WINDOW=has_window,
        SOFTCAP=has_softcap,
        SINKS=has_sinks,
        NEW=is_new,
        NORM=normed,
        SCALED=scaled,
        num_warps=num_warps,
        num_stages=tuned.num_stages,
        **launch_options(pdl),
    )


@triton.jit(
    do_not_specialize=["splits", "window"],
    do_not_specialize_on_alignment=["sinks", "rows", "lengths", "arrived", "positions", "slots"],
)
def _decode(
    q,
    keys,
    values,
    sinks,
    tables,
    rows,
    lengths,
    out,
    partial,
    weight,
    arrived,
    q_norm,
    k_norm,
    cos,
    sin,
    query_scales,
    positions,
    slots,
    window,
    splits,
    eps,
    scale,
    softcap,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    MEMBERS: tl.constexpr = GROUP * QUERIES  # of the tile; see `query_at`
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first = 0
    if WINDOW:
        first = tl.maximum(length - (QUERIES - 1) - window, 0)

    # Tiles [first_tile, last_tile) of the context, an equal share to each split.
    first_tile = first // TILE
    last_tile = tl.cdiv(length, TILE)
    share = tl.maximum(tl.cdiv(last_tile - first_tile, splits), LEAST)
    active = tl.cdiv(last_tile - first_tile, share)  # splits that have any
    begin = first_tile + split * share
    end = tl.minimum(begin + share, last_tile)

    member = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_DIM)
    real = (member < MEMBERS)[:, None] & (channel < DIM)[None, :]
    out_at = query_at(sequence, kv_head, member, out_stride, out_head_stride, GROUP, QUERIES)
    out_at = out + out_at[:, None] + channel[None, :]
    if split == 0 and length == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_DIM], out.dtype.element_ty), mask=real)
    if begin < end:
        # A tile's pages are asked for a tile ahead: the compiler then has all its stages for keys
        # and values.
        position = begin * TILE + tl.arange(0, TILE)
        page = tl.load(table + position // PAGE, mask=position < length, other=0)
        if NEW:
            query_tile = queries_of_new(
                q + sequence * q_stride,
                kv_head,
                tl.num_programs(0),
                tl.load(positions + sequence).to(tl.int64),
                tl.load(slots + sequence).to(tl.int64),
                end == last_tile,
                q_norm,
                k_norm,
                cos,
                sin,
                query_scales,
                eps,
                keys,
                values,
                block_stride,
                slot_stride,
                head_stride,
                GROUP,
                BLOCK_M,
                DIM,
                BLOCK_DIM,
                HALF,
                PAGE,
                NORM,
                SCALED,
            )
        else:
            q_at = query_at(sequence, kv_head, member, q_stride, q_head_stride, GROUP, QUERIES)
            query_tile = tl.load(q + q_at[:, None] + channel[None, :], mask=real, other=0.0)
        asm: tl.constexpr = query_tile.dtype == tl.bfloat16
        query_tile = operand_of(query_tile, keys)
        kind: tl.constexpr = keys.dtype.element_ty
        scaled: tl.constexpr = kind == tl.int8
        # Values of 8-bit types are read two channels at a time: so small, the hardware could not
        # turn them for the product over positions.
        narrow: tl.constexpr = kind.primitive_bitwidth == 8 and query_tile.dtype == tl.float16
        paired: tl.constexpr = narrow and DIM % 2 == 0 and BLOCK_DIM >= 32
        num_kv_heads = tl.num_programs(0)
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if paired:
            pair = tl.arange(0, BLOCK_DIM // 2)
            value_pairs = values.to(tl.pointer_type(tl.int16))
            sums = tl.zeros([BLOCK_M, BLOCK_DIM // 2], tl.float32)
            odd_sums = tl.zeros([BLOCK_M, BLOCK_DIM // 2], tl.float32)
        else:
            sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        if SINKS:  # counted once: by the first split, which always has keys
            head = kv_head * GROUP + member % GROUP
            best, total = sink_of(sinks + head, (member < MEMBERS) & (split == 0))
        unit = unit_of(scale, SOFTCAP)
        for tile in tl.range(begin, end):
            position = tile * TILE + tl.arange(0, TILE)
            inside = position < length
            if WINDOW:
                inside = inside & (position >= first)
            visible = inside[None, :]
            if QUERIES > 1:
                seen = length - (QUERIES - 1) + member // GROUP
                visible = visible & (position[None, :] < seen[:, None])
                if WINDOW:
                    visible = visible & (position[None, :] >= seen[:, None] - window)
            if scaled:
                block, slot = page.to(tl.int64) * block_stride, position % PAGE
                scale_of = scale_at(keys + block, kv_head, slot, num_kv_heads, DIM, PAGE)
                key_scale = tl.load(scale_of, mask=inside, other=0.0)
                scale_of = scale_at(values + block, kv_head, slot, num_kv_heads, DIM, PAGE)
                value_scale = tl.load(scale_of, mask=inside, other=0.0)
            at = (position % PAGE) * slot_stride + kv_head * head_stride
            if paired:
                pair_at = ((page.to(tl.int64) * block_stride + at) // 2)[:, None] + pair[None, :]
            at = (page.to(tl.int64) * block_stride + at)[:, None] + channel[None, :]
            position += TILE
            page = tl.load(table + position // PAGE, mask=position < length, other=0)
            mask = inside[:, None] & (channel < DIM)[None, :]
            if paired:
                key = tl.load(keys + at, mask=mask, other=0.0)
                key = to_operand(key, query_tile.dtype, asm)
                mask = inside[:, None] & (pair < DIM // 2)[None, :]
                pairs = tl.load(value_pairs + pair_at, mask=mask, other=0)
                value, odd_value = pair_to_operands(pairs, kind, asm)
            else:
                key = tl.load(keys + at, mask=mask, other=0.0).to(query_tile.dtype)
                value = tl.load(values + at, mask=mask, other=0.0).to(query_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key), input_precision="tf32x3")
            if scaled:
                score = score * key_scale[None, :]
            score = capped(score, scale, softcap, SOFTCAP)
            score = tl.where(visible, score, float("-inf"))
            # Each tile has a position that a single query sees: `above` is finite. Of several
            # queries one may see nothing of the first tiles or of the last.
            above = tl.maximum(best, tl.max(score, axis=1) * unit)
            floor = above
            if QUERIES > 1:
                floor = tl.where(above == float("-inf"), 0.0, above)
            share_of = tl.exp2(score * unit - floor[:, None])
            fade = tl.exp2(best - floor)
            total = total * fade + tl.sum(share_of, axis=1)
            sums = sums * fade[:, None]
            if scaled:  # by the largest value, almost: what fp16 has, where the model does
                share_of = share_of * (value_scale * 128.0)[None, :]
            if paired:
                share_of = share_of.to(value.dtype)
                odd_sums = tl.dot(share_of, odd_value, odd_sums * fade[:, None])
            sums = tl.dot(share_of.to(value.dtype), value, sums, input_precision="tf32x3")
            best = above
        if paired:
            sums = tl.reshape(tl.join(sums, odd_sums), [BLOCK_M, BLOCK_DIM])
            sums = sums * pair_unit(kind, asm)
        if scaled:
            sums = sums * 0.0078125
        if QUERIES > 1:
            sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        else:
            sums = sums / total[:, None]
        if SPLIT:
            lines = sequence.to(tl.int64) * tl.num_programs(0) + kv_head
            into = (lines * MEMBERS + member) * splits + split
            tl.store(partial + into[:, None] * DIM + channel[None, :], sums, mask=real)
            tl.store(weight + into, best + tl.log2(total), mask=member < MEMBERS)
            # All threads' stores before the count that publishes them.
            tl.debug_barrier()
            if tl.atomic_add(arrived + lines, 1, sem="acq_rel") == active - 1:
                tl.store(arrived + lines, 0)
                block = tl.arange(0, BLOCK_MEMBERS)
                to = query_at(sequence, kv_head, block, out_stride, out_head_stride, GROUP, QUERIES)
                merge(
                    partial,
                    weight,
                    lines * MEMBERS * splits,
                    splits,
                    active,
                    out + to,
                    MEMBERS,
                    BLOCK_MEMBERS,
                    DIM,
                    BLOCK_DIM,
                    MOST_SPLITS,
                    MERGE,
                )
        else:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)
