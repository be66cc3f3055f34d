"""Norm, rope and KV store in one launch: all operations between the QKV product and attention.

qkv row ─┬─ query heads ─▶ norm · rope · scale ─▶ the row
         ├─ key heads   ─▶ norm · rope ─────────▶ the row, keys[slot]
         └─ value heads ────────────────────────▶ values[slot]

A chunk that begins its sequence attends to the keys and values in the row. The cache may have
another type: keys and values are rounded to that type when they are stored, and to 8-bit types in
the row as well.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import times_weight
from twostroke.kernels.cuda.kv_dtypes import dequantised, largest_of, quantised, scale_at
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.records import DEFAULT_CONTEXT, KVView, Rope, StepContext

HEADS = 8  # heads of one program


def rope_store(
    qkv: torch.Tensor,
    rope: Rope,
    positions: torch.Tensor,
    kv: KVView,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Normalise, rotate and scale the heads of [T, (H + 2K) · D] in place, and return them as
    [T, H + 2K, D]. Keys and values of slots ≥ 0 are also stored in the cache. Channels after the
    rotated channels do not change."""
    (_, page, num_kv_heads, dim), strides = kv.keys.shape, kv.keys.stride()
    assert strides == kv.values.stride()
    assert strides[3] == 1
    assert qkv.is_contiguous()
    num_heads = qkv.shape[1] // dim - 2 * num_kv_heads
    sizes = (num_heads, num_kv_heads, dim, rope.cos.shape[1], page)
    tables = (rope.q_norm, rope.k_norm, rope.cos, rope.sin, rope.query_scales)
    _variant(*sizes, rope.q_norm is not None, rope.query_scales is not None)(
        (qkv.shape[0], ceil_div(num_heads, HEADS) + ceil_div(num_kv_heads, HEADS)),
        (qkv, *tables, positions, kv.slots, kv.keys, kv.values),
        (),
        (rope.norm_eps, rope.cos.stride(0), *strides[:3]),
        context,
    )
    return qkv.view(-1, num_heads + 2 * num_kv_heads, dim)


@cache
def _variant(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    half: int,
    page: int,
    normed: bool,
    scaled: bool,
) -> Variant:
    rest = dim - 2 * half
    return Variant(
        _rope_store,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        HALF=half,
        PAIRS=power_of_two(half),
        REST_BLOCK=power_of_two(rest) if rest else 0,
        BLOCK_DIM=power_of_two(dim),
        PAGE=page,
        HEADS=HEADS,
        Q_TILES=ceil_div(num_heads, HEADS),
        NORM=normed,
        SCALED=scaled,
        num_warps=2,
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_store(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    query_scales,
    positions,
    slots,
    keys,
    values,
    eps,
    angle_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    Q_TILES: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    line = qkv + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    position = tl.load(positions + token).to(tl.int64)
    angle = position * angle_stride
    head = tl.arange(0, HEADS)[:, None]
    if tile < Q_TILES:
        head += tile * HEADS
        _norm_rope_store(
            line + head * DIM,
            line,
            line,
            head < NUM_HEADS,
            False,
            q_norm,
            cos + angle,
            sin + angle,
            query_scales + position if SCALED else query_scales,
            eps,
            DIM,
            HALF,
            PAIRS,
            REST_BLOCK,
            NORM,
            SCALED,
            False,
        )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        head += (tile - Q_TILES) * HEADS
        valid = head < NUM_KV_HEADS
        at = (slot // PAGE) * block_stride + (slot % PAGE) * slot_stride + head * head_stride
        block = (slot // PAGE) * block_stride
        scales = scale_at(keys + block, head, slot % PAGE, NUM_KV_HEADS, DIM, PAGE)
        _norm_rope_store(
            line + (NUM_HEADS + head) * DIM,
            keys + at,
            scales,
            valid,
            slot >= 0,
            k_norm,
            cos + angle,
            sin + angle,
            query_scales,
            eps,
            DIM,
            HALF,
            PAIRS,
            REST_BLOCK,
            NORM,
            False,
            True,
        )
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        mask = valid & (channel < DIM) & (slot >= 0)
        value_at = line + (NUM_HEADS + NUM_KV_HEADS + head) * DIM + channel
        if values.dtype.element_ty.primitive_bitwidth == 8:
            is_channel = valid & (channel < DIM)
            value = tl.load(value_at, mask=is_channel, other=0.0).to(tl.float32)
            largest = largest_of(value)
            element = quantised(value, largest, values.dtype.element_ty)
            tl.store(values + at + channel, element, mask=mask)
            if values.dtype.element_ty == tl.int8:
                scales = scale_at(values + block, head, slot % PAGE, NUM_KV_HEADS, DIM, PAGE)
                tl.store(scales, largest / 127.0, mask=valid & (slot >= 0))
            rounded = dequantised(element, largest).to(value_at.dtype.element_ty)
            tl.store(value_at, rounded, mask=is_channel)
        else:
            value = tl.load(value_at, mask=mask)
            tl.store(values + at + channel, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope_store(
    heads,
    cache,
    scales,
    valid,
    cached,
    weight,
    cos,
    sin,
    multiplier,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Normalise, rotate and, if SCALED, multiply the heads at the addresses `heads`, [heads, 1], in
    place. If `cached`, also store them in `cache`, and for int8 their `scales`. Results are rounded
    after each operation, as separate kernels would."""
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < HALF
    mask = valid & inside
    dtype = heads.dtype.element_ty
    first = tl.load(heads + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(heads + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + pair, mask=inside, other=0.0)
    sine = tl.load(sin + pair, mask=inside, other=0.0)
    if REST_BLOCK > 0:
        channel = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest = tl.load(heads + channel, mask=valid & (channel < DIM), other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1, keep_dims=True)
        square += tl.sum(second * second, axis=1, keep_dims=True)
        if REST_BLOCK > 0:
            square += tl.sum(rest * rest, axis=1, keep_dims=True)
        inverse = tl.rsqrt(square / DIM + eps)
        scale = tl.load(weight + pair, mask=inside, other=0.0)
        first = times_weight(first * inverse, scale, dtype).to(tl.float32)
        scale = tl.load(weight + HALF + pair, mask=inside, other=0.0)
        second = times_weight(second * inverse, scale, dtype).to(tl.float32)
        if REST_BLOCK > 0:
            scale_rest = tl.load(weight + channel, mask=channel < DIM, other=0.0)
            rest = times_weight(rest * inverse, scale_rest, dtype).to(tl.float32)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    if SCALED:
        by = tl.load(multiplier).to(dtype).to(tl.float32)
        first, second = first.to(dtype).to(tl.float32) * by, second.to(dtype).to(tl.float32) * by
        if REST_BLOCK > 0:
            rest *= by
    to = cache.dtype.element_ty
    is_8_bit: tl.constexpr = CACHE and cache.dtype.element_ty.primitive_bitwidth == 8
    if is_8_bit:
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        largest = tl.maximum(largest_of(first), largest_of(second))
        if REST_BLOCK > 0:
            largest = tl.maximum(largest, largest_of(rest))
            element = quantised(rest, largest, to)
            tl.store(cache + channel, element, mask=valid & (channel < DIM) & cached)
            rest = dequantised(element, largest)
        element = quantised(first, largest, to)
        tl.store(cache + pair, element, mask=mask & cached)
        first = dequantised(element, largest)
        element = quantised(second, largest, to)
        tl.store(cache + HALF + pair, element, mask=mask & cached)
        second = dequantised(element, largest)
        if to == tl.int8:
            tl.store(scales, largest / 127.0, mask=valid & cached)
    tl.store(heads + pair, first.to(dtype), mask=mask)
    tl.store(heads + HALF + pair, second.to(dtype), mask=mask)
    if REST_BLOCK > 0:
        tl.store(heads + channel, rest.to(dtype), mask=valid & (channel < DIM))
    if CACHE and not is_8_bit:
        tl.store(cache + pair, first.to(dtype).to(to), mask=mask & cached)
        tl.store(cache + HALF + pair, second.to(dtype).to(to), mask=mask & cached)
        if REST_BLOCK > 0:
            stored_rest = valid & (channel < DIM) & cached
            tl.store(cache + channel, rest.to(dtype).to(to), mask=stored_rest)
