"""Prefill attention: the ragged chunks of a step against the paged cache, in one launch.

    program (tile of queries, KV head, chunk):

        keys   first ····│─────────── seen by every query ───────────│···· last
               window's  │         no mask, most of the work         │ the causal
               edge      │                                           │ edge

A tile holds some tokens with all the query heads that share the KV head, so that keys and values
are read once for the group and little of a tile lies beyond the causal edge.

A first chunk begins its sequence at cache index 0. All that it may see is among the step's own keys
and values, which lie side by side: the hardware fetches whole tiles of them (TMA). Continued chunks
read the pages. A step that has both kinds has two launches, each of which skips the other's chunks.
Cached elements are converted to the queries' type.

A short chunk over a long context has too few tiles of queries for all multiprocessors. So the keys
of each tile are split between programs, as in decode attention, and the last program of a tile
merges the results of its splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.kernels.cuda import prefill_hopper
from twostroke.kernels.cuda.kv_dtypes import operand_of, scale_at, to_operand
from twostroke.kernels.cuda.launch import Launch, Variant
from twostroke.kernels.cuda.prefill_hopper import HopperLaunch
from twostroke.kernels.cuda.scores import capped, sink_of, unit_of
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.splits import num_sms
from twostroke.kernels.kv_dtypes import is_8_bit
from twostroke.kernels.records import AttentionRule, KVView, PrefillWork
from twostroke.kernels.reference import Attend


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    queries: int  # rows of a tile: tokens × heads of a group
    keys: int
    num_warps: int
    num_stages: int


def tuning(dim: int, itemsize: int, first: bool) -> PrefillTuning:
    """Choose the tuning. The keys and values of `num_stages` − 1 steps are in shared memory, in use
    or in flight. Where loads cost no thread, two small tiles a multiprocessor are faster than one
    large tile: one multiplies while the other computes exponentials. `itemsize`: the larger one of
    queries and cache; `first`: the tiles come by TMA."""
    if itemsize == 4:
        return PrefillTuning(64, 32, 4, 2) if dim <= 128 else PrefillTuning(32, 16, 4, 2)
    if dim <= 64:
        return PrefillTuning(128, 128, 8, 3)
    if dim <= 128:
        return PrefillTuning(64, 64, 4, 3) if first else PrefillTuning(128, 64, 8, 4)
    # TMA fills a buffer a stage, one more than loads of threads: two programs fit either way.
    return PrefillTuning(64, 32, 4, 2) if first else PrefillTuning(64, 32, 4, 3)


ALL, FIRST, CONTINUED = 0, 1, 2  # the chunks of a launch

MAX_SPLITS, MIN_SPLIT_KEYS = 32, 512  # of one tile of queries; cached positions of a split


def num_splits(programs: int, visible: int, device: torch.device) -> int:
    """Return the number of splits that gives each multiprocessor one program. `programs`: their
    number without splits; `visible`: the most cached positions that a chunk sees."""
    return max(1, min(MAX_SPLITS, num_sms(device) // programs, visible // MIN_SPLIT_KEYS))


class PrefillScratch(NamedTuple):
    """Memory for the results of splits. L is the number of query tiles, for each KV head."""

    partial: torch.Tensor  # [L, splits, Q, D] fp32: the attention of each split
    lse: torch.Tensor  # [L, splits, Q] fp32: log2 of the softmax denominator of each split
    arrived: torch.Tensor  # [L] int32: finished splits; zero between launches


NO_SCRATCH: PrefillScratch | tuple[None, None, None] = (None, None, None)


def prefill_scratch(
    lines: int, splits: int, queries: int, dim: int, device: torch.device
) -> PrefillScratch:
    return PrefillScratch(
        torch.empty(lines, splits, queries, dim, dtype=torch.float32, device=device),
        torch.empty(lines, splits, queries, dtype=torch.float32, device=device),
        torch.zeros(lines, dtype=torch.int32, device=device),
    )


def prefill_attention(
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: PrefillWork,
    *,
    out: torch.Tensor,
    chunk_kv: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of all chunks to `out`, [T, H, D]. A token sees all cache entries of its sequence
    up to its own, or the last `window` of them.

    `chunk_kv`: the keys and values of the chunks' tokens, [T, 2K, D]. Without `chunk_kv`, and where
    the cache has another type, first chunks read the cache too.
    """
    for launch in make_launches(q, kv, rule, work, out, chunk_kv):
        if launch is not None:
            launch()
    return out


def bind_prefill_attention(
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: PrefillWork,
    *,
    out: torch.Tensor,
    chunk_kv: torch.Tensor | None,
) -> Attend:
    """Prepare `prefill_attention` for any layer whose cache and rule are like those given here. The
    launches read what `chunk_kv` holds when they run."""
    of_own, of_cache = make_launches(q, kv, rule, work, out, chunk_kv)

    def attend(keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        if of_own is not None:
            of_own.with_sinks(sinks)
        if of_cache is not None:
            of_cache.over(keys, values, sinks)

    return attend


def make_launches(
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: PrefillWork,
    out: torch.Tensor,
    chunk_kv: torch.Tensor | None,
    tuned: PrefillTuning | None = None,
) -> tuple[Launch | HopperLaunch | None, Launch | HopperLaunch | None]:
    """Build the launch over the step's own keys and values, and the launch over the cache."""

    def launch(which: int, longest: int, own: torch.Tensor | None = None) -> Launch | HopperLaunch:
        hopper = prefill_hopper.choose(longest, q, kv, own) if tuned is None else None
        if hopper is not None:
            return HopperLaunch(hopper, which, longest, q, kv, rule, work, out, own)
        return _launch(_Chunks(which, longest, own), q, kv, rule, work, out, tuned)

    if chunk_kv is None or not _can_fetch(chunk_kv, kv.keys):
        return None, launch(ALL, max(work.max_first, work.max_continued))
    return (
        launch(FIRST, work.max_first, chunk_kv) if work.max_first else None,
        launch(CONTINUED, work.max_continued) if work.max_continued else None,
    )


def _can_fetch(chunk_kv: torch.Tensor, keys: torch.Tensor) -> bool:
    """Check that what is computed equals what is cached (values of 8-bit types were rounded by
    `rope_store`), in tiles that the hardware can fetch."""
    dim, width = chunk_kv.shape[2], chunk_kv.itemsize
    aligned = chunk_kv.data_ptr() % 16 == 0 == chunk_kv.stride(0) * width % 16
    same = chunk_kv.dtype == keys.dtype or is_8_bit(keys.dtype)
    return same and width == 2 and dim == power_of_two(dim) >= 16 and aligned


class _Chunks(NamedTuple):
    """The chunks of one launch."""

    which: int  # ALL, FIRST or CONTINUED
    longest: int  # tokens
    own: torch.Tensor | None  # their keys and values, if the launch does not read the cache


def _launch(
    chunks: _Chunks,
    q: torch.Tensor,
    kv: KVView,
    rule: AttentionRule,
    work: PrefillWork,
    out: torch.Tensor,
    tuned: PrefillTuning | None,
) -> Launch:
    keys, values = kv.keys, kv.values
    (_, num_heads, dim), (_, page, num_kv_heads, _) = q.shape, keys.shape
    q_strides, out_strides, strides = q.stride(), out.stride(), keys.stride()
    assert strides == values.stride()
    assert strides[3] == q_strides[2] == out_strides[2] == kv.tables.stride(1) == 1
    tuned = tuned or tuning(dim, max(q.itemsize, keys.itemsize), chunks.which == FIRST)
    group = num_heads // num_kv_heads
    fetched, own = None, chunks.own
    if own is not None:
        size = [own.shape[0], 2 * num_kv_heads * dim]
        fetched = TensorDescriptor(own, size, [own.stride(0), 1], [tuned.keys, dim])
        keys, values = own[:, :num_kv_heads], own[:, num_kv_heads:]  # for tiles at the edge
        strides = (0, *own.stride())
    num_chunks, tiles = work.rows.shape[0], ceil_div(chunks.longest, tuned.queries // group)
    lines, splits, scratch = tiles * num_kv_heads * num_chunks, 1, NO_SCRATCH
    if chunks.which != FIRST:
        visible = max((end for _, end in work.spans), default=0)
        if rule.window is not None:
            visible = min(visible, rule.window + chunks.longest)
        splits = num_splits(lines, visible, q.device)
    if splits > 1:
        scratch = prefill_scratch(lines, splits, tuned.queries, dim, q.device)
    shape = _PrefillShape(
        chunks.which,
        splits > 1,
        group,
        num_kv_heads,
        dim,
        page,
        rule.window is not None,
        rule.softcap > 0,
        rule.sinks is not None,
    )
    where = (kv.tables, work.rows, work.starts, work.cu_tokens)
    return Launch(
        _variant(shape, tuned),
        (tiles * splits, num_kv_heads, num_chunks),
        (q, keys, values, rule.sinks, *where, out, *scratch),
        (fetched, rule.window or 0, splits),
        (
            float(rule.scale),
            float(rule.softcap),
            *q_strides[:2],
            *out_strides[:2],
            kv.tables.stride(0),
            *strides[:3],
        ),
    )


class _PrefillShape(NamedTuple):
    """The sizes and features that the kernel is compiled for, besides its tuning."""

    chunks: int
    split: bool
    group: int  # query heads of a KV head
    num_kv_heads: int
    dim: int
    page: int
    window: bool
    softcap: bool
    sinks: bool


@cache
def _variant(shape: _PrefillShape, tuned: PrefillTuning) -> Variant:
    return Variant(
        _prefill,
        GROUP=shape.group,
        NUM_KV_HEADS=shape.num_kv_heads,
        DIM=shape.dim,
        BLOCK_DIM=max(16, power_of_two(shape.dim)),
        PAGE=shape.page,
        QUERIES=tuned.queries,
        KEYS=tuned.keys,
        WINDOW=shape.window,
        SOFTCAP=shape.softcap,
        SINKS=shape.sinks,
        CHUNKS=shape.chunks,
        SPLIT=shape.split,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )


@triton.jit(
    do_not_specialize=["window", "splits"],
    do_not_specialize_on_alignment=["sinks", "chunk_rows", "chunk_starts", "cu_tokens"],
)
def _prefill(
    q,
    keys,
    values,
    sinks,
    tables,
    chunk_rows,
    chunk_starts,
    cu_tokens,
    out,
    partial,
    lse,
    arrived,
    fetched,
    window,
    splits,
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
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    TOKENS: tl.constexpr = QUERIES // GROUP
    # The last tiles see the most keys: they start first, and the short ones fill the gaps.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, chunk = tl.program_id(1), tl.program_id(2)
    if SPLIT:
        tiles = tl.num_programs(0) // splits
        split, tile = tile // tiles, tile % tiles
    else:
        tiles = tl.num_programs(0)
        split = 0
    first_token = tl.load(cu_tokens + chunk).to(tl.int32)
    size = tl.load(cu_tokens + chunk + 1).to(tl.int32) - first_token
    start = tl.load(chunk_starts + chunk).to(tl.int32)

    # Keys [edge, open_end) are seen by every query of the tile; each bound is whole tiles of keys.
    first_query = start + tile * TOKENS
    end = start + tl.minimum(size, (tile + 1) * TOKENS)
    first_key = 0
    begin = 0
    edge = 0
    open_end = (first_query + 1) // KEYS * KEYS
    if WINDOW:
        first_key = tl.maximum(first_query - window + 1, 0)
        begin = first_key // KEYS * KEYS
        open_end = tl.maximum(open_end, begin)
        edge = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
        edge = tl.minimum(tl.maximum(edge, begin), open_end)
    stop = end
    active = 1  # splits that have keys
    if SPLIT:
        tiles_of_keys = tl.cdiv(end - begin, KEYS)
        share = tl.cdiv(tiles_of_keys, splits)
        active = tl.cdiv(tiles_of_keys, share)
        begin += split * share * KEYS
        stop = tl.minimum(begin + share * KEYS, end)
        edge = tl.minimum(tl.maximum(edge, begin), stop)
        open_end = tl.minimum(tl.maximum(open_end, begin), stop)
    mine = CHUNKS == 0 or (start == 0) == (CHUNKS == 1)
    if mine and tile * TOKENS < size and split < active:
        table = tables + tl.load(chunk_rows + chunk).to(tl.int64) * table_stride
        key_scales = scale_at(keys, kv_head, 0, NUM_KV_HEADS, DIM, PAGE)
        value_scales = scale_at(values, kv_head, 0, NUM_KV_HEADS, DIM, PAGE)
        keys += kv_head * head_stride
        values += kv_head * head_stride

        # Row r is head r % GROUP of token r // GROUP; those past the chunk compute and drop.
        row = tl.arange(0, QUERIES)
        channel = tl.arange(0, BLOCK_DIM)
        token = tile * TOKENS + row // GROUP
        real = ((row < TOKENS * GROUP) & (token < size))[:, None] & (channel < DIM)[None, :]
        line = (first_token + token).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        q_at = line[:, None] * q_stride + head[:, None] * q_head_stride + channel[None, :]
        query = operand_of(tl.load(q + q_at, mask=real, other=0.0), keys)
        position = start + token

        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
        if SINKS:
            best, total = sink_of(sinks + head, (row < TOKENS * GROUP) & (split == 0))
        for part in tl.static_range(0 if WINDOW else 1, 3):
            best, total, sums = _visit(
                best,
                total,
                sums,
                begin if part == 0 else (edge if part == 1 else open_end),
                edge if part == 0 else (open_end if part == 1 else stop),
                query,
                position,
                first_key,
                end,
                window,
                keys,
                values,
                key_scales,
                value_scales,
                fetched,
                first_token,
                kv_head * DIM,
                table,
                scale,
                softcap,
                block_stride,
                slot_stride,
                NUM_KV_HEADS * DIM,
                DIM,
                BLOCK_DIM,
                PAGE,
                KEYS,
                CHUNKS == 1,
                part != 1,
                WINDOW,
                SPLIT,
                SOFTCAP,
                q.dtype.element_ty == tl.bfloat16,
            )
        if SPLIT:
            total = tl.where(best == float("-inf"), 1.0, total)
        result = sums / total[:, None]
        if keys.dtype.element_ty == tl.int8:
            result = result * 0.0078125
        out_at = line[:, None] * out_stride + head[:, None] * out_head_stride + channel[None, :]
        if SPLIT:
            tile_line = (chunk * NUM_KV_HEADS + kv_head) * tiles + tile
            split_0 = tile_line.to(tl.int64) * splits * QUERIES + row
            own = split_0 + split * QUERIES
            tl.store(lse + own, best + tl.log2(total))
            inside = (channel < DIM)[None, :]
            tl.store(partial + own[:, None] * DIM + channel[None, :], result, mask=inside)
            # The stores of all threads must come before the count that publishes them.
            tl.debug_barrier()
            if tl.atomic_add(arrived + tile_line, 1, sem="acq_rel") == active - 1:
                tl.store(arrived + tile_line, 0)
                result = _merged(partial, lse, split_0, active, DIM, BLOCK_DIM, QUERIES)
                tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real)
        else:
            tl.store(out + out_at, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _merged(
    partial,
    lse,
    split_0,
    active,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Return the attention of a tile over all its splits. `split_0`: the rows of split 0 in `lse`.
    Loads bypass the L1 cache, because this cache may hold values of an earlier launch."""
    channel = tl.arange(0, BLOCK_DIM)
    inside = (channel < DIM)[None, :]
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    for split in tl.range(0, active):
        of_split = split_0 + split * QUERIES
        other = tl.load(lse + of_split, cache_modifier=".cg")
        rows = partial + of_split[:, None] * DIM + channel[None, :]
        result = tl.load(rows, mask=inside, other=0.0, cache_modifier=".cg")
        above = tl.maximum(best, other)
        floor = tl.where(above == float("-inf"), 0.0, above)
        weight, fade = tl.exp2(other - floor), tl.exp2(best - floor)
        total = total * fade + weight
        sums = sums * fade[:, None] + result * weight[:, None]
        best = above
    return sums / total[:, None]


@triton.jit
def _visit(
    best,
    total,
    sums,
    begin,
    stop,
    query,
    position,
    first_key,
    end,
    window,
    keys,
    values,
    key_scales,
    value_scales,
    fetched,
    first_token,
    column,
    table,
    scale,
    softcap,
    block_stride,
    slot_stride,
    ALL_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The online softmax over cached positions [begin, stop), a multiple of KEYS at its start."""
    channel = tl.arange(0, BLOCK_DIM)
    unit = unit_of(scale, SOFTCAP)
    scaled: tl.constexpr = keys.dtype.element_ty == tl.int8
    # A tile's pages are asked for a tile ahead: the compiler then has all its stages for keys and
    # values.
    if not IS_FIRST:
        cached = begin + tl.arange(0, KEYS)
        page = tl.load(table + cached // PAGE, mask=cached < end, other=0)
    for at in tl.range(begin, stop, KEYS):
        cached = at + tl.arange(0, KEYS)
        if MASKED:
            there = cached < end
            if WINDOW:
                there = there & (cached >= first_key)
        if IS_FIRST and not MASKED:
            key = fetched.load([first_token + at, column])
            value = fetched.load([first_token + at, ALL_KEYS + column])
        else:
            if IS_FIRST:  # nothing of another chunk may come through, not even by 0 · NaN
                line = (first_token + cached).to(tl.int64) * slot_stride
            else:
                line = page.to(tl.int64) * block_stride + (cached % PAGE) * slot_stride
                if scaled:  # a stride of bytes, and pointers to fp32
                    of_page = page.to(tl.int64) * (block_stride // 4) + cached % PAGE
                following = cached + KEYS
                page = tl.load(table + following // PAGE, mask=following < end, other=0)
            line = line[:, None] + channel[None, :]
            if MASKED or DIM != BLOCK_DIM:
                inside = (channel < DIM)[None, :]
                if MASKED:
                    inside = inside & there[:, None]
                key = tl.load(keys + line, mask=inside, other=0.0)
                value = tl.load(values + line, mask=inside, other=0.0)
            else:
                key = tl.load(keys + line)
                value = tl.load(values + line)
            key, value = to_operand(key, query.dtype, ASM), to_operand(value, query.dtype, ASM)
            if scaled and MASKED:
                key_scale = tl.load(key_scales + of_page, mask=there, other=0.0)
                value_scale = tl.load(value_scales + of_page, mask=there, other=0.0)
            elif scaled:
                key_scale = tl.load(key_scales + of_page)
                value_scale = tl.load(value_scales + of_page)
        score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
        if scaled:
            score = score * key_scale[None, :]
        score = capped(score, scale, softcap, SOFTCAP)
        if MASKED:
            visible = cached[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (cached[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        above = tl.maximum(best, tl.max(score, axis=1) * unit)
        floor = above
        # A query may see nothing of the window's first tiles, or of a split.
        if MASKED and (WINDOW or SPLIT):
            floor = tl.where(above == float("-inf"), 0.0, above)
        weight = tl.exp2(score * unit - floor[:, None])
        fade = tl.exp2(best - floor)
        total = total * fade + tl.sum(weight, axis=1)
        sums = sums * fade[:, None]
        if scaled:  # by the largest value, almost: what fp16 has, where the model does
            weight = weight * (value_scale * 128.0)[None, :]
        sums = tl.dot(weight.to(value.dtype), value, sums, input_precision="tf32x3")
        best = above
    return best, total, sums
