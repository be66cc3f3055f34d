"""The kernel of `stream_k.py`, for Hopper, in Gluon: what each warp does is written down here.

    a producer     one warp: has the bulk copy engine (TMA) fetch tiles of the rows and of the
                   codes, a block of K at a time, as soon as there is room
    two consumers  a warpgroup each, with half of a tile's columns: makes numbers of codes in
                   registers, for the matrix units (WGMMA) to multiply with the rows

While the matrix units have what one consumer made, the other one makes the next. Of tiles of 256
rows, where that takes longest, they take turns.
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

# By the names of Triton 3.7 and 3.9, and those before.
_all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

BLOCK = gl.constexpr(128)  # numbers of K at one time: a block of 4-bit codes
HALF = gl.constexpr(64)  # of them: those of two nibbles
PAIRS = gl.constexpr(16)  # of words, of a block and a line
WEIGHT_ROWS = gl.constexpr(64)  # rows of the weight that a consumer has: what the matrix units take

_NUMBERS_BF16 = gl.constexpr([number_4_asm("bf16", n) for n in range(4)])
_NUMBERS_F16 = gl.constexpr([number_4_asm("f16", n) for n in range(4)])
_TWICE_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $1;")
_TWICE_F16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")


# Pairs of words where the matrix units take their numbers from: a thread has those of two lines, 8
# apart; of a gated pair, of the same line of each half.
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
    """Return a tensor descriptor with tiles of so many rows and bytes."""
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
    x_more,
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
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    # A program has `whole_tiles` tiles. The tiles that remain have `shared_blocks` blocks, of which
    # each program has `shared_blocks_each`.
    program, programs = gl.program_id(0), gl.num_programs(0)
    # A tile has ROWS rows and MORE: Triton's own sizes are powers of two.
    x_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, ROWS, HALF], x.layout)
    more_tiles = x_tiles
    if MORE > 0:
        more_tiles = gl.allocate_shared_memory(x.dtype, [2 * STAGES, MORE, HALF], x_more.layout)
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
    tiles = (x_tiles, more_tiles, code_tiles, x_full, x_empty, code_full, code_empty, turn)
    of_groups = (scale, zero, offset)
    to = (out, partial, arrived, num_rows, row_tiles, shared_blocks_each)
    sizes: gl.constexpr = (N, BLOCKS, GROUP, ROWS, MORE, STAGES)
    gl.warp_specialize(
        [
            (_consume, (tiles, of_groups, to, work, sizes, GATED, ACTIVATION, 0)),
            (_consume, (tiles, of_groups, to, work, sizes, GATED, ACTIVATION, 1)),
            (_produce, (x, x_more, codes, tiles, row_tiles, work, sizes, GATED)),
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
def _place(unit, work, BLOCKS: gl.constexpr):
    """Return the tile that a program's unit belongs to, and the unit's block of that tile."""
    program, programs, whole, begin, _ = work
    rest = begin + unit - whole
    is_whole = unit < whole
    tile = gl.where(is_whole, unit // BLOCKS, whole // BLOCKS) * programs
    tile += gl.where(is_whole, program, rest // BLOCKS)
    return tile, gl.where(is_whole, unit, rest) % BLOCKS


@gluon.jit
def _produce(x, x_more, codes, tiles, row_tiles, work, sizes: gl.constexpr, GATED: gl.constexpr):
    N: gl.constexpr = sizes[0]
    BLOCKS: gl.constexpr = sizes[1]
    ROWS: gl.constexpr = sizes[3]
    MORE: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[5]
    TILE: gl.constexpr = WEIGHT_ROWS if GATED else 2 * WEIGHT_ROWS
    HEIGHT: gl.constexpr = codes.block_shape[0]
    SLICES: gl.constexpr = 2 * WEIGHT_ROWS // HEIGHT
    x_tiles, more_tiles, code_tiles, x_full, x_empty, code_full, code_empty, _ = tiles
    _, _, whole, begin, end = work
    for unit in range(whole + end - begin):
        stage = unit % STAGES
        tile, block = _place(unit, work, BLOCKS)
        row, column = tile % row_tiles * (ROWS + MORE), tile // row_tiles * TILE
        phase = (unit // STAGES & 1) ^ 1
        mbarrier.wait(code_empty.index(stage), phase)
        ready = code_full.index(stage)
        mbarrier.expect(ready, BLOCK * WEIGHT_ROWS)  # a code is half a byte
        for n in gl.static_range(SLICES):
            # Of a gated pair: the gate's before the up's, for each consumer.
            line = column + n // 2 * HEIGHT + n % 2 * N if GATED else column + n * HEIGHT
            to = code_tiles.index(stage * SLICES + n)
            fetch(codes, [line, block * PAIRS], ready, to)
        for n in gl.static_range(2):
            half = 2 * stage + n
            mbarrier.wait(x_empty.index(half), phase)
            ready = x_full.index(half)
            mbarrier.expect(ready, 2 * (ROWS + MORE) * HALF)
            at = block * BLOCK + n * HALF
            fetch(x, [row, at], ready, x_tiles.index(half))
            if MORE > 0:
                to = more_tiles.index(half)
                fetch(x_more, [row + ROWS, at], ready, to)


@gluon.jit
def _consume(
    tiles,
    of_groups,
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
    MORE: gl.constexpr = sizes[4]
    STAGES: gl.constexpr = sizes[5]
    TILE: gl.constexpr = WEIGHT_ROWS if GATED else 2 * WEIGHT_ROWS
    IN_TURNS: gl.constexpr = ROWS == 256
    x_tiles, more_tiles, code_tiles, x_full, x_empty, code_full, code_empty, turn = tiles
    out, partial, arrived, num_rows, row_tiles, shared_blocks_each = to
    program, programs, whole, begin, end = work
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    more_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or 8, 16])
    more_left: gl.constexpr = gl.DotOperandLayout(0, more_result, 2)
    number = gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, _WORDS))
    kind: gl.constexpr = x_tiles.dtype
    unit = 0
    while unit < whole + end - begin:
        tile, start = _place(unit, work, BLOCKS)
        count = gl.minimum(BLOCKS - start, whole + end - begin - unit)
        row = tile % row_tiles * (ROWS + MORE)
        column = tile // row_tiles * TILE + CONSUMER * (TILE // 2)
        # A gated pair's lines take turns, 8 by 8: a thread has the same columns' of both.
        line = column + (number // 16 * 8 + number % 8 if GATED else number)
        line = gl.minimum(line, N - 1) + (number // 8 % 2 * N if GATED else 0)
        line *= BLOCKS * BLOCK // GROUP
        sums = gl.zeros([WEIGHT_ROWS, ROWS], gl.float32, result)
        more = gl.zeros([WEIGHT_ROWS, MORE or 8], gl.float32, more_result)
        # Scales are asked for two blocks ahead, as nothing else fetches them.
        here = _groups(of_groups, line, start, GROUP)
        ahead = _groups(of_groups, line, gl.minimum(start + 1, BLOCKS - 1), GROUP)
        for n in range(count):
            stage, phase = (unit + n) % STAGES, (unit + n) // STAGES & 1
            mbarrier.wait(code_full.index(stage), phase)
            words = _words(code_tiles, stage, GATED, CONSUMER)
            first = _numbers(words, here, 0, of_groups, GROUP, left, kind)
            second = _numbers(words, here, 2, of_groups, GROUP, left, kind)
            here = ahead
            ahead = _groups(of_groups, line, gl.minimum(start + n + 2, BLOCKS - 1), GROUP)
            mbarrier.wait(x_full.index(2 * stage), phase)
            if IN_TURNS:
                mbarrier.wait(turn.index(CONSUMER), (unit + n & 1) ^ (1 - CONSUMER))
            sums = warpgroup_mma(first, _of_x(x_tiles, stage, 0), sums, is_async=True)
            if MORE > 0:
                same = gl.convert_layout(first, more_left, assert_trivial=True)
                more = warpgroup_mma(same, _of_x(more_tiles, stage, 0), more, is_async=True)
            mbarrier.wait(x_full.index(2 * stage + 1), phase)
            sums = warpgroup_mma(second, _of_x(x_tiles, stage, 1), sums, is_async=True)
            if MORE > 0:
                same = gl.convert_layout(second, more_left, assert_trivial=True)
                more = warpgroup_mma(same, _of_x(more_tiles, stage, 1), more, is_async=True)
                sums, more = warpgroup_mma_wait(2, deps=(sums, more))
            else:
                sums = warpgroup_mma_wait(1, deps=(sums,))
            if IN_TURNS:
                mbarrier.arrive(turn.index(1 - CONSUMER), count=1)
            # Not once codes are loaded: threads that meet do not wait for one another's loads.
            mbarrier.arrive(code_empty.index(stage), count=1)
            mbarrier.arrive(x_empty.index(2 * stage), count=1)
            if MORE > 0:
                sums, more = warpgroup_mma_wait(0, deps=(sums, more))
            else:
                sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(x_empty.index(2 * stage + 1), count=1)
        unit += count
        if partial is not None:
            place = tile - whole // BLOCKS * programs  # among the tiles that are shared
            to_counter = arrived + place
            slot = partial + CONSUMER * WEIGHT_ROWS * (ROWS + MORE)
            SLOT: gl.constexpr = 2 * WEIGHT_ROWS * (ROWS + MORE)
            if start > 0:
                gl.store(at_slot(sums, slot + program * SLOT), sums)
                if MORE > 0:
                    gl.store(at_slot(more, slot + program * SLOT + WEIGHT_ROWS * ROWS), more)
                publish_part(to_counter, CONSUMER)
            elif count < BLOCKS:
                others = ((place + 1) * BLOCKS - 1) // shared_blocks_each - program
                await_parts(to_counter, others, CONSUMER)
                for other in range(program + 1, program + 1 + others):
                    sums += gl.load(at_slot(sums, slot + other * SLOT))
                    if MORE > 0:
                        more += gl.load(at_slot(more, slot + other * SLOT + WEIGHT_ROWS * ROWS))
        if start == 0:
            store_tile(sums, out, row, column, num_rows, N, GATED, ACTIVATION)
            if MORE > 0:
                store_tile(more, out, row + ROWS, column, num_rows, N, GATED, ACTIVATION)


@gluon.jit
def publish_part(counter, CONSUMER: gl.constexpr):
    """Publish a part that is not the first of its tile. A program has at most one such part, before
    everything else that it shares."""
    # All threads' stores before the count.
    _all_threads()
    gl.atomic_add(counter, 1 << (16 * CONSUMER), sem="release")


@gluon.jit
def await_parts(counter, others, CONSUMER: gl.constexpr):
    """Wait for the parts of a tile after the first."""
    there = 0
    while there < others:
        there = gl.atomic_add(counter, 0, sem="acquire") >> (16 * CONSUMER) & 0xFFFF
    _all_threads()
    gl.atomic_add(counter, -others * (1 << (16 * CONSUMER)), sem="relaxed")


@gluon.jit
def at_slot(sums, place):
    """Return the addresses of sums from `place` on: what a warp stores at one time lies
    together."""
    line = gl.arange(0, WEIGHT_ROWS, layout=gl.SliceLayout(1, sums.type.layout))
    row = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))
    return place + (row // 8 * (8 * WEIGHT_ROWS) + row % 8)[None, :] + line[:, None] * 8


@gluon.jit
def _words(code_tiles, stage, GATED: gl.constexpr, CONSUMER: gl.constexpr):
    """[lines, pairs of words]"""
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
def _groups(of_groups, line, block, GROUP: gl.constexpr):
    """Load the scale of each run of a block, and its zero or offset if the format has one."""
    scale, zero, offset = of_groups
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
def _of_x(x_tiles, stage, n: gl.constexpr):
    return x_tiles.index(stage * 2 + n).permute((1, 0))


@gluon.jit
def _numbers(
    words,
    found,
    n: gl.constexpr,
    of_groups,
    GROUP: gl.constexpr,
    left: gl.constexpr,
    kind: gl.constexpr,
):
    """Those of the n-th nibbles of words and of the next: [lines, half a block], a left operand."""
    first = _number(words, found, n, of_groups, GROUP, kind)
    second = _number(words, found, n + 1, of_groups, GROUP, kind)
    pairs = gl.permute(gl.join(first, second), (0, 2, 1))
    pairs = gl.reshape(pairs, [WEIGHT_ROWS, 2 * PAIRS])
    # (A type that is not written down there, Triton does not take.)
    if kind == gl.bfloat16:
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
def _number(words, found, n: gl.constexpr, of_groups, GROUP: gl.constexpr, kind: gl.constexpr):
    """Return the values of the n-th nibbles of words, in pairs: (code − zero) · scale, or with
    offsets (code − 8) · scale + (offset + 8 · scale). `found`: by `_groups`."""
    _, zero, offset = of_groups
    POWER: gl.constexpr = 128.0 if kind == gl.bfloat16 else 1024.0
    RUNS: gl.constexpr = BLOCK // GROUP if GROUP < BLOCK else 1
    m: gl.constexpr = n * RUNS // 4
    factor = found[m].to(gl.float32)
    taken = gl.full(factor.shape, -8.0 - POWER, gl.float32, factor.type.layout)
    term = gl.full(factor.shape, 0.0, gl.float32, factor.type.layout)
    if offset is not None:
        term = found[RUNS + m].to(gl.float32) + 8 * factor
    elif zero is not None:
        taken = -POWER - found[RUNS + m].to(gl.float32)
    return gl.inline_asm_elementwise(
        _NUMBERS_BF16[n] if kind == gl.bfloat16 else _NUMBERS_F16[n],
        "=r,r,r,r,r",
        [
            words,
            _twice(taken, words, kind),
            _twice(factor, words, kind),
            _twice(term, words, kind),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _twice(numbers, words, kind: gl.constexpr):
    """Each of the lines' numbers twice in a word, for all words of the line."""
    both = gl.inline_asm_elementwise(
        _TWICE_BF16 if kind == gl.bfloat16 else _TWICE_F16,
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
    """[lines, rows] of a consumer → its columns of the rows, activated."""
    ROWS: gl.constexpr = sums.shape[1]
    kind: gl.constexpr = out.dtype.element_ty
    if GATED:
        both = gl.permute(gl.reshape(sums, [WEIGHT_ROWS // 16, 2, 8, ROWS]), (0, 2, 3, 1))
        gate, up = gl.split(gl.reshape(both, [WEIGHT_ROWS // 2, ROWS, 2]))
        sums = gate_times_up(gate, up, kind, ACTIVATION)
    # A warp keeps its columns, of which a thread has all of a row, or 8.
    COLUMNS: gl.constexpr = sums.shape[0]
    EACH: gl.constexpr = COLUMNS // 4
    by_rows: gl.constexpr = gl.BlockedLayout([EACH, 1], [1, 32], [4, 1], [0, 1])
    rounded = gl.convert_layout(sums.to(kind), by_rows)
    at = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, by_rows))
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, by_rows))
    mask = (rows < num_rows)[None, :] & (at < N)[:, None]
    gl.store(out + rows.to(gl.int64)[None, :] * N + at[:, None], rounded, mask=mask)
