"""Norms and the gated activation: one pass over the data, rounded where `reference` rounds."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.early import await_last, launch_options
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two

TILE = 2048  # elements of one program: two 16-byte loads of a thread in flight


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Over the last dimension of [..., N]."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(rows, None, weight, eps, out.view(-1, width), early)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    early: bool = False,
) -> torch.Tensor:
    """`residual += x`, in place and rounded; then the norm of the sum."""
    out = torch.empty_like(residual)
    assert x.stride(1) == residual.stride(1) == 1
    _norm(x, residual, weight, eps, out, early)
    return out


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    early: bool,
) -> None:
    rows, width = x.shape
    stride = x.stride(0)
    together = _rows_of_a_program(width)
    _norm_variant(width, residual is not None, early)(
        (ceil_div(rows, together),),
        (x, residual, weight, out),
        (rows,),
        (eps, stride, stride if residual is None else residual.stride(0), out.stride(0)),
    )


def _rows_of_a_program(width: int) -> int:
    return max(1, TILE // 2 // power_of_two(width))


@cache
def _norm_variant(width: int, add: bool, early: bool) -> Variant:
    block = power_of_two(width)
    return Variant(
        _rms_norm,
        WIDTH=width,
        BLOCK=block,
        ROWS=_rows_of_a_program(width),
        ADD=add,
        num_warps=_warps(block),
        **launch_options(early),
    )


def silu_and_mul(
    gate_up: torch.Tensor, out: torch.Tensor | None = None, early: bool = False
) -> torch.Tensor:
    """[T, 2N] → [T, N]: silu of the first half, times the second."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    # Tokens along the grid's x: its y ends at 65,535.
    grid, strides = (rows, ceil_div(width, TILE)), (gate_up.stride(0), out.stride(0))
    _silu_variant(width, early)(grid, (gate_up, out), (), strides)
    return out


@cache
def _silu_variant(width: int, early: bool) -> Variant:
    return Variant(_silu_and_mul, WIDTH=width, BLOCK=TILE, num_warps=4, **launch_options(early))


def _warps(block: int) -> int:
    """Sixteen bytes a load, two or more loads a thread."""
    return min(max(block // 512, 2), 16)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x,
    residual,
    weight,
    out,
    num_rows,
    eps,
    stride,
    residual_stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_last(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    wide = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + column
        rounded = (wide + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(at, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / WIDTH + eps)
    normed = (wide * inverse).to(x.dtype.element_ty).to(tl.float32)
    result = (normed * scale).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, result, mask=mask)


@triton.jit
def _silu_and_mul(
    gate_up,
    out,
    stride,
    out_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    await_last(EARLY)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = gate_up + row * stride + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (gated * up).to(out.dtype.element_ty), mask=mask)
