"""What a launch may do for its neighbours: start early, and read ahead for the product after it.

    product ──▶│ norm │──▶ product        early: the launch is set up while the last one still runs
                  └─ the beginning of each row of the weight ─▶ L2

At few tokens a norm, an activation or an attention leaves the memory idle while it waits for its
own few loads; the product after it is bound by the memory, and begins with what is in the cache.
Neither changes a result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.kernels import Ahead

LINE = 128  # bytes of a line of the cache
PIECE = 512  # bytes that one thread asks for
PROGRAMS = 132  # that only read ahead, where a launch has fewer of its own


def early(ahead: Ahead | None) -> dict[str, bool]:
    """The options of a launch that reads nothing ahead."""
    if ahead is None or not ahead.early:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def launch_options(early: bool) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def lines_of(ahead: Ahead | None) -> tuple[torch.Tensor | None, dict[str, int]]:
    """The weight, None where nothing of it is read; and the options of a launch."""
    rows = stride = size = 0
    weight = None if ahead is None else ahead.weight
    if ahead is not None and weight is not None:
        stride = weight.stride(0) * weight.itemsize
        size = min(ahead.num_bytes // weight.shape[0], stride)
        whole = PIECE if size > PIECE else LINE
        size = size // whole * whole
        # Sixteen bytes are the least that the hardware takes.
        rows = weight.shape[0] if size and stride % 16 == 0 == weight.data_ptr() % 16 else 0
    options = {"AHEAD_ROWS": rows, "AHEAD_STRIDE": stride, "AHEAD_BYTES": size}
    return (weight if rows else None), {**options, **early(ahead)}


@triton.jit
def await_last(EARLY: tl.constexpr):
    """The first thing in a kernel: nothing of the launches in front may be read before."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def read_ahead(
    weight, program, programs, ROWS: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr
):
    """The first BYTES of every row; `program` of `programs` takes its part of them."""
    if ROWS > 0:
        LANES: tl.constexpr = 32 * tl.extra.cuda.num_warps()
        PIECE: tl.constexpr = 512 if BYTES > 512 else BYTES
        EACH: tl.constexpr = BYTES // PIECE  # of a row
        for start in range(program * LANES, ROWS * EACH, programs * LANES):
            piece = tl.minimum(start + tl.arange(0, LANES), ROWS * EACH - 1)
            offset = (piece // EACH).to(tl.int64) * STRIDE + (piece % EACH) * PIECE
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [weight.to(tl.int64) + offset, tl.full([LANES], PIECE, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
