"""The kernel of `w8a8_hopper.py`, in Gluon. A producer warp fetches blocks of x and of the weight
with TMA. Two consumer warpgroups multiply the blocks in shared memory with WGMMA. The parts of a
tile are added up as in `stream_k_kernels.py`.
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


@gluon.jit(do_not_specialize=["num_rows", "row_tiles", "parts", "each"])
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
    each,
    N: gl.constexpr,
    BLOCKS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    # A program has `each` blocks of K of one tile; the last part of a tile may have fewer.
    tile, part = gl.program_id(0) // parts, gl.program_id(0) % parts
    start = part * each
    count = gl.minimum(each, BLOCKS - start)
    x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, BLOCK], x.layout)
    w_tiles = gl.allocate_shared_memory(
        weight.dtype, [2 * STAGES, WEIGHT_ROWS, BLOCK], weight.layout
    )
    tiles = (x_tiles, w_tiles, make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    if DEPENDENT:
        gdc_launch_dependents()
    place = (tile, tile % row_tiles * ROWS, tile // row_tiles * (2 * WEIGHT_ROWS))
    to = (x_scale, scale, out, partial, arrived, num_rows)
    sizes: gl.constexpr = (N, ROWS, STAGES, DEPENDENT)
    gl.warp_specialize(
        [
            (_consume, (tiles, to, place, part, parts, count, sizes, 0)),
            (_consume, (tiles, to, place, part, parts, count, sizes, 1)),
            (_produce, (x, weight, tiles, place, start, count, sizes)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(x, weight, tiles, place, start, count, sizes: gl.constexpr):
    ROWS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    DEPENDENT: gl.constexpr = sizes[3]
    x_tiles, w_tiles, full, empty = tiles
    _, row, line = place
    ahead = 0
    if DEPENDENT:
        # No earlier launch writes the weight, so fill all stages with it before waiting for x.
        ahead = gl.minimum(count, STAGES)
        for n in range(ahead):
            mbarrier.expect(full.index(n), BLOCK * (ROWS + 2 * WEIGHT_ROWS))
            _fetch_lines(weight, line, (start + n) * BLOCK, n, w_tiles, full)
        gdc_wait()
        for n in range(ahead):
            fetch(x, [row, (start + n) * BLOCK], full.index(n), x_tiles.index(n))
    for n in range(ahead, count):
        stage, at = n % STAGES, (start + n) * BLOCK
        mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), BLOCK * (ROWS + 2 * WEIGHT_ROWS))
        _fetch_lines(weight, line, at, stage, w_tiles, full)
        fetch(x, [row, at], full.index(stage), x_tiles.index(stage))


@gluon.jit
def _fetch_lines(weight, line, at, stage, w_tiles, full):
    for consumer in gl.static_range(2):
        to = w_tiles.index(2 * stage + consumer)
        fetch(weight, [line + consumer * WEIGHT_ROWS, at], full.index(stage), to)


@gluon.jit
def _consume(tiles, to, place, part, parts, count, sizes: gl.constexpr, CONSUMER: gl.constexpr):
    N: gl.constexpr = sizes[0]
    ROWS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    x_tiles, w_tiles, full, empty = tiles
    x_scale, scale, out, partial, arrived, num_rows = to
    tile, row, line = place
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    sums = gl.zeros([WEIGHT_ROWS, ROWS], gl.float32, result)
    for n in range(count):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), n // STAGES & 1)
        of_x = x_tiles.index(stage).permute((1, 0))
        sums = warpgroup_mma(w_tiles.index(2 * stage + CONSUMER), of_x, sums, is_async=True)
        # The previous product has ended, so its stage can be filled again.
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
        column = line + CONSUMER * WEIGHT_ROWS
        columns = column + gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, result))
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, result))
        sums *= gl.load(scale + gl.minimum(columns, N - 1))[:, None]
        sums *= gl.load(x_scale + gl.minimum(rows, num_rows - 1))[None, :]
        store_tile(sums, out, row, column, num_rows, N, False, "")
