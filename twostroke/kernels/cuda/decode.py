"""Decode attention: one query a sequence or a few, split along the context.

    program (KV head, split, sequence):  tables[row] ─▶ pages ─▶ keys ─▶ softmax ─▶ values
                                         the last split to finish merges them all

The query heads of a KV head share one tile, so that keys and values are read once; so do the tokens
of a row that has several. Each program reads its sequence's length on the device: one captured
launch serves every context. Cached elements are converted to the queries' type; the scales of int8
multiply the scores and the softmax's weights, which are fewer.

`rope_decode_attention` begins one launch earlier, with the output of the QKV product: see
`new_token.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.kv_dtypes import (
    operand_of,
    pair_to_operands,
    pair_unit,
    scale_at,
    to_operand,
)
from twostroke.kernels.cuda.launch import Launch, Variant
from twostroke.kernels.cuda.new_token import NewToken, queries_of_new
from twostroke.kernels.cuda.scores import capped, sink_of, unit_of
from twostroke.kernels.cuda.sizes import power_of_two
from twostroke.kernels.cuda.splits import (
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    merge,
    num_sms,
    query_at,
)
from twostroke.kernels.cuda.tiles import shared_bytes
from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    KVView,
    Rope,
    StepContext,
)
from twostroke.kernels.reference import Attend

ONE_TILE_SPLITS = 32  # from here on a split of a short context is one tile


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    tile: int  # cached positions of one step of the loop
    num_warps: int
    num_stages: int
    min_tiles: int = 2  # tiles of a split, where the context has as many


def tiles_held(tile: int, head_bytes: int) -> int:
    """Return the number of tiles of keys and values that a multiprocessor's shared memory holds."""
    return shared_bytes() // (2 * tile * head_bytes)


def tuning(head_bytes: int, programs: int, splits: int, num_sms: int) -> DecodeTuning:
    """Choose the tuning of 16-bit and 32-bit caches. Few programs have more tiles in flight each;
    many programs share a multiprocessor, where one computes while another loads. Where a short
    context has a program for every tile, the smallest programs are the fastest, since they begin
    while the previous product still runs."""
    few = programs <= PROGRAMS_PER_SM * num_sms
    if head_bytes <= 256:
        if not few:
            return DecodeTuning(64, 4, 2, 2)
        if splits >= ONE_TILE_SPLITS:
            return DecodeTuning(64, 2, 2, 1)
        return DecodeTuning(64, 2, min(4, tiles_held(64, head_bytes)), 2)
    if few:
        return DecodeTuning(32, 4, 4 if head_bytes <= 512 else 3, 4)
    return DecodeTuning(32, 4, 2, 4)


def tuning_8_bit(
    head_bytes: int, programs: int, splits: int, num_sms: int, queries: int
) -> DecodeTuning:
    """Choose the tuning of 8-bit heads of at most 128 channels. Conversions and exchanges between
    warps take the time here: many programs of two warps, or few programs with more positions a
    step. Several queries leave no registers for more."""
    if queries > 1:
        return DecodeTuning(64, 4, 3, 2)
    if programs <= PROGRAMS_PER_SM * num_sms and splits < ONE_TILE_SPLITS:
        return DecodeTuning(128, 4, min(4, tiles_held(128, head_bytes)), 1)
    return DecodeTuning(64, 2, 3, 2)


def decode_attention(
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: DecodeWork,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of the decode rows to `out`, [rows · queries, H, D]; zeros where the length is 0.

    A length counts the entries of all the row's queries: query j sees `length` − (queries − 1 − j),
    of these the last `window`. The scratch is for as many tokens or more, and as many splits or
    more.
    """
    make_launch(q, kv, rule, work, out, context)()
    return out


def bind_decode_attention(
    q: torch.Tensor, kv: KVView, rule: AttentionRule, work: DecodeWork, *, out: torch.Tensor
) -> Attend:
    """Prepare `decode_attention` for any layer whose cache and rule are like those given here."""
    return make_launch(q, kv, rule, work, out).over


def rope_decode_attention(
    qkv: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: DecodeWork,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """`rope_store` and `decode_attention` of [B, (H + 2K) · D] in one launch. Each token is the
    last of its row's `lengths` cache entries, in a block that is in no other table. It is stored in
    its slot, or nowhere if the slot is < 0."""
    q, new = heads_of_new(qkv, kv), NewToken(rope, positions)
    make_launch(q, kv, rule, work, out, context, new)()
    return out


def heads_of_new(qkv: torch.Tensor, kv: KVView) -> torch.Tensor:
    """Return the query heads that the QKV product has left, [B, H, D], not normed or rotated."""
    heads = qkv.unflatten(1, (-1, kv.keys.shape[-1]))
    return heads[:, : heads.shape[1] - 2 * kv.keys.shape[2]]


def make_launch(
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: DecodeWork,
    out: torch.Tensor,
    context: StepContext = DEFAULT_CONTEXT,
    new: NewToken | None = None,
    tuned: DecodeTuning | None = None,
) -> Launch:
    """Build the launch. `new`: the queries are still to be made from the heads in `q`."""
    keys, queries, splits = kv.keys, work.queries, work.splits
    (tokens, num_heads, dim), (_, page, num_kv_heads, _) = q.shape, keys.shape
    q_strides, out_strides, strides = q.stride(), out.stride(), keys.stride()
    batch = work.rows.shape[0]
    assert tokens == batch * queries
    assert strides == kv.values.stride()
    assert strides[3] == q_strides[2] == out_strides[2] == kv.tables.stride(1) == 1
    assert splits <= MAX_SPLITS
    if tuned is None:
        head_bytes, programs = dim * max(q.itemsize, keys.itemsize), batch * num_kv_heads * splits
        if keys.itemsize == 1 and head_bytes <= 256:
            tuned = tuning_8_bit(dim, programs, splits, num_sms(q.device), queries)
        else:
            tuned = tuning(head_bytes, programs, splits, num_sms(q.device))
    variant = _variant(
        _DecodeShape(
            group=num_heads // num_kv_heads,
            queries=queries,
            dim=dim,
            page=page,
            split=splits > 1,
            window=rule.window is not None,
            softcap=rule.softcap > 0,
            sinks=rule.sinks is not None,
        ),
        NOT_NEW if new is None else _new_shape(new.rope),
        tuned,
    )
    made, eps = (NO_TENSORS, 0.0) if new is None else (_new_tensors(new, kv), new.rope.norm_eps)
    where = (q, keys, kv.values, rule.sinks, kv.tables, work.rows, work.lengths, out)
    return Launch(
        variant.for_context(context),
        (num_kv_heads, splits, batch),
        (*where, *work.scratch, *made),
        (rule.window or 0, splits),
        (
            eps,
            float(rule.scale),
            float(rule.softcap),
            *q_strides[:2],
            *out_strides[:2],
            kv.tables.stride(0),
            *strides[:3],
        ),
    )


class _DecodeShape(NamedTuple):
    """The sizes and features that the kernel is compiled for, besides its tuning."""

    group: int  # query heads of a KV head
    queries: int
    dim: int
    page: int
    split: bool
    window: bool
    softcap: bool
    sinks: bool


class _NewShape(NamedTuple):
    """The sizes and features of the part that makes the queries, where they are still to be
    made."""

    is_new: bool
    half: int  # channel pairs that rotate
    normed: bool
    scaled: bool


NOT_NEW = _NewShape(False, 0, False, False)
NO_TENSORS = (None,) * 7  # in place of `_new_tensors`


def _new_shape(rope: Rope) -> _NewShape:
    return _NewShape(
        True, rope.cos.shape[-1], rope.q_norm is not None, rope.query_scales is not None
    )


def _new_tensors(new: NewToken, kv: KVView) -> tuple[torch.Tensor | None, ...]:
    rope = new.rope
    assert rope.cos.is_contiguous()
    assert rope.sin.is_contiguous()
    tables = (rope.q_norm, rope.k_norm, rope.cos, rope.sin, rope.query_scales)
    return (*tables, new.positions, kv.slots)


@cache
def _variant(shape: _DecodeShape, new: _NewShape, tuned: DecodeTuning) -> Variant:
    members = shape.group * shape.queries
    block_m = max(16, power_of_two(members + 1 if new.is_new else members))
    block_members, block_dim = power_of_two(members), max(16, power_of_two(shape.dim))
    # So that a thread's registers hold its part of the result, and what is merged at one time.
    num_warps, merged = tuned.num_warps, 128
    if shape.queries > 1:
        num_warps, merged = max(num_warps, min(16, block_m * block_dim // 1024)), 32
    together = num_warps * 32 * merged // (block_members * block_dim)
    return Variant(
        _decode,
        GROUP=shape.group,
        QUERIES=shape.queries,
        BLOCK_M=block_m,
        DIM=shape.dim,
        BLOCK_DIM=block_dim,
        HALF=new.half,
        PAGE=shape.page,
        TILE=tuned.tile,
        MIN_TILES=tuned.min_tiles,
        MAX_SPLITS=MAX_SPLITS,
        MERGE=max(1, min(16, together)),
        BLOCK_MEMBERS=block_members,
        SPLIT=shape.split,
        WINDOW=shape.window,
        SOFTCAP=shape.softcap,
        SINKS=shape.sinks,
        NEW=new.is_new,
        NORM=new.normed,
        SCALED=new.scaled,
        num_warps=num_warps,
        num_stages=tuned.num_stages,
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
    lse,
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
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
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
    share = tl.maximum(tl.cdiv(last_tile - first_tile, splits), MIN_TILES)
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
            tl.store(lse + into, best + tl.log2(total), mask=member < MEMBERS)
            # All threads' stores before the count that publishes them.
            tl.debug_barrier()
            if tl.atomic_add(arrived + lines, 1, sem="acq_rel") == active - 1:
                tl.store(arrived + lines, 0)
                block = tl.arange(0, BLOCK_MEMBERS)
                to = query_at(sequence, kv_head, block, out_stride, out_head_stride, GROUP, QUERIES)
                merge(
                    partial,
                    lse,
                    lines * MEMBERS * splits,
                    splits,
                    active,
                    out + to,
                    MEMBERS,
                    BLOCK_MEMBERS,
                    DIM,
                    BLOCK_DIM,
                    MAX_SPLITS,
                    MERGE,
                )
        else:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)
