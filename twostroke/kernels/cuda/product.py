"""Matrix products with a 16-bit weight, [M, K] × [N, K]ᵀ, and the gated product of an MLP.

    one row     `_stream`: a program computes one or two columns of the result over all of K. It
                reads its rows of the weight once, and each thread loads sixteen bytes at a time and
                accumulates in registers
    few rows    `_tiled`, gated products only: tensor cores compute the gate and the up tile, and
                the program applies the activation, so that neither product goes through memory
    other       cuBLAS, through torch

`_stream` loads the first block of the weight before it waits for the previous kernel (programmatic
dependent launch), because the weight does not depend on that kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import act_and_mul, gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.tiles import Streaming, dense_product, num_columns, stream_options
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext

# `_stream` reads the weight once for each row. Several rows are streamed only if the weight fits in
# the L2 cache and the result has at most this many elements.
MAX_STREAMED = 8192
SMALL_WEIGHT = 16 << 20  # bytes: a weight of this size stays in the L2 cache
MAX_TILED = 64  # rows of x for which `_tiled` is used


@dataclass(frozen=True, slots=True)
class RowTiling:
    """The tile of a program of `_tiled`. A tile has all rows of x."""

    columns: int  # of the result
    inner: int  # of K, in one iteration
    num_warps: int
    num_stages: int


def choose_streaming(rows: int, weight: torch.Tensor) -> Streaming | None:
    """Choose the launch of `_stream`. None if cuBLAS is faster, or if no block size divides K.
    `tests/gpu/kernels_time.py` times other sizes."""
    columns, inner = weight.shape
    small = weight.numel() * weight.itemsize <= SMALL_WEIGHT
    if inner % 512 or (rows > 1 and not (small and rows * columns <= MAX_STREAMED)):
        return None
    return Streaming(2 if rows == 1 else 4, 1024 if inner % 1024 == 0 else 512, 4)


def choose_tiling(rows: int, weight: torch.Tensor) -> RowTiling | None:
    """Choose the launch of `_tiled`. None if cuBLAS is faster, or if no block size divides K."""
    columns, inner = weight.shape
    if rows > MAX_TILED or inner % 256:
        return None
    if columns * inner * weight.itemsize <= SMALL_WEIGHT:
        return RowTiling(32, 128, 4, 4)
    return RowTiling(32, 256, 4, 3) if rows <= 16 else RowTiling(64, 128, 4, 3)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T, accumulated in fp32 and rounded once. The result is written to `out`,
    which must be contiguous, if `out` is given."""
    tuned = choose_streaming(x.shape[0], weight) if _is_contiguous_16_bit(x, weight) else None
    if tuned is not None:
        return launch_streaming(x, weight, tuned, None, context, out)
    return dense_product(x, weight, out)


def exact_product(
    x: torch.Tensor, weight: torch.Tensor, context: StepContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """Return x @ weight.T in fp32. `x` and `weight` may have any dtype."""
    if x.dtype == weight.dtype and x.dtype.itemsize == 2:
        tuned = choose_streaming(x.shape[0], weight) if _is_contiguous_16_bit(x, weight) else None
        if tuned is not None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
            return launch_streaming(x, weight, tuned, None, context, out)
        if not x.is_cpu:  # torch has no 16-bit product with an fp32 result on a CPU
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def gated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: Activation,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return activation(x @ gate.T) · (x @ up.T), with the rounding of `act_and_mul`. The first
    half of the weight's rows is `gate`, the second half is `up`."""
    if _is_contiguous_16_bit(x, weight):
        streamed = choose_streaming(x.shape[0], weight)
        if streamed is not None:
            return launch_streaming(x, weight, streamed, activation, context)
        tiles = choose_tiling(x.shape[0], weight)
        if tiles is not None:
            return launch_tiled(x, weight, tiles, activation, context)
    return act_and_mul(F.linear(x, weight), activation, context)


def _is_contiguous_16_bit(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.is_contiguous() and weight.is_contiguous() and x.dtype.itemsize == 2


def launch_streaming(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: Streaming,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product, or with an activation the gated product."""
    (rows, inner), columns = x.shape, num_columns(len(weight), activation)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    # The grid has one dimension, because the second dimension of a grid is at most 65,535, and a
    # large vocabulary has more columns.
    grid = (rows * ceil_div(columns, tuned.columns),)
    variant = _stream_variant(rows == 1, columns, inner, tuned, activation)
    variant(grid, (x, weight, out), (rows,), context=context)
    return out


@cache
def _stream_variant(
    one_row: bool,
    columns: int,
    inner: int,
    tuned: Streaming,
    activation: Activation | None,
) -> Variant:
    return Variant(
        _stream,
        ONE_ROW=one_row,
        N=columns,
        K=inner,
        INNER=tuned.step,
        **stream_options(tuned, activation),
    )


def launch_tiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: RowTiling,
    activation: Activation,
    context: StepContext,
) -> torch.Tensor:
    rows, inner = x.shape
    columns = weight.shape[0] // 2
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    grid, block = (ceil_div(columns, tuned.columns),), max(16, power_of_two(rows))
    variant = _tiled_variant(columns, inner, block, tuned, activation)
    variant(grid, (x, weight, out), (rows,), context=context)
    return out


@cache
def _tiled_variant(
    columns: int, inner: int, block: int, tuned: RowTiling, activation: Activation
) -> Variant:
    return Variant(
        _tiled,
        N=columns,
        K=inner,
        ROWS=block,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        ACTIVATION=activation,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _stream(
    x,
    weight,
    out,
    num_rows,
    ONE_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # Programs of the same columns and different rows are neighbours, so that all but the first read
    # the weight from the L2 cache.
    program = tl.program_id(0)
    row = 0 if ONE_ROW else (program % num_rows).to(tl.int64)
    block = program if ONE_ROW else program // num_rows
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    # Columns past the end read the last row of the weight again, and are dropped.
    weight_row = tl.minimum(column, N - 1).to(tl.int64) * K
    weight_at = weight + weight_row[:, None] + inner[None, :]
    HALF: tl.constexpr = N * K  # from a row of gate to the same row of up
    # Without GATED the whole weight takes the place of gate.
    gate = tl.load(weight_at, eviction_policy="evict_first")
    if GATED:
        up = tl.load(weight_at + HALF, eviction_policy="evict_first")
    wait_for_previous(DEPENDENT)
    x_at = x + row * K + inner
    x_block = tl.load(x_at).to(tl.float32)[None, :]
    gate_sums = x_block * gate.to(tl.float32)
    if GATED:
        up_sums = x_block * up.to(tl.float32)
    for start in tl.range(INNER, K, INNER):
        x_block = tl.load(x_at + start).to(tl.float32)[None, :]
        gate = tl.load(weight_at + start, eviction_policy="evict_first")
        if GATED:
            up = tl.load(weight_at + HALF + start, eviction_policy="evict_first")
            up_sums += x_block * up.to(tl.float32)
        gate_sums += x_block * gate.to(tl.float32)
    result = tl.sum(gate_sums, axis=1)
    if GATED:
        result = gate_times_up(result, tl.sum(up_sums, axis=1), out.dtype.element_ty, ACTIVATION)
    tl.store(out + row * N + column, result.to(out.dtype.element_ty), mask=column < N)


@triton.jit(do_not_specialize=["num_rows"])
def _tiled(
    x,
    weight,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    weight_row = tl.minimum(column, N - 1).to(tl.int64) * K
    weight_at = weight + weight_row[:, None] + inner[None, :]
    x_at = x + row[:, None] * K + inner[None, :]
    is_row = (row < num_rows)[:, None]
    HALF: tl.constexpr = N * K  # from a row of gate to the same row of up
    gate_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, INNER):
        x_block = tl.load(x_at + start, mask=is_row, other=0.0)
        gate = tl.load(weight_at + start, eviction_policy="evict_first")
        up = tl.load(weight_at + HALF + start, eviction_policy="evict_first")
        gate_sums = tl.dot(x_block, tl.trans(gate), gate_sums)
        up_sums = tl.dot(x_block, tl.trans(up), up_sums)
    result = gate_times_up(gate_sums, up_sums, out.dtype.element_ty, ACTIVATION)
    out_at = out + row[:, None] * N + column[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row & (column < N)[None, :])
