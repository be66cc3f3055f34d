"""Norm, rope and KV store of the new token of a decode row, inside the decode attention kernel.

qkv row ─┬─ queries ─▶ norm · rope · scale ─▶ the query tile
         ├─ key     ─▶ norm · rope ─────────▶ keys[slot]     (stored only by the program that has
         └─ value ──────────────────────────▶ values[slot]    the end of the context)
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
def norm_rope_store_new_kv(
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
    """Return the query tile, [BLOCK_M, BLOCK_DIM]: the queries of the KV head's group, then its
    key, whose scores are not used. Results are rounded after each operation, as in `rope_store`. If
    `last`, the program has the end of its context: it stores key and value in the cache, and may
    read them as soon as this function returns.

    All operands are loaded as tiles of the same shape, before any arithmetic: tiles of one layout
    need no exchange between threads, and no load waits for another load.
    """
    member = tl.arange(0, BLOCK_M)[:, None]
    line = tl.arange(0, BLOCK_DIM)[None, :]
    channel = tl.broadcast_to(line, [BLOCK_M, BLOCK_DIM])
    is_query = member < GROUP
    inside = (member <= GROUP) & (channel < DIM)
    rotates = (member <= GROUP) & (channel < 2 * HALF)
    first = channel < HALF
    # Each channel rotates with its partner. The channels past 2 · HALF rotate by angle 0.
    partner = tl.where(first, channel + HALF, channel - HALF)
    angle = position * HALF + tl.where(first, channel, channel - HALF)
    head = tl.where(is_query, kv_head * GROUP + member, num_kv_heads * GROUP + kv_head)
    dtype = row.dtype.element_ty
    x = tl.load(row + head * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    paired = tl.load(row + head * DIM + partner, mask=rotates, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=rotates, other=1.0)
    sine = tl.load(sin + angle, mask=rotates, other=0.0)
    value_at = row + (num_kv_heads * (GROUP + 1) + kv_head) * DIM + line
    value = tl.load(value_at, mask=last & (line < DIM))
    if NORM:
        weight = tl.where(is_query, q_norm, k_norm)
        scale = tl.load(weight + channel, mask=inside, other=0.0)
        scale_paired = tl.load(weight + partner, mask=rotates, other=0.0)
        inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / DIM + eps)
        x = times_weight(x * inverse, scale, dtype).to(tl.float32)
        paired = times_weight(paired * inverse, scale_paired, dtype).to(tl.float32)
    tile = (x * cosine + paired * tl.where(first, -sine, sine)).to(dtype)
    if SCALED:
        by = tl.load(query_scales + position).to(dtype).to(tl.float32)
        tile = (tile.to(tl.float32) * tl.where(is_query, by, 1.0)).to(dtype)
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
    # The stores of all threads must end before any thread reads the new position.
    tl.debug_barrier()
    return tile
