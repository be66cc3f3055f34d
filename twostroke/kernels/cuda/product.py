"""Products with a weight, [M, K] × [N, K]ᵀ, and the gated pair of an MLP.

    one row     a program has a column or two of the result, and all of K: the weight goes past it
                once, sixteen bytes a thread a load, and is added up in registers
    few rows    of the gated pair: tiles of both halves by the matrix units, the activation at the
                end, so that neither half is ever written
    the rest    the library's

A program of one row loads its first part of the weight before it waits for the previous launch.
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

MAX_STREAMED = 8192  # elements of a result of several rows: each row reads the weight again
SMALL_WEIGHT = 16 << 20  # that the L2 has for it
MAX_TILED = 64  # rows of a gated pair that the matrix units have


@dataclass(frozen=True, slots=True)
class RowTiling:
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def streaming(rows: int, weight: torch.Tensor) -> Streaming | None:
    """Choose how the weight is streamed; None where the library is faster, or no size here divides
    K."""
    columns, inner = weight.shape
    small = weight.numel() * weight.itemsize <= SMALL_WEIGHT
    if inner % 512 or (rows > 1 and not (small and rows * columns <= MAX_STREAMED)):
        return None
    return Streaming(2 if rows == 1 else 4, 1024 if inner % 1024 == 0 else 512, 4)


def tiling(rows: int, weight: torch.Tensor) -> RowTiling | None:
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
    """Return x @ weight.T, added up in fp32 and rounded once; in `out`, contiguous, if it is
    given."""
    tuned = streaming(x.shape[0], weight) if _is_plain(x, weight) else None
    if tuned is not None:
        return stream(x, weight, tuned, None, context, out)
    return dense_product(x, weight, out)


def exact_product(
    x: torch.Tensor, weight: torch.Tensor, context: StepContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """Return x @ weight.T in fp32, whatever the types of the two."""
    if x.dtype == weight.dtype and x.dtype.itemsize == 2:
        tuned = streaming(x.shape[0], weight) if _is_plain(x, weight) else None
        if tuned is not None:
            out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
            return stream(x, weight, tuned, None, context, out)
        if not x.is_cpu:  # where the library has no such product
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def gated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: Activation,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return activation(x @ first half of the weight) · (x @ second half), rounded as by
    `act_and_mul`."""
    if _is_plain(x, weight):
        streamed = streaming(x.shape[0], weight)
        if streamed is not None:
            return stream(x, weight, streamed, activation, context)
        tiles = tiling(x.shape[0], weight)
        if tiles is not None:
            return tiled(x, weight, tiles, activation, context)
    return act_and_mul(F.linear(x, weight), activation, context)


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.is_contiguous() and weight.is_contiguous() and x.dtype.itemsize == 2


def stream(
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
    # One dimension: a second one ends at 65,535, and a large vocabulary has more.
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


def tiled(
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
    # The rows of a column are neighbours: the second finds the weight in the L2.
    program = tl.program_id(0)
    row = 0 if ONE_ROW else (program % num_rows).to(tl.int64)
    block = program if ONE_ROW else program // num_rows
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    # Columns past the end read the last row of the weight again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64) * K
    at = weight + line[:, None] + inner[None, :]
    HALF: tl.constexpr = N * K
    part = tl.load(at, eviction_policy="evict_first")
    if GATED:
        second = tl.load(at + HALF, eviction_policy="evict_first")
    wait_for_previous(DEPENDENT)
    x_at = x + row * K + inner
    of_x = tl.load(x_at).to(tl.float32)[None, :]
    sums = of_x * part.to(tl.float32)
    if GATED:
        others = of_x * second.to(tl.float32)
    for start in tl.range(INNER, K, INNER):
        of_x = tl.load(x_at + start).to(tl.float32)[None, :]
        part = tl.load(at + start, eviction_policy="evict_first")
        if GATED:
            second = tl.load(at + HALF + start, eviction_policy="evict_first")
            others += of_x * second.to(tl.float32)
        sums += of_x * part.to(tl.float32)
    result = tl.sum(sums, axis=1)
    if GATED:
        result = gate_times_up(result, tl.sum(others, axis=1), out.dtype.element_ty, ACTIVATION)
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
    line = tl.minimum(column, N - 1).to(tl.int64) * K
    at = weight + line[:, None] + inner[None, :]
    x_at = x + row[:, None] * K + inner[None, :]
    there = (row < num_rows)[:, None]
    HALF: tl.constexpr = N * K
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, K, INNER):
        part = tl.load(x_at + start, mask=there, other=0.0)
        gate = tl.load(at + start, eviction_policy="evict_first")
        up = tl.load(at + HALF + start, eviction_policy="evict_first")
        first = tl.dot(part, tl.trans(gate), first)
        second = tl.dot(part, tl.trans(up), second)
    result = gate_times_up(first, second, out.dtype.element_ty, ACTIVATION)
    to = out + row[:, None] * N + column[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=there & (column < N)[None, :])
