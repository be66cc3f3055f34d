"""Norms and the gated activation: one pass over the data, rounded where `reference` rounds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.kernels.cuda.early import await_last, launch_options
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
    block = power_of_two(width)
    together = max(1, TILE // 2 // block)
    _rms_norm[(ceil_div(rows, together),)](
        x,
        residual,
        weight,
        out,
        rows,
        eps,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        ROWS=together,
        ADD=residual is not None,
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
    _silu_and_mul[(rows, ceil_div(width, TILE))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=TILE,
        num_warps=4,
        **launch_options(early),
    )
    return out


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
