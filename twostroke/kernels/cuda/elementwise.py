"""Norms and gated activations in one pass over the data, rounded as in `kernels/reference.py`.

    rms_norm(x, w)           norm in fp32, rounded to w's dtype, times w, rounded to x's dtype; then
                             quantised, if the caller requests this
    act_and_mul([gate, up])  act(gate), rounded, times up; `ClampedSwiglu` is rounded once

If the weight of a norm is fp32 and the activations are bf16 or fp16, only the result is rounded.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.w8a8 import LARGEST, SMALLEST_SCALE, QuantizedActivations

TILE = 2048  # elements of one program: two 16-byte loads of a thread in flight

# Adding this constant to a number below 2^22 rounds the number to an integer, half to even.
ROUNDING = tl.constexpr(1.5 * 2.0**23)
QUANTISED_ROOM = 128  # rows of a tile


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, context: StepContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """Return the norm over the last dimension of [..., N]."""
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x.reshape(-1, width), None, weight, eps, out.view(-1, width), context)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    to: torch.dtype | None = None,
) -> torch.Tensor | QuantizedActivations:
    """Add x to `residual`, [T, N], in place, and return the norm of the sum. `to`: return the norm
    quantised to this dtype."""
    assert residual.stride(1) == 1
    if to is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm(x, residual, weight, eps, out, context)
        return out
    values = quantised_values(x.shape[0], x.shape[1], to, x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _norm(x, residual, weight, eps, values, context, scale)
    return QuantizedActivations(values, scale, x.dtype)


def quantised_values(
    rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return memory for quantised rows, padded to a whole tile of rows.

    `w8a8_hopper.py` fetches whole tiles. The padding is not used, but its fetch takes as long as
    the fetch of rows: programs with the same part of the weight then fetch it at the same time, and
    the L2 cache reads it once."""
    room = ceil_div(rows, QUANTISED_ROOM) * QUANTISED_ROOM if rows > QUANTISED_ROOM // 2 else rows
    return torch.empty(room, width, dtype=dtype, device=device)[:rows]


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    context: StepContext,
    out_scale: torch.Tensor | None = None,
) -> None:
    (rows, width), (stride, channel_stride) = x.shape, x.stride()
    assert channel_stride == 1
    rows_each = _rows_of_a_program(width)
    max_value = 0.0 if out_scale is None else LARGEST[out.dtype]
    _norm_variant(width, residual is not None, max_value)(
        (ceil_div(rows, rows_each),),
        (x, residual, weight, out, out_scale),
        (rows,),
        (eps, stride, stride if residual is None else residual.stride(0), out.stride(0)),
        context,
    )


def _rows_of_a_program(width: int) -> int:
    return max(1, TILE // 2 // power_of_two(width))


@cache
def _norm_variant(width: int, add: bool, max_value: float) -> Variant:
    block = power_of_two(width)
    return Variant(
        _rms_norm,
        WIDTH=width,
        BLOCK=block,
        ROWS=_rows_of_a_program(width),
        ADD=add,
        MAX_VALUE=max_value,
        MIN_SCALE=SMALLEST_SCALE,
        num_warps=_warps(block),
    )


def act_and_mul(
    gate_up: torch.Tensor, activation: Activation, context: StepContext = DEFAULT_CONTEXT
) -> torch.Tensor:
    """Return activation(first half) · (second half) of [T, 2N], as [T, N]."""
    assert gate_up.stride(1) == 1
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    # Tokens are the grid's first dimension, because the second is at most 65,535.
    grid, strides = (rows, ceil_div(width, TILE)), (gate_up.stride(0), out.stride(0))
    _act_variant(width, activation)(grid, (gate_up, out), (), strides, context)
    return out


@cache
def _act_variant(width: int, activation: Activation) -> Variant:
    return Variant(
        _act_and_mul,
        WIDTH=width,
        BLOCK=TILE,
        ACTIVATION=activation,
        num_warps=4,
    )


def _warps(block: int) -> int:
    """Return the number of warps with which each thread has at least two loads of 16 bytes."""
    return min(max(block // 512, 2), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    out_scale,
    num_rows,
    eps,
    stride,
    residual_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    x_fp32 = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        total = x_fp32 + tl.load(at, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=mask)
        x_fp32 = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x_fp32 * x_fp32, axis=1, keep_dims=True) / WIDTH + eps)
    result = times_weight(x_fp32 * inverse, scale, x.dtype.element_ty)
    if out_scale is not None:
        result, unit = quantised_rows(result, out.dtype.element_ty, MAX_VALUE, MIN_SCALE)
        tl.store(out_scale + row, unit, mask=row < num_rows)
    tl.store(out + row * out_stride + column, result, mask=mask)


@triton.jit
def quantised_rows(rows, dtype: tl.constexpr, MAX_VALUE: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Quantise [rows, channels] to e4m3 or int8. Return the values and the scales, [rows, 1]."""
    x_fp32 = rows.to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(x_fp32), axis=1, keep_dims=True) / MAX_VALUE, MIN_SCALE)
    scaled = tl.minimum(tl.maximum(x_fp32 / unit, -MAX_VALUE), MAX_VALUE)
    if dtype == tl.int8:
        scaled = (scaled + ROUNDING) - ROUNDING
    return scaled.to(dtype), unit


@triton.jit
def times_weight(normed, weight, dtype: tl.constexpr):
    """Multiply the fp32 result of a norm by the norm's weight, in the weight's dtype, and convert
    the product to `dtype`."""
    rounded = normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return rounded.to(weight.dtype).to(dtype)


@triton.jit
def _act_and_mul(
    gate_up,
    out,
    stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = gate_up + row * stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = gate_times_up(gate, up, dtype, ACTIVATION)
    tl.store(out + row * out_stride + column, result.to(dtype), mask=mask)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Apply an activation. Exact gelu uses erf. The others are x · sigmoid(y): y = x for silu, and
    y = 2 √(2/π) (x + 0.044715 x³) for gelu_tanh, because 0.5 (1 + tanh z) = sigmoid(2z)."""
    if ACTIVATION == "gelu":
        result = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        y = x
        if ACTIVATION == "gelu_tanh":
            y = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        result = x / (1.0 + tl.exp(-y))
    return result


@triton.jit
def gate_times_up(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Round two fp32 products to `dtype`, then compute `act_and_mul`."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION[0] == "clamped_swiglu":  # if ACTIVATION is a string, [0] is its first letter
        ALPHA: tl.constexpr = ACTIVATION[1]
        LIMIT: tl.constexpr = ACTIVATION[2]
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        result = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        result = activated(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    return result
