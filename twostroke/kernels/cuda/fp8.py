"""Products with weights in fp8 (e4m3); `kernels/fp8.py` says what they stand for.

    one row     the weight goes past once and is added up in fp32, as in `product.py`
    few rows    tiles of the weight become the activations' type in registers; nothing is rounded
    more rows   activations are quantised, and the matrix units multiply e4m3 with e4m3: by tiles
                here where the weight's bytes decide, by the library where arithmetic does

Where a matrix has fewer tiles than the card has room for, several programs share the columns of a
tile: each has a part of K, and whoever arrives last adds the parts up, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.elementwise import act_and_mul, gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.pdl import fetch_to_l2, launch_options, wait_for_previous
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.fp8 import (
    ARRIVALS_COLUMNS,
    E4M3,
    LARGEST,
    SMALLEST_SCALE,
    Fp8Rows,
    Fp8Weight,
    dequantised,
)

# Rows whose products have tiles here, the activations as they are; with more of them the weight is
# dequantised as a whole, and the library multiplies.
MOST_WEIGHT_ONLY = 256
MOST_TILED = 128  # rows of e4m3 whose products have tiles here; the library has the rest
LIBRARY_STEP = 16  # the library takes matrices whose sizes are multiples of it
PROGRAMS, FEW_PROGRAMS = 512, 256  # of a matrix whose K is split; the latter of e4m3 activations
NARROW = 4096  # columns of a matrix that is cut into narrower tiles, for as many programs
LONG = 8192  # of K: where 128 rows are faster in tiles that share it than by the library
DEQUANTISED = 2048  # numbers of a program
FETCHED = tl.constexpr(
    512
)  # bytes of each column that are on their way before a tile's launch waits


@dataclass(frozen=True, slots=True)
class Streaming:
    columns: int  # of a program
    inner: int  # of K, at one time
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    columns: int  # of each half, if gated
    inner: int
    splits: int  # of K
    weight_first: bool  # the weight is the left operand: the matrix units take 64 of its rows
    num_warps: int
    num_stages: int


def streaming(weight: Fp8Weight, gated: bool) -> Streaming | None:
    """Of one row; None where nothing here divides K or a group."""
    group, inner = _group(weight), weight.values.shape[1]
    ways = (Streaming(1, 512, 1),) if gated else (Streaming(4, 1024, 2), Streaming(4, 512, 2))
    for way in (*ways, Streaming(8, 128, 4)):
        if inner % way.inner == 0 and (group % way.inner == 0 or not way.inner % group):
            return way
    return None


def tiling(rows: int, weight: Fp8Weight, gated: bool, quantised: bool) -> Tiling | None:
    """None where the library is faster, or nothing here divides K or a group. `quantised`: the
    activations are e4m3."""
    columns, inner = weight.values.shape
    block = min(128, max(16, power_of_two(rows)))
    if rows > (MOST_TILED if quantised else MOST_WEIGHT_ONLY):
        return None
    if quantised and block > 64 and (gated or inner < LONG):
        return None
    largest = 128 if block > 64 or (not quantised and block > 32) or (gated and block > 16) else 256
    sizes = (n for n in (256, 128, 64) if n <= largest)
    step = next((n for n in sizes if inner % n == 0 and _group(weight) % n == 0), None)
    if step is None:
        return None
    few = block == 16 and not quantised
    tile = 32 if few and not gated and columns <= NARROW else 64
    splits = 1
    if not gated and rows <= block:
        programs, steps = (FEW_PROGRAMS, 8 if block == 16 else 14) if quantised else (PROGRAMS, 4)
        splits = min(programs // ceil_div(columns, tile), inner // step // steps)
        splits = 1 << max(0, splits.bit_length() - 1)
    stages = 3 if block == 128 or (gated and block == 16) or (gated and not quantised) else 4
    return Tiling(block, tile, step, splits, block >= 64 or quantised, 4, stages)


def _group(weight: Fp8Weight) -> int:
    """Columns that share a scale."""
    return weight.values.shape[1] // weight.scale.shape[1]


# ── calls ───────────────────────────────────────────────────────────────────────────────────


def fp8_product(
    x: torch.Tensor, weight: Fp8Weight, *, pdl: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ what the weight stands for, transposed; to `out`, contiguous, if it is given."""
    if _is_plain(x):
        streamed = streaming(weight, gated=False) if x.shape[0] == 1 else None
        if streamed is not None:
            return stream(x, weight, streamed, None, pdl, out)
        tuned = tiling(x.shape[0], weight, gated=False, quantised=False)
        if tuned is not None:
            return tiled(x, None, weight, tuned, None, pdl, out)
    whole = dequantise(weight, x.dtype)
    return F.linear(x, whole) if out is None else torch.mm(x, whole.t(), out=out)


def fp8_gated_product(
    x: torch.Tensor, weight: Fp8Weight, activation: Activation, *, pdl: bool = False
) -> torch.Tensor:
    """activation(x @ first half of the weight) · (x @ second half), rounded as by `act_and_mul`."""
    if _is_plain(x):
        streamed = streaming(weight, gated=True) if x.shape[0] == 1 else None
        if streamed is not None:
            return stream(x, weight, streamed, activation, pdl)
        tuned = tiling(x.shape[0], weight, gated=True, quantised=False)
        if tuned is not None:
            return tiled(x, None, weight, tuned, activation, pdl)
    return act_and_mul(fp8_product(x, weight), activation, pdl=pdl)


def fp8_rows_product(
    x: Fp8Rows, weight: Fp8Weight, *, pdl: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of both as they are quantised, where the weight has one scale a row."""
    tuned = tiling(len(x.values), weight, gated=False, quantised=True)
    if tuned is not None and x.dtype.itemsize == 2:
        return tiled(x.values, x, weight, tuned, None, pdl, out)
    if all(size % LIBRARY_STEP == 0 for size in weight.values.shape):
        return library_product(x, weight, out)
    whole = dequantised(x.values, x.scale.unsqueeze(1), x.dtype)
    return fp8_product(whole, weight, out=out)


def fp8_rows_gated_product(
    x: Fp8Rows,
    weight: Fp8Weight,
    activation: Activation,
    *,
    pdl: bool = False,
    to_fp8: bool = False,
) -> torch.Tensor | Fp8Rows:
    """The gated product of both, rounded as by `act_and_mul`; quantised again if asked for."""
    tuned = tiling(len(x.values), weight, gated=True, quantised=True)
    if tuned is not None and x.dtype.itemsize == 2:
        acted = tiled(x.values, x, weight, tuned, activation, pdl)
        return fp8_rows(acted, pdl=pdl) if to_fp8 else acted
    gate_up = fp8_rows_product(x, weight, pdl=pdl)
    act = fp8_act_and_mul if to_fp8 else act_and_mul
    return act(gate_up, activation, pdl=pdl)


def library_product(x: Fp8Rows, weight: Fp8Weight, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is None:
        out = torch.empty(len(x.values), len(weight.values), dtype=x.dtype, device=x.values.device)
    if x.values.is_meta:
        return out  # there is nothing to compile
    # Scales of rows and columns go with results in bf16 alone.
    made = out if x.dtype == torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scale.unsqueeze(1),
        scale_b=weight.scale.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        out=made,
    )
    return out if made is out else out.copy_(made)


def dequantise(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """What the weight stands for, whole."""
    columns, inner = weight.values.shape
    out = torch.empty(columns, inner, dtype=dtype, device=weight.values.device)
    # Rows along the grid's x: its y ends at 65,535.
    grid = (columns, ceil_div(inner, DEQUANTISED))
    variant = _dequantise_variant(inner, _group(weight))
    variant(grid, (weight.values, weight.scale, out), (), ())
    return out


@cache
def _dequantise_variant(inner: int, group: int) -> Variant:
    return Variant(_dequantise, K=inner, GROUP=group, BLOCK=DEQUANTISED, num_warps=4)


def fp8_rows(x: torch.Tensor, *, pdl: bool = False) -> Fp8Rows:
    """Activations [T, N], quantised token by token."""
    return _quantise(x, x.shape[1], None, pdl)


def fp8_act_and_mul(gate_up: torch.Tensor, activation: Activation, *, pdl: bool = False) -> Fp8Rows:
    """[T, 2N] → [T, N]: the activation of the first half times the second, rounded as by
    `act_and_mul`, and quantised."""
    return _quantise(gate_up, gate_up.shape[1] // 2, activation, pdl)


def _quantise(x: torch.Tensor, width: int, activation: Activation | None, pdl: bool) -> Fp8Rows:
    assert x.stride(1) == 1
    values = torch.empty(len(x), width, dtype=E4M3, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    variant = _quantise_variant(width, activation, pdl)
    variant((len(x),), (x, values, scale), (), (x.stride(0),))
    return Fp8Rows(values, scale, x.dtype)


@cache
def _quantise_variant(width: int, activation: Activation | None, pdl: bool) -> Variant:
    block = power_of_two(width)
    return Variant(
        _quantise_row,
        WIDTH=width,
        BLOCK=block,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        MOST=LARGEST,
        LEAST=SMALLEST_SCALE,
        num_warps=min(max(block // 512, 2), 16),
        **launch_options(pdl),
    )


def _is_plain(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.dtype.itemsize == 2


def stream(
    x: torch.Tensor,
    weight: Fp8Weight,
    tuned: Streaming,
    activation: Activation | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of one row, or with an activation the gated one."""
    columns, inner = weight.values.shape
    columns = columns if activation is None else columns // 2
    if out is None:
        out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    variant = _stream_variant(columns, inner, _group(weight), tuned, activation, pdl)
    grid = (ceil_div(columns, tuned.columns),)
    variant(grid, (x, weight.values, weight.scale, out), (), ())
    return out


@cache
def _stream_variant(
    columns: int, inner: int, group: int, tuned: Streaming, activation: Activation | None, pdl: bool
) -> Variant:
    return Variant(
        _stream,
        N=columns,
        K=inner,
        GROUP=group,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=1,
        **launch_options(pdl),
    )


def tiled(
    x: torch.Tensor,
    quantised: Fp8Rows | None,
    weight: Fp8Weight,
    tuned: Tiling,
    activation: Activation | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, or with an activation the gated one; `x` is what `quantised` holds, if there is
    that."""
    rows, inner = x.shape
    columns = weight.values.shape[0] if activation is None else weight.values.shape[0] // 2
    if out is None:
        dtype = x.dtype if quantised is None else quantised.dtype
        out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    grid = (ceil_div(columns, tuned.columns), ceil_div(rows, tuned.rows), tuned.splits)
    partial = arrived = None
    if tuned.splits > 1:
        assert grid[1] == 1
        assert tuned.columns >= ARRIVALS_COLUMNS
        size = grid[0] * tuned.splits * tuned.rows * tuned.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = weight.arrived
    x_scale = None if quantised is None else quantised.scale
    variant = _tiled_variant(columns, inner, _group(weight), tuned, activation, pdl)
    tensors = (x, x_scale, weight.values, weight.scale, out, partial, arrived)
    variant(grid, tensors, (rows,), ())
    return out


@cache
def _tiled_variant(
    columns: int, inner: int, group: int, tuned: Tiling, activation: Activation | None, pdl: bool
) -> Variant:
    return Variant(
        _tiled,
        N=columns,
        K=inner,
        GROUP=group,
        ROWS=tuned.rows,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        SPLITS=tuned.splits,
        WEIGHT_FIRST=tuned.weight_first,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **launch_options(pdl),
    )


# ── kernels ─────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _stream(
    x,
    weight,
    scale,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    # [columns, groups, numbers of a group], or of a part of one
    PART: tl.constexpr = INNER if INNER < GROUP else GROUP
    PARTS: tl.constexpr = INNER // PART
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, PARTS)
    inner = part[:, None] * PART + tl.arange(0, PART)[None, :]
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64)
    at = weight + (line * K)[:, None, None] + inner[None, :, :]
    scale_at = scale + (line * (K // GROUP))[:, None] + (part * PART // GROUP)[None, :]
    HALF: tl.constexpr = N * K
    HALF_SCALES: tl.constexpr = N * (K // GROUP)
    first = tl.load(at, eviction_policy="evict_first")
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
    wait_for_previous(PDL)
    of_x = tl.load(x + inner).to(tl.float32)[None, :, :]
    sums = _scaled(of_x * first.to(tl.float32), scale_at, GROUP < K)
    if GATED:
        others = _scaled(of_x * second.to(tl.float32), scale_at + HALF_SCALES, GROUP < K)
    for start in tl.range(INNER, K, INNER):
        of_x = tl.load(x + start + inner).to(tl.float32)[None, :, :]
        first = tl.load(at + start, eviction_policy="evict_first")
        factor_at = scale_at + start // GROUP
        if GATED:
            second = tl.load(at + HALF + start, eviction_policy="evict_first")
            others += _scaled(of_x * second.to(tl.float32), factor_at + HALF_SCALES, GROUP < K)
        sums += _scaled(of_x * first.to(tl.float32), factor_at, GROUP < K)
    # One scale a row, if not each group's own: at the end.
    result = tl.sum(tl.sum(_scaled(sums, scale_at, GROUP == K), axis=2), axis=1)
    if GATED:
        others = _scaled(others, scale_at + HALF_SCALES, GROUP == K)
        other = tl.sum(tl.sum(others, axis=2), axis=1)
        result = gate_times_up(result, other, out.dtype.element_ty, ACTIVATION)
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _scaled(products, scale_at, WANTED: tl.constexpr):
    """[columns, groups, numbers] times what is at [columns, groups]."""
    if WANTED:
        products *= tl.load(scale_at)[:, :, None]
    return products


@triton.jit(do_not_specialize=["num_rows"])
def _tiled(
    x,
    x_scale,
    weight,
    scale,
    out,
    partial,
    arrived,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    block, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    line = tl.minimum(column, N - 1).to(tl.int64)
    GROUPS: tl.constexpr = K // GROUP
    HALF: tl.constexpr = N * K
    HALF_SCALES: tl.constexpr = N * GROUPS
    EACH: tl.constexpr = (K // INNER + SPLITS - 1) // SPLITS * INNER
    if PDL:
        AHEAD: tl.constexpr = EACH if EACH < FETCHED else FETCHED
        begin = weight + line * K + tl.minimum(split * EACH, K - AHEAD)
        fetch_to_l2(begin, AHEAD)
        if GATED:
            fetch_to_l2(begin + HALF, AHEAD)
    wait_for_previous(PDL)
    at = weight + (line * K)[:, None] + inner[None, :]
    x_at = x + row[:, None] * K + inner[None, :]
    there = (row < num_rows)[:, None]
    if WEIGHT_FIRST:
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = sums
    for start in tl.range(split * EACH, tl.minimum(K, (split + 1) * EACH), INNER):
        part = tl.load(x_at + start, mask=there, other=0.0)
        first = tl.load(at + start, eviction_policy="evict_first")
        factor_at = scale + line * GROUPS + start // GROUP
        sums = _add_product(sums, part, first, factor_at, GROUPS > 1, WEIGHT_FIRST)
        if GATED:
            second = tl.load(at + HALF + start, eviction_policy="evict_first")
            factor_at += HALF_SCALES
            others = _add_product(others, part, second, factor_at, GROUPS > 1, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
        others = tl.trans(others)
    if SPLITS == 1:
        _finish(sums, others, row, column, there, x_scale, scale, out, N, GROUPS, GATED, ACTIVATION)
    else:
        tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        SIZE: tl.constexpr = ROWS * COLUMNS
        to = partial + block.to(tl.int64) * (SPLITS * SIZE) + tile
        tl.store(to + split * SIZE, sums)
        # All threads' stores before the count that publishes them.
        tl.debug_barrier()
        if tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived + block, 0)
            sums = tl.load(to)
            for other in tl.range(1, SPLITS):
                sums += tl.load(to + other * SIZE)
            _finish(
                sums, sums, row, column, there, x_scale, scale, out, N, GROUPS, GATED, ACTIVATION
            )


@triton.jit
def _to_bf16(values):
    """e4m3 → bf16. There is an instruction to fp16 alone, and from there it is three more: too slow
    for the memory. So the bits are moved to where bf16 has them, and the exponent, whose bias is
    greater by 120, is put right by a product; two numbers at a time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, x, y;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 x, a, 0x7f007f00;
        and.b32 y, b, 0x7f007f00;
        shr.b32 x, x, 4;
        shr.b32 y, y, 4;
        lop3.b32 x, a, 0x80008000, x, 0xea;
        lop3.b32 y, b, 0x80008000, y, 0xea;
        mov.b32 a, 0x7b807b80;
        mov.b32 b, 0x80008000;
        fma.rn.bf16x2 $0, x, a, b;
        fma.rn.bf16x2 $1, y, a, b;
        }
        """,
        "=r,=r,r",
        [values],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _add_product(sums, x, weight, factor_at, GROUPED: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    if x.dtype == tl.bfloat16:
        weight = _to_bf16(weight)
    elif x.dtype != weight.dtype:
        weight = weight.to(x.dtype)
    if GROUPED:
        factor = tl.load(factor_at)
        if WEIGHT_FIRST:
            sums += tl.dot(weight, tl.trans(x)) * factor[:, None]
        else:
            sums += tl.dot(x, tl.trans(weight)) * factor[None, :]
    elif WEIGHT_FIRST:
        sums = tl.dot(weight, tl.trans(x), sums)
    else:
        sums = tl.dot(x, tl.trans(weight), sums)
    return sums


@triton.jit
def _finish(
    sums,
    others,
    row,
    column,
    there,
    x_scale,
    scale,
    out,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """[rows, columns]: scaled, activated, and stored."""
    there = there & (column < N)[None, :]
    if x_scale is not None:
        of_row = tl.load(x_scale + row[:, None], mask=there, other=0.0)
        sums *= of_row
        others *= of_row
    if GROUPS == 1:
        at = scale + tl.minimum(column, N - 1)
        sums *= tl.load(at)[None, :]
        if GATED:
            others *= tl.load(at + N)[None, :]
    if GATED:
        sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
    to = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _dequantise(values, scale, out, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < K
    factor = tl.load(scale + row * (K // GROUP) + column // GROUP, mask=mask, other=0.0)
    wide = tl.load(values + row * K + column, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out + row * K + column, wide.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _quantise_row(
    x,
    values,
    scale,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = x + row * stride + column
    wide = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
        kind: tl.constexpr = x.dtype.element_ty
        wide = gate_times_up(wide, up, kind, ACTIVATION).to(kind).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(wide), axis=0) / MOST, LEAST)
    small = tl.minimum(tl.maximum(wide / unit, -MOST), MOST)
    tl.store(values + row * WIDTH + column, small.to(values.dtype.element_ty), mask=mask)
    tl.store(scale + row, unit)
