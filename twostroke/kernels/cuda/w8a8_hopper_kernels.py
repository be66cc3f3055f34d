"""The kernel of `w8a8_hopper.py`, in Gluon: products of e4m3 activations and weights, on Hopper.

K is split into parts. A program computes one part of one tile of the output. The programs with the
later parts write their sums to `partial`. The program with the first part waits for these sums,
adds them to its own sums, scales the result and stores the tile.

A program has three partitions of warps: a producer fetches blocks of x and of the weight with TMA,
and two consumers, with half of the tile's columns each, multiply the blocks with WGMMA.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.kernels.cuda.stream_k_kernels import (
    WEIGHT_ROWS,
    at_slot,
    await_parts,
    fetch,
    make_barriers,
    publish_part,
    store_tile,
)

BLOCK = gl.constexpr(128)  # elements of K in one step


@gluon.jit(do_not_specialize=["num_rows", "row_tiles", "parts", "blocks_per_part"])
def multiply_in_parts(
    x_scale,
    scale,
    out,
    partial,
    arrived,
    x,
    weight,
    num_rows,
    row_tiles,
    parts,
    blocks_per_part,
    N: gl.constexpr,
    BLOCKS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    # The last part of K may have fewer than `blocks_per_part` blocks.
    tile, part = gl.program_id(0) // parts, gl.program_id(0) % parts
    start = part * blocks_per_part
    count = gl.minimum(blocks_per_part, BLOCKS - start)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BLOCK], x.layout)
    w_tiles = gl.allocate_shared_memory(
        weight.dtype, [2 * STAGES, WEIGHT_ROWS, BLOCK], weight.layout
    )
    # `full`: the producer has filled a stage. `empty`: both consumers have multiplied its blocks.
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    buffers = (x_tiles, w_tiles, full, empty)
    if DEPENDENT:
        gdc_launch_dependents()
    # The tile's number, first row of x and first column of the output (a row of the weight).
    place = (tile, tile % row_tiles * ROWS, tile // row_tiles * (2 * WEIGHT_ROWS))
    epilogue = (x_scale, scale, out, partial, arrived, num_rows)
    sizes: gl.constexpr = (N, ROWS, STAGES, DEPENDENT)
    gl.warp_specialize(
        [
            (_consume, (buffers, epilogue, place, part, parts, count, sizes, 0)),
            (_consume, (buffers, epilogue, place, part, parts, count, sizes, 1)),
            (_produce, (x, weight, buffers, place, start, count, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(x, weight, buffers, place, start, count, sizes: gl.constexpr):
    ROWS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    DEPENDENT: gl.constexpr = sizes[3]
    x_tiles, w_tiles, full, empty = buffers
    _, row, column = place
    ahead = 0
    if DEPENDENT:
        # No earlier launch writes the weight, so fill all stages with it before waiting for x.
        ahead = gl.minimum(count, STAGES)
        for n in range(ahead):
            mbarrier.expect(full.index(n), BLOCK * (ROWS + 2 * WEIGHT_ROWS))
            _fetch_weight(weight, column, (start + n) * BLOCK, n, w_tiles, full)
        gdc_wait()
        for n in range(ahead):
            fetch(x, [row, (start + n) * BLOCK], full.index(n), x_tiles.index(n))
    for n in range(ahead, count):
        stage, at = n % STAGES, (start + n) * BLOCK
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), BLOCK * (ROWS + 2 * WEIGHT_ROWS))
        _fetch_weight(weight, column, at, stage, w_tiles, full)
        fetch(x, [row, at], full.index(stage), x_tiles.index(stage))


@gluon.jit
def _fetch_weight(weight, column, at, stage, w_tiles, full):
    for consumer in gl.static_range(2):
        w_tile = w_tiles.index(2 * stage + consumer)
        fetch(weight, [column + consumer * WEIGHT_ROWS, at], full.index(stage), w_tile)


@gluon.jit
def _consume(
    buffers, epilogue, place, part, parts, count, sizes: gl.constexpr, CONSUMER: gl.constexpr
):
    N: gl.constexpr = sizes[0]
    ROWS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    x_tiles, w_tiles, full, empty = buffers
    x_scale, scale, out, partial, arrived, num_rows = epilogue
    tile, row, column = place
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    sums = gl.zeros([WEIGHT_ROWS, ROWS], gl.float32, layout)
    for n in range(count):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        x_tile = x_tiles.index(stage).permute((1, 0))
        sums = warpgroup_mma(w_tiles.index(2 * stage + CONSUMER), x_tile, sums, is_async=True)
        # Wait for the previous product, whose stage can then be filled again.
        sums = warpgroup_mma_wait(1, deps=(sums,))
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
    sums = warpgroup_mma_wait(0, deps=(sums,))
    if partial is not None:
        SLOT: gl.constexpr = 2 * WEIGHT_ROWS * ROWS
        slot = partial + CONSUMER * WEIGHT_ROWS * ROWS + tile * parts * SLOT
        if part > 0:
            gl.store(at_slot(sums, slot + part * SLOT), sums)
            publish_part(arrived + tile, CONSUMER)
        else:
            await_parts(arrived + tile, parts - 1, CONSUMER)
            for other in range(1, parts):
                sums += gl.load(at_slot(sums, slot + other * SLOT))
    if part == 0:
        first_column = column + CONSUMER * WEIGHT_ROWS
        columns = first_column + gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, layout))
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        sums *= gl.load(scale + gl.minimum(columns, N - 1))[:, None]
        sums *= gl.load(x_scale + gl.minimum(rows, num_rows - 1))[None, :]
        store_tile(sums, out, row, first_column, num_rows, N, False, "")
