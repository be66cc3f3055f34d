"""Decode attention: one query a sequence, split along the context.

    program (KV head, split, sequence):  tables[row] ─▶ pages ─▶ keys ─▶ softmax ─▶ values
                                         the last split to finish merges them all

The query heads of a KV head share one tile, so that keys and values are read once. Each program
reads its sequence's length on the device: one captured launch serves every context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.scores import capped, unit_of
from twostroke.kernels.cuda.sizes import power_of_two

# Three waves of four programs a multiprocessor: sequences differ in length, and the last wave
# should not wait long for the longest.
PROGRAMS = 132 * 12
MERGE = 16  # splits that are merged at one time


class DecodeScratch(NamedTuple):
    """Where the splits of one launch meet; launches of one stream may share it."""

    partial: torch.Tensor  # [B, H, splits, D] fp32
    weight: torch.Tensor  # [B, H, splits]: log2 of the softmax's sum
    arrived: torch.Tensor  # [B, K] at least: zero between launches


@dataclass(frozen=True, slots=True)
class Tuning:
    tile: int  # cached positions of one step of the loop
    num_warps: int
    num_stages: int


def tuning(dim: int, dtype: torch.dtype) -> Tuning:
    """Tiles such that several programs fit in a multiprocessor: one computes, the others load."""
    return Tuning(64, 4, 4) if dim * dtype.itemsize <= 256 else Tuning(32, 4, 4)


def decode_splits(batch: int, num_kv_heads: int, max_len: int) -> int:
    """Programs enough to fill the card, but none with less than a tile of the longest context."""
    wanted = -(-PROGRAMS // (batch * num_kv_heads))
    return max(1, min(wanted, -(-max_len // 64)))


def decode_scratch(
    batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
) -> DecodeScratch:
    return DecodeScratch(
        torch.empty(batch, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(batch, num_heads, splits, dtype=torch.float32, device=device),
        torch.zeros(batch, num_heads, dtype=torch.int32, device=device),
    )


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
) -> torch.Tensor:
    """[B, H, D] against the first `lengths` positions of table rows `rows`; zeros where it is 0.

    `scratch` is of this batch or a larger one, of these splits or more.
    """
    batch, num_heads, dim = q.shape
    num_kv_heads = keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(-1) == q.stride(-1) == tables.stride(-1) == 1
    if out is None:
        out = torch.empty(batch, num_heads, dim, dtype=q.dtype, device=q.device)
    tuned = tuned or tuning(dim, q.dtype)
    group = num_heads // num_kv_heads
    _decode[(num_kv_heads, splits, batch)](
        q,
        keys,
        values,
        tables,
        rows,
        lengths,
        out,
        *scratch,
        float(scale),
        float(softcap),
        window or 0,
        splits,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        GROUP=group,
        QUERIES=max(16, power_of_two(group)),
        DIM=dim,
        BLOCK_DIM=max(16, power_of_two(dim)),
        PAGE=keys.shape[1],
        TILE=tuned.tile,
        MERGE=MERGE,
        GROUP_BLOCK=power_of_two(group),
        SPLIT=splits > 1,
        WINDOW=window is not None,
        SOFTCAP=softcap > 0,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )
    return out


@triton.jit(
    do_not_specialize=["splits", "window"],
    do_not_specialize_on_alignment=["rows", "lengths", "arrived"],
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
    scale,
    softcap,
    window,
    splits,
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
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    table = tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)

    # Tiles [first_tile, last_tile) of the context, an equal share to each split.
    first_tile = first // TILE
    last_tile = tl.cdiv(length, TILE)
    share = tl.maximum(tl.cdiv(last_tile - first_tile, splits), 1)
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
        q_at = q + sequence * q_stride + head[:, None] * q_head_stride + channel[None, :]
        query_tile = tl.load(q_at, mask=real, other=0.0)
        best = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
        unit = unit_of(scale, SOFTCAP)
        for tile in tl.range(begin, end):
            position = tile * TILE + tl.arange(0, TILE)
            inside = position < length
            page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
            if WINDOW:
                inside = inside & (position >= first)
            at = page * block_stride + (position % PAGE) * slot_stride + kv_head * head_stride
            at = at[:, None] + channel[None, :]
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
                _merge(
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
                    MERGE,
                )
        else:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _merge(
    partial,
    weight,
    line,
    splits,
    active,
    to,
    to_stride,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """The splits' results, each by its share of the whole softmax. Read past the first-level
    cache, which may hold what an earlier launch left there."""
    member = tl.arange(0, GROUP_BLOCK)
    channel = tl.arange(0, BLOCK_DIM)
    valid = member < GROUP
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    sums = tl.zeros([GROUP_BLOCK, BLOCK_DIM], tl.float32)
    for start in range(0, active, MERGE):
        split = start + tl.arange(0, MERGE)
        at = line + member[None, :] * splits + split[:, None]
        there = valid[None, :] & (split < active)[:, None]
        size = tl.load(weight + at, mask=there, other=float("-inf"), cache_modifier=".cg")
        mask = there[:, :, None] & (channel < DIM)[None, None, :]
        from_ = partial + at[:, :, None] * DIM + channel[None, None, :]
        part = tl.load(from_, mask=mask, other=0.0, cache_modifier=".cg")
        above = tl.maximum(best, tl.max(size, axis=0))
        above = tl.where(valid, above, 0.0)
        fade = tl.exp2(best - above)
        each = tl.exp2(size - above[None, :])
        total = total * fade + tl.sum(each, axis=0)
        sums = sums * fade[:, None] + tl.sum(part * each[:, :, None], axis=0)
        best = above
    real = valid[:, None] & (channel < DIM)[None, :]
    to = to + member[:, None] * to_stride + channel[None, :]
    tl.store(to, (sums / total[:, None]).to(to.dtype.element_ty), mask=real)
