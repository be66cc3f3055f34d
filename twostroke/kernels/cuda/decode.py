"""Decode attention: one query a sequence, split along the context.

    program (KV head, split, sequence):  tables[row] ─▶ pages ─▶ keys ─▶ softmax ─▶ values
                                         the last split to finish merges them all

The query heads of a KV head share one tile, so that keys and values are read once. Each program
reads its sequence's length on the device: one captured launch serves every context.

`rope_decode_attention` begins one launch earlier, with what the QKV product has left: see
`new_token.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels import Attend
from twostroke.kernels.cuda.early import await_last, launch_options
from twostroke.kernels.cuda.launch import Launch, Variant
from twostroke.kernels.cuda.new_token import NewToken, queries_of_new
from twostroke.kernels.cuda.scores import capped, unit_of
from twostroke.kernels.cuda.sizes import power_of_two
from twostroke.kernels.cuda.splits import MERGE, MOST_SPLITS, PROGRAMS, DecodeScratch, merge


@dataclass(frozen=True, slots=True)
class Tuning:
    tile: int  # cached positions of one step of the loop
    num_warps: int
    num_stages: int
    least: int = 2  # tiles of a split, where the context has as many


def tuning(dim: int, dtype: torch.dtype, programs: int) -> Tuning:
    """Of wide heads few programs have more tiles under way each; many share a multiprocessor,
    where one computes and the others load."""
    width = dim * dtype.itemsize
    if width <= 256:
        return Tuning(64, 4, 3, 2)
    if programs <= PROGRAMS:
        return Tuning(32, 4, 4 if width <= 512 else 3, 4)
    return Tuning(32, 4, 2, 4)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    splits: int,
    scratch: DecodeScratch,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    tuned: Tuning | None = None,
    early: bool = False,
    new: NewToken | None = None,
) -> torch.Tensor:
    """[B, H, D] against the first `lengths` positions of table rows `rows`; zeros where it is 0.

    `scratch` is of this batch or a larger one, of these splits or more. `new`: the queries are
    not made yet, and lie where the QKV product has left them.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = (q, keys, values, tables, rows, lengths)
    _launch(*where, scale, window, splits, scratch, softcap, out, tuned, early, new)()
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
    splits: int,
    scratch: DecodeScratch,
    out: torch.Tensor,
) -> Attend:
    where = (q, keys, values, tables, rows, lengths)
    return _launch(*where, scale, window, splits, scratch, 0.0, out, None, False, None).over


def _launch(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    splits: int,
    scratch: DecodeScratch,
    softcap: float,
    out: torch.Tensor,
    tuned: Tuning | None,
    early: bool,
    new: NewToken | None,
) -> Launch:
    (batch, num_heads, dim), (_, page, num_kv_heads, _) = q.shape, keys.shape
    q_strides, out_strides, strides = q.stride(), out.stride(), keys.stride()
    assert strides == values.stride()
    assert strides[3] == q_strides[2] == tables.stride(1) == 1
    assert splits <= MOST_SPLITS
    tuned = tuned or tuning(dim, q.dtype, batch * num_kv_heads * splits)
    *made, eps = new or (None, None, None, None, None, 0.0)
    variant = _variant(
        num_heads // num_kv_heads,
        dim,
        page,
        0 if new is None else new.cos.shape[-1],
        tuned,
        splits > 1,
        window is not None,
        softcap > 0,
        new is not None,
        new is not None and new.q_norm is not None,
        early,
    )
    return Launch(
        variant,
        (num_kv_heads, splits, batch),
        (q, keys, values, tables, rows, lengths, out, *scratch, *made),
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
    dim: int,
    page: int,
    half: int,
    tuned: Tuning,
    split: bool,
    has_window: bool,
    has_softcap: bool,
    is_new: bool,
    normed: bool,
    early: bool,
) -> Variant:
    return Variant(
        _decode,
        GROUP=group,
        QUERIES=max(16, power_of_two(group + 1 if is_new else group)),
        DIM=dim,
        BLOCK_DIM=max(16, power_of_two(dim)),
        HALF=half,
        PAGE=page,
        TILE=tuned.tile,
        LEAST=tuned.least,
        MOST_SPLITS=MOST_SPLITS,
        MERGE=MERGE,
        GROUP_BLOCK=power_of_two(group),
        SPLIT=split,
        WINDOW=has_window,
        SOFTCAP=has_softcap,
        NEW=is_new,
        NORM=normed,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(early),
    )


def rope_decode_attention(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None,
    splits: int,
    scratch: DecodeScratch,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    tuned: Tuning | None = None,
    early: bool = False,
) -> torch.Tensor:
    """`rope_store` and `decode_attention` of [B, (H + 2K) · D]: each token is the last of its
    `lengths` positions, and goes to its slot, nowhere where that is < 0."""
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    heads = qkv.unflatten(1, (-1, keys.shape[-1]))
    q = heads[:, : heads.shape[1] - 2 * keys.shape[2]]
    new = NewToken(q_norm, k_norm, cos, sin, slots, eps)
    return decode_attention(
        q,
        keys,
        values,
        tables,
        rows,
        lengths,
        scale,
        window,
        splits,
        scratch,
        softcap,
        out,
        tuned,
        early,
        new,
    )


@triton.jit(
    do_not_specialize=["splits", "window"],
    do_not_specialize_on_alignment=["rows", "lengths", "arrived", "slots"],
)
def _decode(
    q,
    keys,
    values,
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
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_last(EARLY)
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)

    # Tiles [first_tile, last_tile) of the context, an equal share to each split.
    first_tile = first // TILE
    last_tile = tl.cdiv(length, TILE)
    share = tl.maximum(tl.cdiv(last_tile - first_tile, splits), LEAST)
    active = tl.cdiv(last_tile - first_tile, share)  # splits that have any
    begin = first_tile + split * share
    end = tl.minimum(begin + share, last_tile)

    query = tl.arange(0, QUERIES)
    channel = tl.arange(0, BLOCK_DIM)
    head = kv_head * GROUP + query
    real = (query < GROUP)[:, None] & (channel < DIM)[None, :]
    out_at = out + sequence * out_stride + head[:, None] * out_head_stride + channel[None, :]
    if split == 0 and length == 0:
        tl.store(out_at, tl.zeros([QUERIES, BLOCK_DIM], out.dtype.element_ty), mask=real)
    if begin < end:
        # A tile's pages are asked for a tile ahead: the compiler then has all its stages for keys
        # and values.
        position = begin * TILE + tl.arange(0, TILE)
        page = tl.load(table + position // PAGE, mask=position < length, other=0)
        row = q + sequence * q_stride
        if NEW:
            query_tile = queries_of_new(
                row,
                kv_head,
                tl.num_programs(0),
                length - 1,
                tl.load(slots + sequence).to(tl.int64),
                end == last_tile,
                q_norm,
                k_norm,
                cos,
                sin,
                eps,
                keys,
                values,
                block_stride,
                slot_stride,
                head_stride,
                GROUP,
                QUERIES,
                DIM,
                BLOCK_DIM,
                HALF,
                PAGE,
                NORM,
            )
        else:
            q_at = row + head[:, None] * q_head_stride + channel[None, :]
            query_tile = tl.load(q_at, mask=real, other=0.0)
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
        unit = unit_of(scale, SOFTCAP)
        for tile in tl.range(begin, end):
            position = tile * TILE + tl.arange(0, TILE)
            inside = position < length
            if WINDOW:
                inside = inside & (position >= first)
            at = (position % PAGE) * slot_stride + kv_head * head_stride
            at = (page.to(tl.int64) * block_stride + at)[:, None] + channel[None, :]
            position += TILE
            page = tl.load(table + position // PAGE, mask=position < length, other=0)
            mask = inside[:, None] & (channel < DIM)[None, :]
            key = tl.load(keys + at, mask=mask, other=0.0)
            value = tl.load(values + at, mask=mask, other=0.0)
            score = tl.dot(query_tile, tl.trans(key), input_precision="tf32x3")
            score = capped(score, scale, softcap, SOFTCAP)
            score = tl.where(inside[None, :], score, float("-inf"))
            # Each tile has a visible position: `above` is finite.
            above = tl.maximum(best, tl.max(score, axis=1) * unit)
            share_of = tl.exp2(score * unit - above[:, None])
            fade = tl.exp2(best - above)
            total = total * fade + tl.sum(share_of, axis=1)
            sums = sums * fade[:, None]
            sums = tl.dot(share_of.to(value.dtype), value, sums, input_precision="tf32x3")
            best = above
        sums = sums / total[:, None]
        if SPLIT:
            lines = sequence.to(tl.int64) * tl.num_programs(0) + kv_head
            into = (lines * GROUP + query) * splits + split
            tl.store(partial + into[:, None] * DIM + channel[None, :], sums, mask=real)
            tl.store(weight + into, best + tl.log2(total), mask=query < GROUP)
            # All threads' stores before the count that publishes them.
            tl.debug_barrier()
            if tl.atomic_add(arrived + lines, 1, sem="acq_rel") == active - 1:
                tl.store(arrived + lines, 0)
                to = out + sequence * out_stride + kv_head * GROUP * out_head_stride
                merge(
                    partial,
                    weight,
                    lines * GROUP * splits,
                    splits,
                    active,
                    to,
                    out_head_stride,
                    GROUP,
                    GROUP_BLOCK,
                    DIM,
                    BLOCK_DIM,
                    MOST_SPLITS,
                    MERGE,
                )
        else:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)
