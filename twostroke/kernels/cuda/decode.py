"""Decode attention in Triton: one or a few queries for each sequence, with the context split
between programs.

    program (KV head, split, sequence):  tables[row] ─▶ pages ─▶ keys ─▶ softmax ─▶ values
                                         the last split to finish merges the results of all splits

One query tile has all query heads of a KV head, and all tokens of the row, so that keys and values
are read once. Each program reads the length of its sequence on the device, so one captured launch
serves every context length. Cache elements are converted to the queries' dtype. The scales of int8
multiply the scores and the softmax weights, which are fewer than the elements.

`rope_decode_attention` also does the norm, rope and KV store before attention: see `new_token.py`.
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
from twostroke.kernels.cuda.new_token import NewToken, norm_rope_store_new_kv
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

ONE_TILE_SPLITS = 32  # with this many splits, a split of a short context is one tile


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    tile: int  # cached positions of one iteration
    num_warps: int
    num_stages: int
    min_tiles: int = 2  # minimum tiles of a split, if the context has as many


def tiles_held(tile: int, head_bytes: int) -> int:
    """Return the number of tiles of keys and values that a multiprocessor's shared memory holds."""
    return shared_bytes() // (2 * tile * head_bytes)


def tuning(head_bytes: int, programs: int, splits: int, num_sms: int) -> DecodeTuning:
    """Choose the tuning for 16-bit and 32-bit caches. With few programs, each program has more
    tiles in flight. With many programs, several share a multiprocessor, and one computes while
    another loads. If each tile of a short context has its own program, the smallest programs are
    the fastest, because they can start while the previous product still runs."""
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
    """Choose the tuning for 8-bit heads of at most 128 channels. Conversions and exchanges between
    warps take most of the time, so programs have two warps, or larger tiles if there are few
    programs. With several queries there are too few registers for larger tiles."""
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
    """Write the attention of the decode rows to `out`, [rows · queries, H, D]; zeros for a row of
    length 0.

    A row's length includes the entries of all its queries: query j sees the first
    `length` − (queries − 1 − j) entries, and of these the last `window`. The scratch may be larger
    than needed, in tokens and in splits.
    """
    make_launch(q, kv, rule, work, out, context)()
    return out


def bind_decode_attention(
    q: torch.Tensor, kv: KVView, rule: AttentionRule, work: DecodeWork, *, out: torch.Tensor
) -> Attend:
    """Prepare `decode_attention` for layers whose caches and rules differ from `kv` and `rule` only
    in memory and sinks."""
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
    """Compute `rope_store` and `decode_attention` of [B, (H + 2K) · D] in one launch. Each token is
    the last of the `lengths` cache entries of its row, in a block that no other table contains. A
    token with a slot < 0 is not stored."""
    q, new = heads_of_new(qkv, kv), NewToken(rope, positions)
    make_launch(q, kv, rule, work, out, context, new)()
    return out


def heads_of_new(qkv: torch.Tensor, kv: KVView) -> torch.Tensor:
    """Return the query heads in the output of the QKV product, [B, H, D], before norm and rope."""
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
    """Build the launch. `new`: the kernel also applies norm and rope to the heads in `q`, and
    stores the new keys and values."""
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
    extra, eps = (NO_TENSORS, 0.0) if new is None else (_new_tensors(new, kv), new.rope.norm_eps)
    where = (q, keys, kv.values, rule.sinks, kv.tables, work.rows, work.lengths, out)
    return Launch(
        variant.for_context(context),
        (num_kv_heads, splits, batch),
        (*where, *work.scratch, *extra),
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
    """The sizes and features for which the kernel is compiled, besides its tuning."""

    group: int  # query heads of a KV head
    queries: int
    dim: int
    page: int
    split: bool
    window: bool
    softcap: bool
    sinks: bool


class _NewShape(NamedTuple):
    """The sizes and features of norm, rope and KV store in the kernel."""

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
    # A thread's registers must hold its part of the result, and of the splits merged at one time.
    num_warps, registers = tuned.num_warps, 128
    if shape.queries > 1:
        num_warps, registers = max(num_warps, min(16, block_m * block_dim // 1024)), 32
    max_merged = num_warps * 32 * registers // (block_members * block_dim)
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
        MERGE=max(1, min(16, max_merged)),
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
    active = tl.cdiv(last_tile - first_tile, share)  # splits that have tiles
    begin = first_tile + split * share
    end = tl.minimum(begin + share, last_tile)

    member = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, BLOCK_DIM)
    is_query = (member < MEMBERS)[:, None] & (channel < DIM)[None, :]
    out_at = query_at(sequence, kv_head, member, out_stride, out_head_stride, GROUP, QUERIES)
    out_at = out + out_at[:, None] + channel[None, :]
    if split == 0 and length == 0:
        tl.store(out_at, tl.zeros([BLOCK_M, BLOCK_DIM], out.dtype.element_ty), mask=is_query)
    if begin < end:
        # The page numbers of a tile are loaded one tile ahead, so that the compiler uses all
        # pipeline stages for keys and values.
        position = begin * TILE + tl.arange(0, TILE)
        page = tl.load(table + position // PAGE, mask=position < length, other=0)
        if NEW:
            query_tile = norm_rope_store_new_kv(
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
            query_tile = tl.load(q + q_at[:, None] + channel[None, :], mask=is_query, other=0.0)
        use_asm: tl.constexpr = query_tile.dtype == tl.bfloat16
        query_tile = operand_of(query_tile, keys)
        kv_dtype: tl.constexpr = keys.dtype.element_ty
        scaled: tl.constexpr = kv_dtype == tl.int8
        # 8-bit values are loaded as pairs of channels (int16), because the hardware cannot
        # transpose 8-bit elements for the product over positions.
        narrow: tl.constexpr = kv_dtype.primitive_bitwidth == 8 and query_tile.dtype == tl.float16
        paired: tl.constexpr = narrow and DIM % 2 == 0 and BLOCK_DIM >= 32
        num_kv_heads = tl.num_programs(0)
        max_score = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if paired:
            pair = tl.arange(0, BLOCK_DIM // 2)
            value_pairs = values.to(tl.pointer_type(tl.int16))
            sums = tl.zeros([BLOCK_M, BLOCK_DIM // 2], tl.float32)
            odd_sums = tl.zeros([BLOCK_M, BLOCK_DIM // 2], tl.float32)
        else:
            sums = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
        if SINKS:  # only the first split counts the sink; it always has keys
            head = kv_head * GROUP + member % GROUP
            max_score, total = sink_of(sinks + head, (member < MEMBERS) & (split == 0))
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
                key = to_operand(key, query_tile.dtype, use_asm)
                mask = inside[:, None] & (pair < DIM // 2)[None, :]
                pairs = tl.load(value_pairs + pair_at, mask=mask, other=0)
                value, odd_value = pair_to_operands(pairs, kv_dtype, use_asm)
            else:
                key = tl.load(keys + at, mask=mask, other=0.0).to(query_tile.dtype)
                value = tl.load(values + at, mask=mask, other=0.0).to(query_tile.dtype)
            score = tl.dot(query_tile, tl.trans(key), input_precision="tf32x3")
            if scaled:
                score = score * key_scale[None, :]
            score = capped(score, scale, softcap, SOFTCAP)
            score = tl.where(visible, score, float("-inf"))
            # A single query sees a position of each tile, so `new_max` is finite. One of several
            # queries may see no position of the first or the last tiles.
            new_max = tl.maximum(max_score, tl.max(score, axis=1) * unit)
            finite_max = new_max
            if QUERIES > 1:
                finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(score * unit - finite_max[:, None])
            rescale = tl.exp2(max_score - finite_max)
            total = total * rescale + tl.sum(weights, axis=1)
            sums = sums * rescale[:, None]
            if scaled:  # value_scale · 128 is nearly the head's absmax, which is in fp16's range
                weights = weights * (value_scale * 128.0)[None, :]
            if paired:
                weights = weights.to(value.dtype)
                odd_sums = tl.dot(weights, odd_value, odd_sums * rescale[:, None])
            sums = tl.dot(weights.to(value.dtype), value, sums, input_precision="tf32x3")
            max_score = new_max
        if paired:
            sums = tl.reshape(tl.join(sums, odd_sums), [BLOCK_M, BLOCK_DIM])
            sums = sums * pair_unit(kv_dtype, use_asm)
        if scaled:
            sums = sums * 0.0078125
        if QUERIES > 1:
            sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        else:
            sums = sums / total[:, None]
        if SPLIT:
            lines = sequence.to(tl.int64) * tl.num_programs(0) + kv_head
            into = (lines * MEMBERS + member) * splits + split
            tl.store(partial + into[:, None] * DIM + channel[None, :], sums, mask=is_query)
            tl.store(lse + into, max_score + tl.log2(total), mask=member < MEMBERS)
            # The stores of all threads must come before the count that publishes them.
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
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=is_query)
