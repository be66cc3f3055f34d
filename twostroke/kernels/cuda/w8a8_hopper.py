"""Split-K products of e4m3 activations with e4m3 weights, on Hopper. K is split into as many parts
as needed for nearly every multiprocessor to have one. The program with the first part of a tile
adds up the other parts, in their order.

    2 to 8 rows      a dependent launch fetches much of the weight before the activations are ready
    65 to 256 rows   matrices with few columns, for which the library uses too few multiprocessors.
                     Matrices with more columns need no split, and the library is faster, because
                     its programs share what they fetch

The kernel is in `w8a8_hopper_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from twostroke.kernels.cuda.launch import ALIGNED, Variant
from twostroke.kernels.cuda.sizes import ceil_div
from twostroke.kernels.cuda.stream_k import (
    BLOCK,
    EPILOGUE_BYTES,
    GLUON_IS_TESTED,
    WEIGHT_ROWS,
    is_hopper,
    num_multiprocessors,
)
from twostroke.kernels.cuda.tiles import HOPPER_SHARED_BYTES
from twostroke.kernels.records import StepContext
from twostroke.kernels.w8a8 import E4M3, QuantizedActivations, W8Weight

if GLUON_IS_TESTED:
    from twostroke.kernels.cuda import w8a8_hopper_kernels as kernels
    from twostroke.kernels.cuda.stream_k_kernels import descriptor

FEW, MANY = range(2, 9), range(65, 257)  # rows of x that this kernel supports
# Rows of a tile: for few rows; for many rows, the lower height if two tiles are enough.
FEW_HEIGHT, HEIGHTS = 16, (64, 128)
LONG = 8192  # minimum K for which the higher tiles are faster than the library
MAX_PARTS = 8  # of a tile


@dataclass(frozen=True, slots=True)
class SplitKPlan:
    rows: int  # of a tile
    row_tiles: int
    tiles: int
    parts: int  # of each tile
    blocks_per_part: int  # blocks of K of a part; the last one may have fewer


def plan(rows: int, columns: int, blocks: int, programs: int) -> SplitKPlan | None:
    """Plan the work. None if there are more tiles than programs."""
    height = HEIGHTS[0] if rows <= 2 * HEIGHTS[0] else HEIGHTS[1]
    if rows in FEW:
        height = FEW_HEIGHT
    row_tiles = ceil_div(rows, height)
    tiles = row_tiles * ceil_div(columns, 2 * WEIGHT_ROWS)
    if tiles > programs:
        return None
    size = ceil_div(blocks, min(programs // tiles, MAX_PARTS, blocks))
    return SplitKPlan(height, row_tiles, tiles, ceil_div(blocks, size), size)


def can_multiply(x: QuantizedActivations, weight: W8Weight) -> bool:
    rows, (columns, inner) = len(x.values), weight.values.shape
    if (rows not in FEW and rows not in MANY) or not is_hopper():
        return False
    if inner % BLOCK or weight.is_grouped:
        return False
    if not x.values.dtype == weight.dtype == E4M3 or x.dtype.itemsize != 2:
        return False
    work = plan(rows, columns, inner // BLOCK, num_multiprocessors())
    if work is None or work.tiles > len(weight.arrived) or x.values.data_ptr() % ALIGNED:
        return False
    return work.rows < HEIGHTS[1] or (work.parts > 1 and inner >= LONG)


def multiply(
    x: QuantizedActivations, weight: W8Weight, context: StepContext, out: torch.Tensor | None = None
) -> torch.Tensor:
    (rows, inner), columns, device = x.values.shape, len(weight.values), x.values.device
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=device)
    work = plan(rows, columns, inner // BLOCK, num_multiprocessors())
    assert work is not None
    partial = None
    if work.parts > 1:
        size = work.tiles * work.parts * 2 * WEIGHT_ROWS * work.rows
        partial = torch.empty(size, dtype=torch.float32, device=device)
    tensors = (x.scale, weight.scale, out, partial, weight.arrived)
    of_x = descriptor(_with_room(x.values, work.row_tiles * work.rows), work.rows, BLOCK)
    of_weight = descriptor(weight.values, WEIGHT_ROWS, BLOCK)
    numbers = (rows, work.row_tiles, work.parts, work.blocks_per_part)
    variant = _variant(columns, inner // BLOCK, work.rows)
    varying = (of_x, of_weight, *numbers)
    variant((work.tiles * work.parts,), tensors, varying, context=context)
    return out


def _with_room(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x extended to `rows` rows, if the memory behind x is large enough: see
    `quantised_values`."""
    there = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.as_strided((rows, x.shape[1]), x.stride()) if there >= rows * x.shape[1] else x


@cache
def _variant(columns: int, blocks: int, rows: int) -> Variant:
    return Variant(
        kernels.multiply_in_parts,
        N=columns,
        BLOCKS=blocks,
        ROWS=rows,
        STAGES=(HOPPER_SHARED_BYTES - EPILOGUE_BYTES) // (BLOCK * (rows + 2 * WEIGHT_ROWS)),
        num_warps=4,
    )
