"""The product of a few rows with a weight that has few rows itself: [M, K] × [N, K]ᵀ, M ≤ 16.

A library cuts such a product along K, to have something to do for every multiprocessor, and adds
the parts up in a second launch. Here each program takes all of K for a few of the N.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.kernels import Ahead
from twostroke.kernels.cuda.ahead import await_last, early, read_ahead
from twostroke.kernels.cuda.sizes import ceil_div

MOST_ROWS = 16
FIRST_BYTES = 2048  # of a row of the weight: asked for before the rows of x are there


@dataclass(frozen=True, slots=True)
class Tuning:
    columns: int = 32  # rows of the weight, columns of the result
    inner: int = 128
    num_warps: int = 4
    num_stages: int = 6


def few_rows_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    tuned: Tuning | None = None,
    ahead: Ahead | None = None,
) -> torch.Tensor:
    """x @ weight.T, added up in fp32 and rounded once."""
    (rows, inner), columns = x.shape, weight.shape[0]
    tuned = tuned or Tuning()
    assert rows <= MOST_ROWS
    assert x.stride(1) == weight.stride(1) == 1
    if inner % tuned.inner or weight.stride(0) % 8:
        return torch.mm(x, weight.t(), out=out)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _product[(ceil_div(columns, tuned.columns),)](
        x,
        weight,
        out,
        rows,
        x.stride(0),
        out.stride(0),
        N=columns,
        K=inner,
        WEIGHT_STRIDE=weight.stride(0),
        ROWS=MOST_ROWS,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        STRIDE_BYTES=weight.stride(0) * weight.itemsize,
        FIRST_BYTES=min(FIRST_BYTES, inner * weight.itemsize) // 128 * 128,
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **early(ahead),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    out,
    num_rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STRIDE_BYTES: tl.constexpr,
    FIRST_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile = tl.program_id(0)
    if EARLY:
        read_ahead(weight, tile, tl.num_programs(0), N, STRIDE_BYTES, FIRST_BYTES)
    await_last(EARLY)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    real = (row < num_rows)[:, None]
    x_at = x + row[:, None] * x_stride + inner[None, :]
    # Columns past the end read the last row again, and are dropped.
    line = tl.minimum(column, N - 1).to(tl.int64) * WEIGHT_STRIDE
    weight_at = weight + line[:, None] + inner[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(0, K, INNER):
        part = tl.load(x_at + at, mask=real, other=0.0)
        each = tl.load(weight_at + at, eviction_policy="evict_first")
        sums = tl.dot(part, tl.trans(each), sums, input_precision="tf32x3")
    out_at = out + row[:, None] * out_stride + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=real & (column < N)[None, :])
