"""The new token of a decode step: attention that begins with the output of the QKV product.

qkv row ─┬─ queries ─▶ norm · rope · scale ─▶ the tile that attends
         ├─ key     ─▶ norm · rope ─────────▶ keys[slot]     by the program that has the context's
         └─ value ──────────────────────────▶ values[slot]   end, the only one that reads them again
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.elementwise import times_weight
from twostroke.kernels.cuda.kv_dtypes import largest_of, quantised, scale_at
from twostroke.kernels.records import Rope


class NewToken(NamedTuple):
    """The rope of the layer, and the position of each row's token, [B]."""

    rope: Rope
    positions: torch.Tensor


@triton.jit
def queries_of_new(
    row,
    kv_head,
    num_kv_heads,
    position,
    slot,
    last,
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
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """[BLOCK_M, BLOCK_DIM]: the group's queries, and after them its key, whose scores are not used.
    Rounded after each step, as `rope_store` does. Where the program is the `last` of its context,
    key and value are in the cache when this returns, for itself to read.

    Everything is loaded as a tile of that size, at once: tiles of one layout need no exchange
    between threads, and nothing waits for two loads.
    """
    member = tl.arange(0, BLOCK_M)[:, None]
    line = tl.arange(0, BLOCK_DIM)[None, :]
    channel = tl.broadcast_to(line, [BLOCK_M, BLOCK_DIM])
    is_query = member < GROUP
    inside = (member <= GROUP) & (channel < DIM)
    turns = (member <= GROUP) & (channel < 2 * HALF)
    first = channel < HALF
    # A channel turns with its partner; those past the rotated ones turn by nothing.
    partner = tl.where(first, channel + HALF, channel - HALF)
    angle = position * HALF + tl.where(first, channel, channel - HALF)
    head = tl.where(is_query, kv_head * GROUP + member, num_kv_heads * GROUP + kv_head)
    kind = row.dtype.element_ty
    x = tl.load(row + head * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    paired = tl.load(row + head * DIM + partner, mask=turns, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=turns, other=1.0)
    sine = tl.load(sin + angle, mask=turns, other=0.0)
    value_at = row + (num_kv_heads * (GROUP + 1) + kv_head) * DIM + line
    value = tl.load(value_at, mask=last & (line < DIM))
    if NORM:
        weight = tl.where(is_query, q_norm, k_norm)
        scale = tl.load(weight + channel, mask=inside, other=0.0)
        scale_paired = tl.load(weight + partner, mask=turns, other=0.0)
        inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        x = times_weight(x * inverse, scale, kind).to(tl.float32)
        paired = times_weight(paired * inverse, scale_paired, kind).to(tl.float32)
    tile = (x * cosine + paired * tl.where(first, -sine, sine)).to(kind)
    if SCALED:
        by = tl.load(query_scales + position).to(kind).to(tl.float32)
        tile = (tile.to(tl.float32) * tl.where(is_query, by, 1.0)).to(kind)
    at = (slot // PAGE) * block_stride + (slot % PAGE) * slot_stride + kv_head * head_stride
    stored = last & (slot >= 0)
    is_key = stored & (member == GROUP) & (channel < DIM)
    to = values.dtype.element_ty
    if to.primitive_bitwidth == 8:
        wide, value = tile.to(tl.float32), tl.where(line < DIM, value.to(tl.float32), 0.0)
        largest, largest_value = largest_of(wide), largest_of(value)
        tl.store(keys + at + channel, quantised(wide, largest, to), mask=is_key)
        element = quantised(value, largest_value, to)
        tl.store(values + at + line, element, mask=stored & (line < DIM))
        if to == tl.int8:
            block = (slot // PAGE) * block_stride
            scale_to = scale_at(keys + block, kv_head, slot % PAGE, num_kv_heads, DIM, PAGE)
            scale_to += tl.zeros([BLOCK_M, 1], tl.int32)
            tl.store(scale_to, largest / 127.0, mask=stored & (member == GROUP))
            scale_to = scale_at(values + block, kv_head, slot % PAGE, num_kv_heads, DIM, PAGE)
            scale_to += tl.zeros([1, 1], tl.int32)
            tl.store(scale_to, largest_value / 127.0, mask=stored)
    else:
        tl.store(keys + at + channel, tile.to(keys.dtype.element_ty), mask=is_key)
        tl.store(values + at + line, value.to(to), mask=stored & (line < DIM))
    # All threads' stores before any of them reads that position.
    tl.debug_barrier()
    return tile
