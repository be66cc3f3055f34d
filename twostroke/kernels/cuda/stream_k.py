"""Products of many rows with weights of 4 bits, on Hopper: as many programs as the card has
multiprocessors, which share the work of all tiles evenly (stream-K).

    tiles    each program has the same number of whole tiles; of the remaining tiles each program
             has the same number of blocks of K, wherever these begin and end
    parts    of a tile that several programs share: the program with the first part adds up the
             other parts, in their order. These are there before: a program begins with the part
             that another program waits for, and waits only for programs behind it, so that some
             program can always go on

`stream_k_kernels.py` has the program.
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
from twostroke.kernels.cuda.tiles import OF_HOPPER, num_columns
from twostroke.kernels.packed import PackedWeight
from twostroke.kernels.records import StepContext

# Gluon may change with each Triton: others go without.
IS_KNOWN = is_tested()
if IS_KNOWN:
    from twostroke.kernels.cuda import stream_k_kernels as kernels

BLOCK = 128  # numbers of K at one time
LINES = 64  # rows of the weight that each of a program's two consumers has at one time
MIN_GROUP = 32  # numbers that have one scale: a quarter of a block
HEIGHTS = (128, 160, 192, 256)  # rows of a tile
OF_CODES = 48  # rows that take as long as to make numbers of a tile's codes
MIN_BLOCKS = 16  # that a program has for itself, but of the lowest tiles
FOR_SUMS = 8 << 10  # bytes of shared memory that are left for moving a tile's sums
OF_H200 = 132  # multiprocessors, where kernels are compiled without a GPU


@dataclass(frozen=True, slots=True)
class StreamKPlan:
    """The work of each program: a number of whole tiles, and `each` blocks of the remaining
    tiles."""

    programs: int
    rows: int  # of a tile
    row_tiles: int
    whole_tiles: int
    units: int  # blocks of the tiles that are left
    each: int

    def shares(self, blocks: int) -> bool:
        """Return True if programs share tiles of so many blocks."""
        return self.units > 0 and self.each < blocks


def plan(rows: int, lines: int, blocks: int, programs: int, counters: int) -> StreamKPlan:
    """Plan the work for a weight of `lines` rows. `counters`: tiles that may be shared."""
    columns = ceil_div(lines, 2 * LINES)
    # Higher tiles read less, and convert less; sums that meet again are larger, too.
    tile = min(HEIGHTS, key=lambda height: ceil_div(rows, height) * (height + OF_CODES))
    has_few = ceil_div(rows, tile) * columns * blocks < MIN_BLOCKS * programs
    if has_few and ceil_div(rows, HEIGHTS[0]) * HEIGHTS[0] <= ceil_div(rows, tile) * tile:
        tile = HEIGHTS[0]
    row_tiles = ceil_div(rows, tile)
    whole, left = divmod(row_tiles * columns, programs)
    units, each = left * blocks, blocks
    # Where nearly all programs could have one of the tiles that are left, they do: to share them
    # takes longer.
    if left <= min(counters, programs * 7 // 8):
        max_parts = 2 if whole else 8  # parts of a tile
        each = max(ceil_div(units, programs), ceil_div(blocks, max_parts))
    return StreamKPlan(programs, tile, row_tiles, whole, units, each)


def can_multiply(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> bool:
    """Return True if this kernel can compute the product; in `out`, if it is given."""
    fits = weight.bits == 4 and weight.block == BLOCK and weight.group >= MIN_GROUP
    of_one_type = out is None or out.dtype == x.dtype
    return fits and of_one_type and is_hopper() and x.data_ptr() % ALIGNED == 0


@cache
def is_hopper() -> bool:
    if triton.knobs.runtime.interpret or not IS_KNOWN:
        return False
    return bool(driver.active.get_current_target().arch == 90)


@cache
def num_multiprocessors() -> int:
    if not torch.cuda.is_available():
        return OF_H200
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
    """Compute the product, or with an activation the gated product."""
    rows, inner = x.shape
    columns, blocks = num_columns(weight.shape[0], activation), inner // BLOCK
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    lines = weight.shape[0] if activation is None else 2 * ceil_div(columns, LINES) * LINES
    work = plan(rows, lines, blocks, num_multiprocessors(), len(weight.arrived))
    partial = None
    if work.shares(blocks):
        size = 2 * work.programs * LINES * work.rows
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    tensors = (weight.scale, weight.zero, weight.offset, out, partial, weight.arrived)
    height = power_of_two(work.rows + 1) // 2
    more = work.rows - height
    of_x = kernels.descriptor(x, height, 128)
    of_more = kernels.descriptor(x, more, 128) if more else of_x
    box = LINES if activation is None else LINES // 2
    of_codes = kernels.descriptor(weight.codes.view(torch.int32), box, 64)
    numbers = (rows, work.row_tiles, work.whole_tiles, work.units, work.each)
    variant = _variant(columns, blocks, weight.group, height, more, activation)
    varying = (of_x, of_more, of_codes, *numbers)
    variant((work.programs,), tensors, varying, context=context)
    return out


@cache
def _variant(
    columns: int,
    blocks: int,
    group: int,
    rows: int,
    more: int,
    activation: Activation | None,
) -> Variant:
    return Variant(
        kernels.multiply_stream_k,
        N=columns,
        BLOCKS=blocks,
        GROUP=group,
        ROWS=rows,
        MORE=more,
        STAGES=(OF_HOPPER - FOR_SUMS) // (BLOCK * (2 * (rows + more) + LINES)),
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=4,
    )
