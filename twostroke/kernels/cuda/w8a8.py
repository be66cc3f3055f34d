"""Products with weights in fp8 (e4m3) or int8. `kernels/w8a8.py` defines the formats.

    one row     the weight is read once; the products are added up in fp32, as in `product.py`
    few rows    the weight is converted to the activations' dtype in registers, without rounding
    more rows   activations are quantised, and tensor cores multiply e4m3 with e4m3, or int8 with
                int8. int8 always uses the tiles of this module. e4m3 uses these tiles for few rows,
                `w8a8_hopper.py` if the matrix has too few columns to fill a Hopper GPU, and
                otherwise the library

`tiles.py` has the tilings and split-K.
"""

from __future__ import annotations

from functools import cache

import torch

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda import tiles, w8a8_hopper
from twostroke.kernels.cuda import w8a8_kernels as kernels
from twostroke.kernels.cuda.elementwise import act_and_mul, quantised_values
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.tiles import Streaming, Tiling, is_contiguous_16_bit, num_columns
from twostroke.kernels.cuda.w8a8_tiles import TILES
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.w8a8 import (
    E4M3,
    INT8,
    LARGEST,
    MAX_INT8_COLUMNS,
    SMALLEST_SCALE,
    QuantizedActivations,
    W8Weight,
    dequantised,
)

# Maximum rows for the tiles of this module, except int8 with int8. With more rows the library
# multiplies e4m3 with e4m3; with 16-bit activations it multiplies the dequantised weight.
MAX_TILED = 64
LIBRARY_STEP = 16  # the library requires sizes that are multiples of this
PROGRAMS, FEW_PROGRAMS = 512, 256  # maximum programs with split K: 16-bit and 8-bit activations
NARROW = 4096  # matrices with at most this many columns have narrower tiles, for more programs
DEQUANTISED = 2048  # elements that a program dequantises
BAND = 8  # row tiles that are computed at the same time, with many rows
MAX_TUNED = 1024  # int8: with more rows the tiling is the same


def choose_streaming(weight: W8Weight, gated: bool) -> Streaming | None:
    """Choose the launch of the product of one row. None if no step size divides K and the
    groups."""
    inner = weight.values.shape[1]
    step = next((n for n in (512, 256, 128) if inner % n == 0), None)
    if step is None or _group(weight) % 16:
        return None
    if inner % 1024 == 0 and not gated:
        return Streaming(4, 1024, 2, 2)
    return Streaming(1 if gated else 2, step, 1, 4)


def choose_tiling(rows: int, weight: W8Weight, gated: bool, quantised: bool) -> Tiling | None:
    """Choose the tiling. None if the library is faster, or if no step size divides K and the
    groups. `quantised`: the activations have the weight's dtype."""
    columns, inner = weight.values.shape
    if quantised and weight.dtype == INT8:
        return int8_tiling(rows, weight, gated)
    if rows > MAX_TILED:
        return None
    block = max(16, power_of_two(rows))
    step = _step(weight, 128 if block > (16 if gated else 64 if quantised else 32) else 256)
    if step is None:
        return None
    few = block == 16 and not quantised
    tile = 32 if few and not gated and columns <= NARROW else 64
    splits = 1
    if not gated:
        programs, steps = (FEW_PROGRAMS, 8 if block == 16 else 14) if quantised else (PROGRAMS, 4)
        max_splits = min(programs // ceil_div(columns, tile), inner // step // steps)
        splits = tiles.power_of_two_below(max_splits)
    stages = 3 if gated and (block == 16 or not quantised) else 4
    return Tiling(block, tile, step, splits, block >= 64 or quantised, 4, stages)


def int8_key(rows: int, weight: W8Weight, gated: bool) -> str:
    return tiles.table_key("int8", min(rows, MAX_TUNED), tuple(weight.values.shape), gated)


def int8_tiling(rows: int, weight: W8Weight, gated: bool) -> Tiling | None:
    """Choose the tiling of int8 with int8. None if no step size divides K, or if sums could
    overflow int32."""
    columns, inner = weight.values.shape
    known = TILES.get(int8_key(rows, weight, gated))
    found = None if known is None else tiles.of_table(known)
    if isinstance(found, Tiling):
        return found
    block = min(128, max(16, power_of_two(rows)))
    step = _step(weight, 256 if block <= 64 and not gated else 128)
    if step is None or inner > MAX_INT8_COLUMNS:
        return None
    if rows > 128:
        return Tiling(128, 64 if gated else 128, step, 1, False, 8, 4)
    splits = 1
    if not gated:
        max_splits = min(FEW_PROGRAMS // ceil_div(columns, 64), inner // step // 8)
        splits = tiles.power_of_two_below(max_splits)
    weight_first, warps = (True, 4) if block <= 64 else (False, 8)
    return Tiling(block, 64, step, splits, weight_first, warps, 4)


def _step(weight: W8Weight, largest: int) -> int | None:
    """Return the number of elements of K in one iteration."""
    sizes = (n for n in (256, 128, 64) if n <= largest)
    inner, group = weight.values.shape[1], _group(weight)
    return next((n for n in sizes if inner % n == 0 and group % n == 0), None)


def _group(weight: W8Weight) -> int:
    """Return the number of columns that share a scale."""
    return weight.values.shape[1] // weight.scale.shape[1]


# ── calls ───────────────────────────────────────────────────────────────────────────────────


def w8_product(
    x: torch.Tensor,
    weight: W8Weight,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ W.T, where W is the dequantised weight. The result is written to `out`, which must
    be contiguous, if `out` is given."""
    if is_contiguous_16_bit(x):
        streamed = choose_streaming(weight, gated=False) if x.shape[0] == 1 else None
        if streamed is not None:
            return launch_streaming(x, weight, streamed, None, context, out)
        tuned = choose_tiling(x.shape[0], weight, gated=False, quantised=False)
        if tuned is not None:
            return launch_tiled(x, None, weight, tuned, None, context, out)
    return tiles.dense_product(x, dequantise(weight, x.dtype), out)


def w8_gated_product(
    x: torch.Tensor,
    weight: W8Weight,
    activation: Activation,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return activation(x @ gate.T) · (x @ up.T), with the rounding of `act_and_mul`. The first
    half of the weight's rows is `gate`, the second half is `up`."""
    if is_contiguous_16_bit(x):
        streamed = choose_streaming(weight, gated=True) if x.shape[0] == 1 else None
        if streamed is not None:
            return launch_streaming(x, weight, streamed, activation, context)
        tuned = choose_tiling(x.shape[0], weight, gated=True, quantised=False)
        if tuned is not None:
            return launch_tiled(x, None, weight, tuned, activation, context)
    return act_and_mul(w8_product(x, weight), activation, context)


def w8a8_product(
    x: QuantizedActivations,
    weight: W8Weight,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T for quantised activations and a weight with one scale for each row."""
    if w8a8_hopper.can_multiply(x, weight) and (out is None or out.dtype == x.dtype):
        return w8a8_hopper.multiply(x, weight, context, out)
    tuned = _tiling_of_rows(x, weight, gated=False)
    if tuned is not None:
        return launch_tiled(x.values, x, weight, tuned, None, context, out)
    if weight.dtype == E4M3 and all(size % LIBRARY_STEP == 0 for size in weight.values.shape):
        return library_product(x, weight, out)
    whole = dequantised(x.values, x.scale.unsqueeze(1), x.dtype)
    return w8_product(whole, weight, out=out)


def w8a8_gated_product(
    x: QuantizedActivations,
    weight: W8Weight,
    activation: Activation,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    to: torch.dtype | None = None,
) -> torch.Tensor | QuantizedActivations:
    """Return the gated product, with the rounding of `act_and_mul`. `to`: return the result
    quantised to this dtype."""
    tuned = _tiling_of_rows(x, weight, gated=True)
    if tuned is not None:
        acted = launch_tiled(x.values, x, weight, tuned, activation, context)
        return acted if to is None else quantise_activations(acted, to, context)
    gate_up = w8a8_product(x, weight, context)
    if to is None:
        return act_and_mul(gate_up, activation, context)
    return quantised_act_and_mul(gate_up, activation, to, context)


def _tiling_of_rows(x: QuantizedActivations, weight: W8Weight, gated: bool) -> Tiling | None:
    assert x.values.dtype == weight.dtype
    if weight.dtype == E4M3 and x.dtype.itemsize != 2:
        return None
    return choose_tiling(len(x.values), weight, gated, quantised=True)


def library_product(
    x: QuantizedActivations, weight: W8Weight, out: torch.Tensor | None = None
) -> torch.Tensor:
    if out is None:
        out = torch.empty(len(x.values), len(weight.values), dtype=x.dtype, device=x.values.device)
    if x.values.is_meta:
        return out  # there is nothing to compile
    # The library supports scales for each row and column only with results in bf16.
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


def dequantise(weight: W8Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised weight."""
    columns, inner = weight.values.shape
    out = torch.empty(columns, inner, dtype=dtype, device=weight.values.device)
    # Rows are the grid's first dimension, because the second is at most 65,535.
    grid = (columns, ceil_div(inner, DEQUANTISED))
    variant = _dequantise_variant(inner, _group(weight))
    variant(grid, (weight.values, weight.scale, out))
    return out


@cache
def _dequantise_variant(inner: int, group: int) -> Variant:
    return Variant(kernels.dequantise_rows, K=inner, GROUP=group, BLOCK=DEQUANTISED, num_warps=4)


def quantise_activations(
    x: torch.Tensor, to: torch.dtype, context: StepContext = DEFAULT_CONTEXT
) -> QuantizedActivations:
    """Quantise activations, [T, N], with one scale for each token."""
    return _quantise(x, x.shape[1], None, to, context)


def quantised_act_and_mul(
    gate_up: torch.Tensor,
    activation: Activation,
    to: torch.dtype,
    context: StepContext = DEFAULT_CONTEXT,
) -> QuantizedActivations:
    """Compute `act_and_mul` of [T, 2N], then quantise the result, [T, N]."""
    return _quantise(gate_up, gate_up.shape[1] // 2, activation, to, context)


def _quantise(
    x: torch.Tensor,
    width: int,
    activation: Activation | None,
    to: torch.dtype,
    context: StepContext,
) -> QuantizedActivations:
    assert x.stride(1) == 1
    values = quantised_values(len(x), width, to, x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    variant = _quantise_variant(width, activation, to)
    variant((len(x),), (x, values, scale), (), (x.stride(0),), context)
    return QuantizedActivations(values, scale, x.dtype)


@cache
def _quantise_variant(width: int, activation: Activation | None, to: torch.dtype) -> Variant:
    block = power_of_two(width)
    return Variant(
        kernels.quantise_row,
        WIDTH=width,
        BLOCK=block,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        MAX_VALUE=LARGEST[to],
        MIN_SCALE=SMALLEST_SCALE,
        num_warps=min(max(block // 512, 2), 16),
    )


def launch_streaming(
    x: torch.Tensor,
    weight: W8Weight,
    tuned: Streaming,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product of one row, or with an activation the gated product."""
    columns, inner = num_columns(len(weight.values), activation), x.shape[1]
    if out is None:
        out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    how = (columns, inner, _group(weight), weight.dtype == INT8)
    variant = _stream_variant(*how, tuned, activation)
    grid = (ceil_div(columns, tuned.columns),)
    tensors = (x, weight.values.view(torch.int32), weight.scale, out)
    variant(grid, tensors, context=context)
    return out


@cache
def _stream_variant(
    columns: int,
    inner: int,
    group: int,
    int8: bool,
    tuned: Streaming,
    activation: Activation | None,
) -> Variant:
    sizes = {"N": columns, "K": inner, "GROUP": group, "INT8": int8, "INNER": tuned.step}
    options = tiles.stream_options(tuned, activation) | {"DEPTH": tuned.depth}
    return Variant(kernels.stream_row, **sizes, **options)


def launch_tiled(
    x: torch.Tensor,
    quantised: QuantizedActivations | None,
    weight: W8Weight,
    tuned: Tiling,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product of several rows, or with an activation the gated product. If `quantised`
    is given, `x` must be `quantised.values`."""
    rows, inner = x.shape
    columns = num_columns(len(weight.values), activation)
    if out is None:
        dtype = x.dtype if quantised is None else quantised.dtype
        out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    grid = (ceil_div(columns, tuned.columns), ceil_div(rows, tuned.rows), tuned.splits)
    # With many rows, the kernel computes the tiles in another order (`BAND`).
    band = BAND if x.dtype == INT8 and grid[1] > 1 else 0
    if band:
        grid = (grid[0] * grid[1], 1, 1)
    halves = 1 if activation is None else 2
    tuned = tiles.fitted(tuned, tuned.step * (tuned.rows * x.itemsize + halves * tuned.columns))
    sum_type = torch.int32 if x.dtype == INT8 else torch.float32
    splits = tiles.split_buffers(tuned, rows, columns, weight.arrived, sum_type)
    x_scale = None if quantised is None else quantised.scale
    variant = _tiled_variant(columns, inner, _group(weight), tuned, band, activation)
    tensors = (x, x_scale, weight.values, weight.scale, out, *splits)
    variant(grid, tensors, (rows,), context=context)
    return out


@cache
def _tiled_variant(
    columns: int,
    inner: int,
    group: int,
    tuned: Tiling,
    band: int,
    activation: Activation | None,
) -> Variant:
    sizes = {"N": columns, "K": inner, "GROUP": group, "INNER": tuned.step, "BAND": band}
    return Variant(kernels.multiply_tile, **sizes, **tiles.tile_options(tuned, activation))
