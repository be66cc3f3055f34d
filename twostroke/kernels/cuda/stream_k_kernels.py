"""The kernel of `stream_k.py`, for Hopper, in Gluon, which assigns the work to the warps:

    a producer     one warp, which fetches blocks of x and of the codes with TMA
    two consumers  a warpgroup each, with half of a tile's columns, which converts codes to elements
                   in registers, and multiplies them with x (WGMMA)

While the tensor cores multiply for one consumer, the other consumer converts codes. With tiles of
256 rows, whose products take longest, the consumers alternate strictly.

A line is a row of the weight in the tile of a consumer. `packed_kernels.py` defines runs.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twostroke.kernels.cuda.dependent_launch import wait_for_previous
from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.packed_codes import number_4_asm

# Triton 3.7 and 3.9 have renamed these functions.
_all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

BLOCK = gl.constexpr(128)  # elements of K in one step: a block of 4-bit codes
HALF = gl.constexpr(64)  # elements of a block in two of the four nibbles
PAIRS = gl.constexpr(16)  # pairs of words of a block and a line
WEIGHT_ROWS = gl.constexpr(64)  # rows of the weight of a consumer: the size of a WGMMA operand

_NUMBERS_BF16 = gl.constexpr([number_4_asm("bf16", n) for n in range(4)])
_NUMBERS_F16 = gl.constexpr([number_4_asm("f16", n) for n in range(4)])
_TWICE_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
_TWICE_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")


# The layouts of pairs of words from which a WGMMA operand results without moves between threads. A
# thread has the pairs of two lines, 8 apart; if gated, of the same line of gate and of up.
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 16],
    )
)
_WORDS_OF_HALF = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 16],
    )
)


def descriptor(matrix: torch.Tensor, rows: int, size: int) -> TensorDescriptor:
    """Return a tensor descriptor for tiles of `rows` rows of `size` bytes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=size, element_bitwidth=8 * matrix.itemsize)
    return TensorDescriptor.from_tensor(matrix, [rows, size // matrix.itemsize], layout)


@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "row_tiles",
        "whole_tiles",
        "shared_blocks",
        "shared_blocks_each",
    ]
)
def multiply_stream_k(
    scale,
    zero,
    offset,
    out,
    partial,
    arrived,
    x,
    x_extra,
    codes,
    num_rows,
    row_tiles,
    whole_tiles,
    shared_blocks,
    shared_blocks_each,
    N: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    EXTRA: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    # A program computes `whole_tiles` tiles. The remaining tiles have `shared_blocks` blocks of K,
    # of which each program computes `shared_blocks_each`.
    program, programs = gl.program_id(0), gl.num_programs(0)
    # A tile has ROWS + EXTRA rows, because sizes in Triton are powers of two.
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, HALF], x.layout)
    extra_tiles = x_tiles
    if EXTRA > 0:
        extra_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, EXTRA, HALF], x_extra.layout)
    SLICES: gl.constexpr = 2 * WEIGHT_ROWS // codes.block_shape[0]
    code_tiles = gl.allocate_shared_memory(
        gl.int32, [SLICES * STAGES, codes.block_shape[0], PAIRS], codes.layout
    )
    x_full, x_empty = make_barriers(2 * STAGES, 1), make_barriers(2 * STAGES, 2)
    code_full, code_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    turn = make_barriers(2, 1)
    begin = gl.minimum(program * shared_blocks_each, shared_blocks)
    end = gl.minimum(begin + shared_blocks_each, shared_blocks)
    work = (program, programs, whole_tiles * BLOCKS, begin, end)
    wait_for_previous(DEPENDENT)
    tiles = (x_tiles, extra_tiles, code_tiles, x_full, x_empty, code_full, code_empty, turn)
    group_params = (scale, zero, offset)
    to = (out, partial, arrived, num_rows, row_tiles, shared_blocks_each)
    sizes: gl.constexpr = (N, BLOCKS, GROUP, ROWS, EXTRA, STAGES)
    gl.warp_specialize(
        [
            (_consume, (tiles, group_params, to, work, sizes, GATED, ACTIVATION, 0)),
            (_consume, (tiles, group_params, to, work, sizes, GATED, ACTIVATION, 1)),
            (_produce, (x, x_extra, codes, tiles, row_tiles, work, sizes, GATED)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(COUNT):
        mbarrier.init(barriers.index(n), count=ARRIVALS)
    return barriers


@gluon.jit
def _tile_and_block(unit, work, BLOCKS: gl.constexpr):
    """Return the tile and the block of K of a unit of a program's work, which is one block."""
    program, programs, whole, begin, _ = work
    rest = begin + unit - whole
    is_whole = unit < whole
    tile = gl.where(is_whole, unit // BLOCKS, whole // BLOCKS) * programs
    tile += gl.where(is_whole, program, rest // BLOCKS)
    return tile, gl.where(is_whole, unit, rest) % BLOCKS


@gluon.jit
def _produce(x, x_extra, codes, tiles, row_tiles, work, sizes: gl.constexpr, GATED: gl.constexpr):
    N: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1]
    ROWS: gl.constexpr = sizes[3]
    EXTRA: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[5]
    TILE: gl.constexpr = WEIGHT_ROWS if GATED else 2 * WEIGHT_ROWS
    HEIGHT: gl.constexpr = codes.block_shape[0]
    SLICES: gl.constexpr = 2 * WEIGHT_ROWS // HEIGHT
    x_tiles, extra_tiles, code_tiles, x_full, x_empty, code_full, code_empty, _ = tiles
    _, _, whole, begin, end = work
    for unit in range(whole + end - begin):
        stage = unit % STAGES
        tile, block = _tile_and_block(unit, work, BLOCKS)
        row, column = tile % row_tiles * (ROWS + EXTRA), tile // row_tiles * TILE
        phase = (unit // STAGES & 1) ^ 1
        mbarrier.wait(code_empty.index(stage), phase)
        ready = code_full.index(stage)
        mbarrier.expect(ready, BLOCK * WEIGHT_ROWS)  # a code is half a byte
        for n in gl.static_range(SLICES):
            # If gated: for each consumer the lines of gate, then those of up.
            line = column + n // 2 * HEIGHT + n % 2 * N if GATED else column + n * HEIGHT
            to = code_tiles.index(stage * SLICES + n)
            fetch(codes, [line, block * PAIRS], ready, to)
        for n in gl.static_range(2):
            half = 2 * stage + n
            mbarrier.wait(x_empty.index(half), phase)
            ready = x_full.index(half)
            mbarrier.expect(ready, 2 * (ROWS + EXTRA) * HALF)
            at = block * BLOCK + n * HALF
            fetch(x, [row, at], ready, x_tiles.index(half))
            if EXTRA > 0:
                to = extra_tiles.index(half)
                fetch(x_extra, [row + ROWS, at], ready, to)


@gluon.jit
def _consume(
    tiles,
    group_params,
    to,
    work,
    sizes: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    N: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1]
    GROUP: gl.constexpr = sizes[2]
    ROWS: gl.constexpr = sizes[3]
    EXTRA: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[5]
    TILE: gl.constexpr = WEIGHT_ROWS if GATED else 2 * WEIGHT_ROWS
    IN_TURNS: gl.constexpr = ROWS == 256
    x_tiles, extra_tiles, code_tiles, x_full, x_empty, code_full, code_empty, turn = tiles
    out, partial, arrived, num_rows, row_tiles, shared_blocks_each = to
    program, programs, whole, begin, end = work
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    extra_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, EXTRA or 8, 16])
    extra_left: gl.constexpr = gl.DotOperandLayout(0, extra_result, 2)
    number = gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, _WORDS))
    dtype: gl.constexpr = x_tiles.dtype
    unit = 0
    while unit < whole + end - begin:
        tile, start = _tile_and_block(unit, work, BLOCKS)
        count = gl.minimum(BLOCKS - start, whole + end - begin - unit)
        row = tile % row_tiles * (ROWS + EXTRA)
        column = tile // row_tiles * TILE + CONSUMER * (TILE // 2)
        # If gated, 8 lines of gate alternate with 8 lines of up, so that a thread has gate and up
        # of the same columns.
        line = column + (number // 16 * 8 + number % 8 if GATED else number)
        line = gl.minimum(line, N - 1) + (number // 8 % 2 * N if GATED else 0)
        line *= BLOCKS * BLOCK // GROUP
        sums = gl.zeros([WEIGHT_ROWS, ROWS], gl.float32, result)
        extra = gl.zeros([WEIGHT_ROWS, EXTRA or 8], gl.float32, extra_result)
        # Scales are loaded two blocks ahead, because no other load prefetches them.
        here = _load_groups(group_params, line, start, GROUP)
        ahead = _load_groups(group_params, line, gl.minimum(start + 1, BLOCKS - 1), GROUP)
        for n in range(count):
            stage, phase = (unit + n) % STAGES, (unit + n) // STAGES & 1
            mbarrier.wait(code_full.index(stage), phase)
            words = _load_words(code_tiles, stage, GATED, CONSUMER)
            first = _left_operand(words, here, 0, group_params, GROUP, left, dtype)
            second = _left_operand(words, here, 2, group_params, GROUP, left, dtype)
            here = ahead
            ahead = _load_groups(group_params, line, gl.minimum(start + n + 2, BLOCKS - 1), GROUP)
            mbarrier.wait(x_full.index(2 * stage), phase)
            if IN_TURNS:
                mbarrier.wait(turn.index(CONSUMER), (unit + n & 1) ^ (1 - CONSUMER))
            sums = warpgroup_mma(first, _x_tile(x_tiles, stage, 0), sums, is_async=True)
            if EXTRA > 0:
                same = gl.convert_layout(first, extra_left, assert_trivial=True)
                extra = warpgroup_mma(same, _x_tile(extra_tiles, stage, 0), extra, is_async=True)
            mbarrier.wait(x_full.index(2 * stage + 1), phase)
            sums = warpgroup_mma(second, _x_tile(x_tiles, stage, 1), sums, is_async=True)
            if EXTRA > 0:
                same = gl.convert_layout(second, extra_left, assert_trivial=True)
                extra = warpgroup_mma(same, _x_tile(extra_tiles, stage, 1), extra, is_async=True)
                sums, extra = warpgroup_mma_wait(2, deps=(sums, extra))
            else:
                sums = warpgroup_mma_wait(1, deps=(sums,))
            if IN_TURNS:
                mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
            # Not directly after the loads of the codes, because `arrive` does not wait for the
            # loads of other threads.
            mbarrier.arrive(code_empty.index(stage), count=1)
            mbarrier.arrive(x_empty.index(2 * stage), count=1)
            if EXTRA > 0:
                sums, extra = warpgroup_mma_wait(0, deps=(sums, extra))
            else:
                sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(x_empty.index(2 * stage + 1), count=1)
        unit += count
        if partial is not None:
            place = tile - whole // BLOCKS * programs  # index among the shared tiles
            to_counter = arrived + place
            slot = partial + CONSUMER * WEIGHT_ROWS * (ROWS + EXTRA)
            SLOT: gl.constexpr = 2 * WEIGHT_ROWS * (ROWS + EXTRA)
            if start > 0:
                gl.store(at_slot(sums, slot + program * SLOT), sums)
                if EXTRA > 0:
                    gl.store(at_slot(extra, slot + program * SLOT + WEIGHT_ROWS * ROWS), extra)
                publish_part(to_counter, CONSUMER)
            elif count < BLOCKS:
                others = ((place + 1) * BLOCKS - 1) // shared_blocks_each - program
                await_parts(to_counter, others, CONSUMER)
                for other in range(program + 1, program + 1 + others):
                    sums += gl.load(at_slot(sums, slot + other * SLOT))
                    if EXTRA > 0:
                        extra += gl.load(at_slot(extra, slot + other * SLOT + WEIGHT_ROWS * ROWS))
        if start == 0:
            store_tile(sums, out, row, column, num_rows, N, GATED, ACTIVATION)
            if EXTRA > 0:
                store_tile(extra, out, row + ROWS, column, num_rows, N, GATED, ACTIVATION)


@gluon.jit
def publish_part(counter, CONSUMER: gl.constexpr):
    """Publish a part that is not the first of its tile. A program has at most one such part, and
    computes it before its other shared part."""
    # The stores of all threads must come before the count.
    _all_threads()
    gl.atomic_add(counter, 1 << (16 * CONSUMER), sem="release")


@gluon.jit
def await_parts(counter, others, CONSUMER: gl.constexpr):
    """Wait until all parts of a tile after the first are published."""
    num_published = 0
    while num_published < others:
        num_published = gl.atomic_add(counter, 0, sem="acquire") >> (16 * CONSUMER) & 0xFFFF
    _all_threads()
    gl.atomic_add(counter, -others * (1 << (16 * CONSUMER)), sem="relaxed")


@gluon.jit
def at_slot(sums, place):
    """Return the addresses of sums from `place` on, such that a warp stores contiguous memory."""
    line = gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, sums.type.layout))
    row = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    return place + (row // 8 * (8 * WEIGHT_ROWS) + row % 8)[None, :] + line[:, None] * 8


@gluon.jit
def _load_words(code_tiles, stage, GATED: gl.constexpr, CONSUMER: gl.constexpr):
    """Load the words of a stage for a consumer, [lines, pairs of words]."""
    if GATED:
        first = code_tiles.index(stage * 4 + CONSUMER * 2).load(_WORDS_OF_HALF)
        second = code_tiles.index(stage * 4 + CONSUMER * 2 + 1).load(_WORDS_OF_HALF)
        both = gl.permute(gl.join(first, second), (0, 2, 1))
        both = gl.permute(gl.reshape(both, [WEIGHT_ROWS // 16, 8, 2, PAIRS]), (0, 2, 1, 3))
        both = gl.reshape(both, [WEIGHT_ROWS, PAIRS])
        words = gl.convert_layout(both, _WORDS, assert_trivial=True)
    else:
        words = code_tiles.index(stage * 2 + CONSUMER).load(_WORDS)
    return words


@gluon.jit
def _load_groups(group_params, line, block, GROUP: gl.constexpr):
    """Load the scale of each run of a block, and its zero or offset if the format has one."""
    scale, zero, offset = group_params
    RUNS: gl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    at = line + block * BLOCK // GROUP
    found = ()
    for n in gl.static_range(RUNS):
        found += (gl.load(scale + at + n),)  # type: ignore[assignment]
    for n in gl.static_range(RUNS):
        if offset is not None:
            found += (gl.load(offset + at + n),)  # type: ignore[assignment]
        elif zero is not None:
            found += (gl.load(zero + at + n),)  # type: ignore[assignment]
    return found


@gluon.jit
def _x_tile(x_tiles, stage, n: gl.constexpr):
    return x_tiles.index(stage * 2 + n).permute((1, 0))


@gluon.jit
def _left_operand(
    words,
    found,
    n: gl.constexpr,
    group_params,
    GROUP: gl.constexpr,
    left: gl.constexpr,
    dtype: gl.constexpr,
):
    """Return the elements of nibbles n and n + 1 of the words, [lines, half a block], in the layout
    of a left operand."""
    first = _elements(words, found, n, group_params, GROUP, dtype)
    second = _elements(words, found, n + 1, group_params, GROUP, dtype)
    pairs = gl.permute(gl.join(first, second), (0, 2, 1))
    pairs = gl.reshape(pairs, [WEIGHT_ROWS, 2 * PAIRS])
    # Triton accepts only literal dtypes here.
    if dtype == gl.bfloat16:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [pairs],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;",
            "=h,=h,r",
            [pairs],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
    numbers = gl.reshape(gl.join(even, odd), [WEIGHT_ROWS, HALF])
    return gl.convert_layout(numbers, left, assert_trivial=True)


@gluon.jit
def _elements(
    words, found, n: gl.constexpr, group_params, GROUP: gl.constexpr, dtype: gl.constexpr
):
    """Return the elements of the n-th nibbles of the words, in pairs: (code − zero) · scale, or
    with offsets (code − 8) · scale + (offset + 8 · scale). `found`: by `_load_groups`."""
    _, zero, offset = group_params
    POWER: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    RUNS: gl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    m: gl.constexpr = n * RUNS // 4
    factor = found[m].to(gl.float32)
    addend = gl.full(factor.shape, -8.0 - POWER, gl.float32, factor.type.layout)
    term = gl.full(factor.shape, 0.0, gl.float32, factor.type.layout)
    if offset is not None:
        term = found[RUNS + m].to(gl.float32) + 8 * factor
    elif zero is not None:
        addend = -POWER - found[RUNS + m].to(gl.float32)
    return gl.inline_asm_elementwise(
        _NUMBERS_BF16[n] if dtype == gl.bfloat16 else _NUMBERS_F16[n],
        "=r,r,r,r,r",
        [
            words,
            _duplicated(addend, words, dtype),
            _duplicated(factor, words, dtype),
            _duplicated(term, words, dtype),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _duplicated(numbers, words, dtype: gl.constexpr):
    """Put the number of each line twice in an int32, and repeat it for all words of the line."""
    both = gl.inline_asm_elementwise(
        _TWICE_BF16 if dtype == gl.bfloat16 else _TWICE_F16,
        "=r,r",
        [numbers],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.broadcast(words, gl.expand_dims(both, 1))[1]


@gluon.jit
def store_tile(
    sums,
    out,
    row,
    column,
    num_rows,
    N: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Apply the activation, if GATED, to the sums of a consumer, [lines, rows], and store them."""
    ROWS: gl.constexpr = sums.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        both = gl.permute(gl.reshape(sums, [WEIGHT_ROWS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        gate, up = gl.split(gl.reshape(both, [WEIGHT_ROWS // 2, ROWS, 2]))
        sums = gate_times_up(gate, up, dtype, ACTIVATION)
    # A warp keeps its columns. A thread has all columns of the warp for a row.
    COLUMNS: gl.constexpr = sums.shape[0]
    EACH: gl.constexpr = COLUMNS // 4
    by_rows: gl.constexpr = gl.BlockedLayout([EACH, 1], [1, 32], [4, 1], [0, 1])
    rounded = gl.convert_layout(sums.to(dtype), by_rows)
    at = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, by_rows))
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, by_rows))
    mask = (rows < num_rows)[None, :] & (at < N)[:, None]
    gl.store(out + rows.to(gl.int64)[None, :] * N + at[:, None], rounded, mask=mask)
