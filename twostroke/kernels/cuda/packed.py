"""Products with weights of 4 or 8 bits. `kernels/packed.py` defines the formats.

    one row     the codes are read once; the products are added up in fp32, group by group
    4 bits      codes are converted to the activations' dtype in registers, as integers, without
                rounding; the scale of a group multiplies the result of the group's product
    8 bits      codes are scaled and rounded in registers, before the product
    more rows   4 bits on Hopper: `stream_k.py`, which scales and rounds before the product
    many rows   the whole weight is dequantised, and the library multiplies

`tiles.py` has the tilings and split-K.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda import packed_kernels as kernels
from twostroke.kernels.cuda import stream_k, tiles
from twostroke.kernels.cuda.elementwise import act_and_mul
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.packed_tiles import TILES
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.cuda.tiles import Streaming, Tiling, is_contiguous_16_bit, num_columns
from twostroke.kernels.packed import PackedWeight, block_size
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext

MAX_TILED = {4: 256, 8: 128}  # maximum rows for tiles, by bits, unless `TILES` has an entry
PROGRAMS = 512  # maximum programs of a matrix whose K is split
STREAM_K_ROWS = range(65, 2049)  # 4 bits; for more rows the library is as fast
NARROW = 4096  # matrices with at most this many columns have narrower tiles, for more programs
MIN_STEPS = 4  # 8 bits: minimum iterations of a split of K
MIN_INNER = 1024  # 4 bits: minimum codes of a split of K
MIN_GROUP = 64  # 4 bits: minimum group size for scales that multiply the result of the product
DEQUANTISED = 1024  # maximum words that a program dequantises


def table_key(rows: int, weight: PackedWeight, gated: bool) -> str:
    kind = "zeros" if weight.zero is not None else "offsets" if weight.offset is not None else ""
    format = f"{weight.bits} {weight.group} {kind}".strip()
    return tiles.table_key(format, rows, weight.shape, gated)


def choice(rows: int, weight: PackedWeight, gated: bool) -> Streaming | Tiling | None:
    """Choose the launch of a product. None: dequantise the weight and use the library."""
    known = TILES.get(table_key(rows, weight, gated))
    if known is not None:
        return tiles.of_table(known)
    choose_tiling = choose_tiling_4 if weight.bits == 4 else choose_tiling_8
    return (choose_streaming(weight, gated) if rows == 1 else None) or choose_tiling(
        rows, weight, gated
    )


def choose_tiling_4(rows: int, weight: PackedWeight, gated: bool) -> Tiling | None:
    """Choose the tiling of a weight of 4 bits. None: use the library."""
    if weight.block < 64:
        return None
    columns, inner = weight.shape
    if rows > MAX_TILED[4]:
        return None
    blocks = inner // weight.block
    block = min(64 if gated else 128, max(8, power_of_two(rows)))
    # The scales of an iteration are in registers before it begins, in addition to the sums.
    scales = max(1, weight.block // weight.group) * (1 + gated) * (1 + (weight.offset is not None))
    wanted = min(64 // block, 16 // scales, 4)
    step = next(n for n in (4, 2, 1) if n <= max(1, wanted) and blocks % n == 0)
    splits = 1
    if not gated and rows <= block:
        programs = PROGRAMS if block <= 16 else PROGRAMS // 2
        max_splits = min(programs // ceil_div(columns, 64), inner // MIN_INNER)
        splits = tiles.power_of_two_below(max_splits)
    # As many stages as two programs on a multiprocessor have shared memory for.
    stages = 3 if step == 4 or block == 128 else 4 if block >= 32 else 5
    return Tiling(block, 64, step, splits, True, 4, stages)


def choose_streaming(weight: PackedWeight, gated: bool) -> Streaming | None:
    """Choose the launch of the product of one row. A warp loads 1,024 codes of 4 bits or 256 codes
    of 8 bits at a time, from a few columns, while the next loads are in flight. None if the blocks
    are too short for these loads."""
    block = stream_block(weight)
    if block < (64 if weight.bits == 4 else 16):
        return None
    blocks, max_step = weight.shape[1] // block, (1024 if weight.bits == 4 else 256) // block
    step = next(n for n in (16, 8, 4, 2, 1) if n <= max_step and blocks % n == 0)
    return Streaming(2 if gated else 4, step, 1, 2)


def stream_block(weight: PackedWeight) -> int:
    """Return the number of codes in a block. With 8 bits, the codes of a block share one scale."""
    if weight.bits == 4:
        return weight.block
    return min(128, weight.group & -weight.group)


def choose_tiling_8(rows: int, weight: PackedWeight, gated: bool) -> Tiling | None:
    """Choose the tiling of a weight of 8 bits. None: use the library."""
    if rows > MAX_TILED[8] or weight.group not in (16, 32, 64, 128):
        return None
    groups = weight.scale.shape[1]
    block = min(128, max(16, power_of_two(rows)))
    wanted = (256 if block <= 32 and not (gated and block > 16) else 128) // weight.group
    count = next(n for n in (16, 8, 4, 2, 1) if n <= wanted and groups % n == 0)
    tile = 32 if block == 16 and not gated and weight.shape[0] <= NARROW else 64
    splits = 1
    if not gated and rows <= block:
        max_splits = min(PROGRAMS // ceil_div(weight.shape[0], tile), groups // count // MIN_STEPS)
        splits = tiles.power_of_two_below(max_splits)
    stages = 3 if block == 128 or gated else 4
    return Tiling(block, tile, count, splits, block >= 64, 4, stages)


# ── calls ───────────────────────────────────────────────────────────────────────────────────


def packed_product(
    x: torch.Tensor,
    weight: PackedWeight,
    context: StepContext = DEFAULT_CONTEXT,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ W.T, where W is the dequantised weight. The result is written to `out`, which must
    be contiguous, if `out` is given."""
    if is_contiguous_16_bit(x):
        if len(x) in STREAM_K_ROWS and stream_k.can_multiply(x, weight, out):
            return stream_k.multiply(x, weight, None, context, out)
        tuned = choice(x.shape[0], weight, gated=False)
        if tuned is not None:
            return run(x, weight, tuned, None, context, out)
    return library_product(x, weight, out)


def packed_gated_product(
    x: torch.Tensor,
    weight: PackedWeight,
    activation: Activation,
    context: StepContext = DEFAULT_CONTEXT,
) -> torch.Tensor:
    """Return activation(x @ gate.T) · (x @ up.T), with the rounding of `act_and_mul`. The first
    half of the weight's rows is `gate`, the second half is `up`."""
    if is_contiguous_16_bit(x):
        if len(x) in STREAM_K_ROWS and stream_k.can_multiply(x, weight):
            return stream_k.multiply(x, weight, activation, context)
        tuned = choice(x.shape[0], weight, gated=True)
        if tuned is not None:
            return run(x, weight, tuned, activation, context)
    return act_and_mul(library_product(x, weight), activation, context)


def library_product(
    x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None
) -> torch.Tensor:
    return tiles.dense_product(x, dequantise(weight, x.dtype), out)


def run(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Streaming | Tiling,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product, or with an activation the gated product."""
    if isinstance(tuned, Streaming):
        return launch_streaming(x, weight, tuned, activation, context, out)
    return launch_tiled(x, weight, tuned, activation, context, out)


def dequantise(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return the dequantised weight."""
    columns, inner = weight.shape
    out = torch.empty(columns, inner, dtype=dtype, device=weight.codes.device)
    words = words_of(weight)
    # Rows are the grid's first dimension, because the second is at most 65,535.
    size = min(DEQUANTISED, power_of_two(words.shape[1]))
    grid = (columns, ceil_div(words.shape[1], size))
    variant = _dequantise_variant(inner, weight.group, weight.bits, weight.block, size)
    variant(grid, (words, weight.scale, weight.zero, weight.offset, out))
    return out


def words_of(weight: PackedWeight) -> torch.Tensor:
    return weight.codes.view(torch.int16) if weight.bits == 4 else weight.codes


@cache
def _dequantise_variant(inner: int, group: int, bits: int, block: int, size: int) -> Variant:
    how = {"BITS": bits, "BLOCK": block, "SIZE": size, "num_warps": 4}
    return Variant(kernels.dequantise_rows, K=inner, GROUP=group, **how)


def launch_streaming(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Streaming,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product of one row, or with an activation the gated product."""
    columns, inner = num_columns(weight.shape[0], activation), weight.shape[1]
    if out is None:
        out = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    how = (columns, inner, weight.group, weight.bits, stream_block(weight))
    variant = _stream_variant(*how, tuned, activation)
    grid = (ceil_div(columns, tuned.columns),)
    words = weight.codes.view(torch.int16 if weight.bits == 4 else torch.int32)
    tensors = (x, words, weight.scale, weight.zero, weight.offset, out)
    variant(grid, tensors, context=context)
    return out


@cache
def _stream_variant(
    columns: int,
    inner: int,
    group: int,
    bits: int,
    block: int,
    tuned: Streaming,
    activation: Activation | None,
) -> Variant:
    sizes = {"N": columns, "K": inner, "GROUP": group, "BITS": bits, "BLOCK": block}
    sizes |= {"PARTS": tuned.step, "DEPTH": tuned.depth}
    return Variant(kernels.stream_row, **sizes, **tiles.stream_options(tuned, activation))


def launch_tiled(
    x: torch.Tensor,
    weight: PackedWeight,
    tuned: Tiling,
    activation: Activation | None,
    context: StepContext,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the product of several rows, or with an activation the gated product."""
    rows, inner = x.shape
    columns = num_columns(weight.shape[0], activation)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    # Tiles of the same columns are neighbours, so that the weight is read once into the L2 cache.
    grid = (ceil_div(rows, tuned.rows), ceil_div(columns, tuned.columns), tuned.splits)
    bits = weight.bits if activation is None else 2 * weight.bits
    each = tuned.rows * x.itemsize + tuned.columns * bits // 8
    of_step = weight.block if weight.bits == 4 else weight.group
    tuned = tiles.fitted(tuned, tuned.step * of_step * each)
    splits = tiles.split_buffers(tuned, rows, columns, weight.arrived)
    if weight.bits == 4 and scaled_first(weight):
        tuned = replace(tuned, scaled=True)
    make = _variant_4 if weight.bits == 4 else _variant_8
    variant = make(columns, inner, weight.group, tuned, activation)
    of_weight = (words_of(weight), weight.scale, weight.zero, weight.offset)
    variant(grid, (x, *of_weight, out, *splits), (rows,), context=context)
    return out


@cache
def _variant_4(
    columns: int,
    inner: int,
    group: int,
    tuned: Tiling,
    activation: Activation | None,
) -> Variant:
    block = block_size(inner, group)
    sizes = {"N": columns, "K": inner, "GROUP": group, "BLOCK": block}
    options = tiles.tile_options(tuned, activation)
    del options["WEIGHT_FIRST"]
    options |= {"STEP": tuned.step, "SCALED": tuned.scaled}
    return Variant(kernels.multiply_tile_4, **sizes, **options)


def scaled_first(weight: PackedWeight) -> bool:
    """Return True if 4-bit codes must be scaled before the product: with short groups there would
    be too many scales after it, and an offset is not a factor."""
    return weight.offset is not None or weight.group < MIN_GROUP


@cache
def _variant_8(
    columns: int,
    inner: int,
    group: int,
    tuned: Tiling,
    activation: Activation | None,
) -> Variant:
    sizes = {"N": columns, "K": inner, "GROUP": group, "PARTS": tuned.step}
    options = tiles.tile_options(tuned, activation)
    return Variant(kernels.multiply_tile_8, **sizes, **options)
