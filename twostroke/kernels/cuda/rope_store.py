"""What stands between the QKV product and attention, in one launch.

qkv row ─┬─ query heads ─▶ norm · rope ─▶ out
         ├─ key heads   ─▶ norm · rope ─▶ out, keys[slot]
         └─ value heads ────────────────▶ out, values[slot]

`out` may be the row itself. What lies there in turn is what a chunk that begins its sequence sees.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.early import await_last, launch_options
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two

HEADS = 8  # heads of one program


def rope_store(
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
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """[T, (H + 2K) · D] → [T, H + 2K, D], in place if no `out` is given; keys and values also go
    to their slots, none where it is < 0.

    `cos` and `sin` are [max_len, dim / 2] and are read at `positions`; channels past dim pass
    through.
    """
    (_, page, _, dim), strides = keys.shape, keys.stride()
    assert strides == values.stride()
    assert strides[3] == 1
    if out is None:
        out = qkv.view(-1, num_heads + 2 * num_kv_heads, dim)
    assert out.is_contiguous()
    assert qkv.is_contiguous()
    in_place, half = out.data_ptr() == qkv.data_ptr(), cos.shape[1]
    sizes = (num_heads, num_kv_heads, dim, half, page)
    _variant(*sizes, q_norm is not None, in_place, early)(
        (qkv.shape[0], ceil_div(num_heads, HEADS) + ceil_div(num_kv_heads, HEADS)),
        (qkv, q_norm, k_norm, cos, sin, positions, slots, out, keys, values),
        (),
        (eps, qkv.stride(0), cos.stride(0), *strides[:3]),
    )
    return out


@cache
def _variant(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    half: int,
    page: int,
    normed: bool,
    in_place: bool,
    early: bool,
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
        IN_PLACE=in_place,
        num_warps=2,
        **launch_options(early),
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_store(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slots,
    out,
    keys,
    values,
    eps,
    qkv_stride,
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
    IN_PLACE: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_last(EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    line = qkv + token * qkv_stride
    to = out + token * (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    angle = tl.load(positions + token) * angle_stride
    head = tl.arange(0, HEADS)[:, None]
    if tile < Q_TILES:
        head += tile * HEADS
        _norm_rope_store(
            line + head * DIM,
            to + head * DIM,
            to,
            head < NUM_HEADS,
            False,
            q_norm,
            cos + angle,
            sin + angle,
            eps,
            DIM,
            HALF,
            PAIRS,
            REST_BLOCK,
            NORM,
            False,
        )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        head += (tile - Q_TILES) * HEADS
        valid = head < NUM_KV_HEADS
        at = (slot // PAGE) * block_stride + (slot % PAGE) * slot_stride + head * head_stride
        _norm_rope_store(
            line + (NUM_HEADS + head) * DIM,
            to + (NUM_HEADS + head) * DIM,
            keys + at,
            valid,
            slot >= 0,
            k_norm,
            cos + angle,
            sin + angle,
            eps,
            DIM,
            HALF,
            PAIRS,
            REST_BLOCK,
            NORM,
            True,
        )
        channel = tl.arange(0, BLOCK_DIM)[None, :]
        mask = valid & (channel < DIM)
        place = (NUM_HEADS + NUM_KV_HEADS + head) * DIM + channel
        value = tl.load(line + place, mask=mask)
        if not IN_PLACE:
            tl.store(to + place, value, mask=mask)
        kept = value.to(values.dtype.element_ty)
        tl.store(values + at + channel, kept, mask=mask & (slot >= 0))


@triton.jit
def _norm_rope_store(
    source,
    target,
    cache,
    valid,
    cached,
    weight,
    cos,
    sin,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Heads at `source` [heads, 1] to `target`, and to `cache` if `cached`; rounded after each
    step, as `reference` does."""
    pair = tl.arange(0, PAIRS)[None, :]
    inside = pair < HALF
    mask = valid & inside
    kind = source.dtype.element_ty
    first = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + pair, mask=inside, other=0.0)
    sine = tl.load(sin + pair, mask=inside, other=0.0)
    if REST_BLOCK > 0:
        channel = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest = tl.load(source + channel, mask=valid & (channel < DIM), other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, axis=1, keep_dims=True)
        square += tl.sum(second * second, axis=1, keep_dims=True)
        if REST_BLOCK > 0:
            square += tl.sum(rest * rest, axis=1, keep_dims=True)
        inverse = tl.rsqrt(square / DIM + eps)
        scale = tl.load(weight + pair, mask=inside, other=0.0)
        first = scaled(first * inverse, scale, kind)
        scale = tl.load(weight + HALF + pair, mask=inside, other=0.0)
        second = scaled(second * inverse, scale, kind)
        if REST_BLOCK > 0:
            scale_rest = tl.load(weight + channel, mask=channel < DIM, other=0.0)
            rest = scaled(rest * inverse, scale_rest, kind)
    first, second = first * cosine - second * sine, second * cosine + first * sine
    tl.store(target + pair, first.to(kind), mask=mask)
    tl.store(target + HALF + pair, second.to(kind), mask=mask)
    if REST_BLOCK > 0:
        tl.store(target + channel, rest.to(kind), mask=valid & (channel < DIM))
    if CACHE:
        to = cache.dtype.element_ty
        tl.store(cache + pair, first.to(kind).to(to), mask=mask & cached)
        tl.store(cache + HALF + pair, second.to(kind).to(to), mask=mask & cached)
        if REST_BLOCK > 0:
            there = valid & (channel < DIM) & cached
            tl.store(cache + channel, rest.to(kind).to(to), mask=there)


@triton.jit
def scaled(x, scale, kind: tl.constexpr):
    return (x.to(kind).to(tl.float32) * scale.to(tl.float32)).to(kind).to(tl.float32)
