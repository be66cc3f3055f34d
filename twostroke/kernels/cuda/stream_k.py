"""Stream-K products of many rows with a 4-bit weight, on Hopper.

The kernel runs one program for each multiprocessor. The tiles of the result rarely divide evenly
among the programs:

    whole tiles   each program computes the same number of whole tiles
    shared tiles  the blocks of K of the remaining tiles are numbered through, and each program
                  computes the same number of consecutive blocks, which may be parts of two tiles

The program with the first part of a shared tile adds up the other parts, in their order. It waits
only for programs with a higher number, and each program computes first the part that another
program waits for. So the program with the highest number never waits, and no deadlock is possible.

The kernel is in `stream_k_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.runtime import driver

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.launch import ALIGNED, Variant, is_tested
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.tiles import HOPPER_SHARED_BYTES, num_columns
from twostroke.kernels.packed import PackedWeight
from twostroke.kernels.records import StepContext

# Gluon may change with each release of Triton. This kernel is used with tested releases only.
GLUON_IS_TESTED = is_tested()
if GLUON_IS_TESTED:
    from twostroke.kernels.cuda import stream_k_kernels as kernels

BLOCK = 128  # elements of K in one step
WEIGHT_ROWS = 64  # of a tile and a consumer; a program has two consumers
MIN_GROUP = 32  # elements of K that share a scale: at least a quarter of a block
TILE_ROWS = (128, 160, 192, 256)  # possible numbers of rows of x in a tile
# Converting a tile's codes takes about as long as multiplying them with so many rows.
CONVERSION_ROWS = 48
MIN_BLOCKS = 16  # With fewer blocks for each program, the smallest tiles are better.
EPILOGUE_BYTES = 8 << 10  # shared memory that is left for moving a tile's sums
H200_MULTIPROCESSORS = 132  # assumed when kernels are compiled without a GPU


@dataclass(frozen=True, slots=True)
class StreamKPlan:
    """The tiles and the blocks of K that each program computes."""

    programs: int
    tile_rows: int  # rows of x in a tile
    row_tiles: int  # tiles one below another
    whole_tiles: int  # of each program
    shared_blocks: int  # blocks of K of all remaining tiles
    shared_blocks_each: int  # of each program

    def shares_tiles(self, blocks: int) -> bool:
        """Return True if programs share tiles. `blocks`: blocks of K of a tile."""
        return self.shared_blocks > 0 and self.shared_blocks_each < blocks


def plan(rows: int, weight_rows: int, blocks: int, programs: int, num_counters: int) -> StreamKPlan:
    """Plan the work for `rows` rows of x. `blocks`: blocks of K. `num_counters`: the largest number
    of tiles that may be shared, since each shared tile needs an arrival counter."""
    column_tiles = ceil_div(weight_rows, 2 * WEIGHT_ROWS)
    # With larger tiles the codes are read and converted less often, but the sums of shared tiles
    # are larger.
    tile_rows = min(TILE_ROWS, key=lambda size: ceil_div(rows, size) * (size + CONVERSION_ROWS))
    total_blocks = ceil_div(rows, tile_rows) * column_tiles * blocks
    smallest = TILE_ROWS[0]
    pads_no_more = ceil_div(rows, smallest) * smallest <= ceil_div(rows, tile_rows) * tile_rows
    if total_blocks < MIN_BLOCKS * programs and pads_no_more:
        tile_rows = smallest
    row_tiles = ceil_div(rows, tile_rows)
    whole_tiles, remaining = divmod(row_tiles * column_tiles, programs)
    shared_blocks, shared_blocks_each = remaining * blocks, blocks
    # If more than 7 of 8 programs have a remaining tile, no tile is shared: sharing takes longer.
    if remaining <= min(num_counters, programs * 7 // 8):
        max_parts = 2 if whole_tiles else 8  # of a tile
        shared_blocks_each = max(ceil_div(shared_blocks, programs), ceil_div(blocks, max_parts))
    return StreamKPlan(
        programs, tile_rows, row_tiles, whole_tiles, shared_blocks, shared_blocks_each
    )


def can_multiply(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> bool:
    """Return True if this kernel can compute x @ weight.T, and can write the result to `out`."""
    fits = weight.bits == 4 and weight.block == BLOCK and weight.group >= MIN_GROUP
    same_dtype = out is None or out.dtype == x.dtype
    return fits and same_dtype and is_hopper() and x.data_ptr() % ALIGNED == 0


@cache
def is_hopper() -> bool:
    if triton.knobs.runtime.interpret or not GLUON_IS_TESTED:
        return False
    return bool(driver.active.get_current_target().arch == 90)


@cache
def num_multiprocessors() -> int:
    if not torch.cuda.is_available():
        return H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(
        driver.active.get_current_device()
    ).multi_processor_count


def multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T, or with an activation the gated product. The result is written to `out`
    if `out` is given."""
    rows, inner = x.shape
    columns, blocks = num_columns(weight.shape[0], activation), inner // BLOCK
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    weight_rows = weight.shape[0]
    if activation is not None:
        weight_rows = 2 * ceil_div(columns, WEIGHT_ROWS) * WEIGHT_ROWS
    work = plan(rows, weight_rows, blocks, num_multiprocessors(), len(weight.arrived))
    partial_sums = None
    if work.shares_tiles(blocks):
        size = 2 * work.programs * WEIGHT_ROWS * work.tile_rows
        partial_sums = torch.empty(size, dtype=torch.float32, device=x.device)
    tensors = (weight.scale, weight.zero, weight.offset, out, partial_sums, weight.arrived)
    # Shapes in Triton are powers of two, so a tile of 160 rows is one of 128 and one of 32.
    main_rows = power_of_two(work.tile_rows + 1) // 2
    extra_rows = work.tile_rows - main_rows
    main_x = kernels.descriptor(x, main_rows, 128)
    extra_x = kernels.descriptor(x, extra_rows, 128) if extra_rows else main_x
    code_rows = WEIGHT_ROWS if activation is None else WEIGHT_ROWS // 2
    codes = kernels.descriptor(weight.codes.view(torch.int32), code_rows, 64)
    sizes = (
        rows,
        work.row_tiles,
        work.whole_tiles,
        work.shared_blocks,
        work.shared_blocks_each,
    )
    variant = _variant(columns, blocks, weight.group, main_rows, extra_rows, activation)
    variant((work.programs,), tensors, (main_x, extra_x, codes, *sizes), context=context)
    return out


@cache
def _variant(
    columns: int,
    blocks: int,
    group: int,
    main_rows: int,
    extra_rows: int,
    activation: Activation | None,
) -> Variant:
    return Variant(
        kernels.multiply_stream_k,
        N=columns,
        BLOCKS=blocks,
        GROUP=group,
        ROWS=main_rows,
        EXTRA=extra_rows,
        STAGES=(HOPPER_SHARED_BYTES - EPILOGUE_BYTES)
        // (BLOCK * (2 * (main_rows + extra_rows) + WEIGHT_ROWS)),
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=4,
    )
