"""The kernel of `prefill_hopper.py`, in Gluon.

    a producer    one warp: has the bulk copy engine (TMA) fetch tiles of keys and of values, as
                  soon as there is room
    consumers     a warpgroup each, with 64 rows of queries. The scores of a tile of keys are
                  multiplied (WGMMA) while the values of the tile before are; the softmax of the
                  scores runs while the values are still multiplied, and while another consumer,
                  whose turn it is then, has the matrix units

    consumer 0   QK ▓▓ PV ▓▓ softmax ░░░░ QK ▓▓ PV ▓▓ softmax ░░░░
    consumer 1               QK ▓▓ PV ▓▓ softmax ░░░░ QK ▓▓ PV ▓▓

A tile of queries visits keys from the last ones to the first ones: the tiles at the causal edge,
which need a mask, come before all others, and those at the edge of a window after all others.

Rows behind a chunk's end are fetched as zeros: the number of rows that are left is a dimension of
the tensor that the copy engine sees (see `rows_to_end`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from twostroke.kernels.cuda.scores import capped, unit_of
from twostroke.kernels.cuda.stream_k_kernels import fetch, make_barriers

ROWS = gl.constexpr(64)  # of queries that a consumer has: what the matrix units take
PIECE = gl.constexpr(64)  # channels of a swizzled line of shared memory


@gluon.jit(
    do_not_specialize=["items", "tiles", "window", "bound", "table_stride"],
    do_not_specialize_on_alignment=["sinks", "chunk_rows", "chunk_starts", "cu_tokens"],
)
def attend(
    q,
    sinks,
    tables,
    chunk_rows,
    chunk_starts,
    cu_tokens,
    out,
    next_item,
    keys,
    values,
    items,
    tiles,
    window,
    bound,
    scale,
    softcap,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    GROUP: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IN_TURNS: gl.constexpr,
    HOLD: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    CHUNKS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    kind: gl.constexpr = q.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tiles = gl.allocate_shared_memory(kind, [CONSUMERS, ROWS, DIM], tile_layout)
    k_tiles = gl.allocate_shared_memory(kind, [STAGES, KEYS, DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(kind, [STAGES, KEYS, DIM], tile_layout)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, CONSUMERS)
    turn = make_barriers(CONSUMERS, 1)
    # The next item of a program, by the producer.
    plan = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    plan_full, plan_empty = make_barriers(2, 1), make_barriers(2, CONSUMERS)
    shared = (q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn)
    planned = (next_item, plan, plan_full, plan_empty, items)
    where = (chunk_starts, cu_tokens, tiles, window)
    sizes: gl.constexpr = (GROUP, NUM_KV_HEADS, DIM, KEYS, STAGES, CONSUMERS, WINDOW, CHUNKS)
    how = (scale, softcap, sinks)
    to = (q, out, q_stride, q_head_stride, out_stride, out_head_stride)
    pages = (tables, chunk_rows, table_stride, bound)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (shared, planned, where, how, to, sizes, SOFTCAP, IN_TURNS, HOLD, 0)),
                (_consume, (shared, planned, where, how, to, sizes, SOFTCAP, IN_TURNS, HOLD, 1)),
                (_produce, (keys, values, shared, planned, where, pages, sizes, PAGE)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, planned, where, how, to, sizes, SOFTCAP, IN_TURNS, HOLD, 0)),
                (_consume, (shared, planned, where, how, to, sizes, SOFTCAP, IN_TURNS, HOLD, 1)),
                (_consume, (shared, planned, where, how, to, sizes, SOFTCAP, IN_TURNS, HOLD, 2)),
                (_produce, (keys, values, shared, planned, where, pages, sizes, PAGE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _place(item, where, sizes: gl.constexpr):
    """Return the place of an item: KV head, chunk, the chunk's first token, size and start, the
    item's first token of the chunk, and the tiles of keys [low, high) that it sees; none, if the
    chunk has no such tile of queries."""
    GROUP: gl.constexpr = sizes[0]
    NUM_KV_HEADS: gl.constexpr = sizes[1]
    KEYS: gl.constexpr = sizes[3]
    CONSUMERS: gl.constexpr = sizes[5]
    WINDOW: gl.constexpr = sizes[6]
    CHUNKS: gl.constexpr = sizes[7]
    TOKENS: gl.constexpr = ROWS // GROUP * CONSUMERS
    chunk_starts, cu_tokens, tiles, window = where
    # The last tiles see the most keys: they start first, and the short ones fill the gaps.
    tile = tiles - 1 - item % tiles
    head_and_chunk = item // tiles
    kv_head, chunk = head_and_chunk % NUM_KV_HEADS, head_and_chunk // NUM_KV_HEADS
    first_token = gl.load(cu_tokens + chunk).to(gl.int32)
    size = gl.load(cu_tokens + chunk + 1).to(gl.int32) - first_token
    start = gl.load(chunk_starts + chunk).to(gl.int32)
    token = tile * TOKENS
    there = token < size
    if CHUNKS != 0:
        there = there & ((start == 0) == (CHUNKS == 1))
    high = gl.cdiv(start + gl.minimum(size, token + TOKENS), KEYS)
    low = 0
    if WINDOW:
        low = gl.maximum(start + token - window + 1, 0) // KEYS
    high = gl.where(there, high, low)
    return kv_head, chunk, first_token, size, start, token, low, high


@gluon.jit
def _produce(
    keys,
    values,
    shared,
    planned,
    where,
    pages,
    sizes: gl.constexpr,
    PAGE: gl.constexpr,
):
    NUM_KV_HEADS: gl.constexpr = sizes[1]
    DIM: gl.constexpr = sizes[2]
    KEYS: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    WINDOW: gl.constexpr = sizes[6]
    BYTES: gl.constexpr = KEYS * DIM * 2
    _q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, _turn = shared
    next_item, plan, plan_full, plan_empty, items = planned
    tables, chunk_rows, table_stride, bound = pages
    item = gl.program_id(0)
    turns = 0
    done = 0
    while item < items:
        following = item + gl.num_programs(0)
        if next_item is not None:
            following = gl.atomic_add(next_item, 1, sem="relaxed") + gl.num_programs(0)
            mbarrier.wait(plan_empty.index(turns & 1), (turns // 2 & 1) ^ 1)
            line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
            plan.index(turns & 1).store(gl.full([1], 0, gl.int32, line) + following)
            mbarrier.arrive(plan_full.index(turns & 1), count=1)
            turns += 1
        kv_head, chunk, first_token, size, start, token, low, high = _place(item, where, sizes)
        if PAGE:
            table = tables + gl.load(chunk_rows + chunk).to(gl.int64) * table_stride
            last = start + size
            first = 0
            if WINDOW:  # pages before it may be anyone's by now
                first = gl.maximum(start + token - where[3] + 1, 0)
        for n in range(high - low):
            at = (high - 1 - n) * KEYS
            stage, phase = (done + n) % STAGES, ((done + n) // STAGES & 1) ^ 1
            if PAGE:
                ids = _pages_of(table, at, first, last, KEYS, PAGE)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BYTES)
            if PAGE:
                column = kv_head * DIM
                _fetch_pages(keys, ids, column, k_full, k_tiles, stage, KEYS, PAGE, DIM)
            else:
                place = [first_token + size, bound - size + at, kv_head * DIM]
                fetch(keys, place, k_full.index(stage), _as_box(k_tiles.index(stage)))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BYTES)
            if PAGE:
                column = kv_head * DIM
                _fetch_pages(values, ids, column, v_full, v_tiles, stage, KEYS, PAGE, DIM)
            else:
                place = [first_token + size, bound - size + at, (NUM_KV_HEADS + kv_head) * DIM]
                fetch(values, place, v_full.index(stage), _as_box(v_tiles.index(stage)))
        done += high - low
        item = following
    if next_item is not None:
        # The last program to end leaves the counters as they were.
        ended = gl.atomic_add(next_item + 1, 1, sem="relaxed")
        if ended == gl.num_programs(0) - 1:
            gl.store(next_item, 0)
            gl.store(next_item + 1, 0)


@gluon.jit
def _as_box(tile):
    return tile.reshape([1, tile.shape[0], tile.shape[1]])


@gluon.jit
def _pages_of(table, at, first, last, KEYS: gl.constexpr, PAGE: gl.constexpr):
    """Return the pages of a tile, and how many of each one's lines are of [first, last): none, or
    all up to `last`."""
    pages = ()
    lines = ()
    for n in gl.static_range(KEYS // PAGE):
        row = at + n * PAGE
        left = gl.minimum(gl.maximum(last - row, 0), PAGE)
        left = gl.where(row + PAGE > first, left, 0)
        pages += (gl.load(table + row // PAGE, mask=left > 0, other=0),)  # type: ignore[assignment]
        lines += (left,)  # type: ignore[assignment]
    return pages, lines


@gluon.jit
def _fetch_pages(
    cached,
    ids,
    column,
    full,
    tiles,
    stage,
    KEYS: gl.constexpr,
    PAGE: gl.constexpr,
    DIM: gl.constexpr,
):
    """Fetch the pages of a tile, in pieces as wide as the swizzled lines of shared memory."""
    PAGES: gl.constexpr = KEYS // PAGE
    PIECES: gl.constexpr = DIM // PIECE
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    count: gl.constexpr = tiles.shape[0] * PIECES * PAGES
    boxes = tiles._reinterpret(tiles.dtype, [count, 1, 1, PAGE, PIECE], layout)
    for n in gl.static_range(PAGES):
        page, left = ids[0][n], ids[1][n]
        for piece in gl.static_range(PIECES):
            to = boxes.index((stage * PIECES + piece) * PAGES + n)
            place = [page, left, PAGE - left, column + piece * PIECE]
            fetch(cached, place, full.index(stage), to)


@gluon.jit
def _consume(
    shared,
    planned,
    where,
    how,
    to,
    sizes: gl.constexpr,
    SOFTCAP: gl.constexpr,
    IN_TURNS: gl.constexpr,
    HOLD: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    GROUP: gl.constexpr = sizes[0]
    DIM: gl.constexpr = sizes[2]
    KEYS: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    CONSUMERS: gl.constexpr = sizes[5]
    WINDOW: gl.constexpr = sizes[6]
    TOKENS: gl.constexpr = ROWS // GROUP  # of a consumer
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn = shared
    next_item, plan, plan_full, plan_empty, items = planned
    scale, softcap, sinks = how
    q, out, q_stride, q_head_stride, out_stride, out_head_stride = to
    window = where[3]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LANES: gl.constexpr = DIM // 8 if DIM < 256 else 32
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    query = q_tiles.index(CONSUMER)
    tiles = (query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn)
    step: gl.constexpr = (KEYS, STAGES, CONSUMERS, SOFTCAP, IN_TURNS, CONSUMER, HOLD)
    if IN_TURNS == 2:
        _first_turn(CONSUMERS, CONSUMER)
    item = gl.program_id(0)
    turns = 0
    done = 0
    rounds = 0
    while item < items:
        kv_head, _chunk, first_token, size, start, token, low, high = _place(item, where, sizes)
        if low < high:
            # Row r is head r % GROUP of token r // GROUP; those past the chunk compute and drop.
            token += CONSUMER * TOKENS
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, coalesced))
            channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, coalesced))
            real = (row < TOKENS * GROUP) & (token + row // GROUP < size)
            line = (first_token + token + row // GROUP).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            q_at = line * q_stride + head * q_head_stride
            found = gl.load(q + q_at[:, None] + channel[None, :], mask=real[:, None], other=0.0)
            query.store(found)
            fence_async_shared()
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_scores))
            position = start + token + row // GROUP
            best = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, of_scores))
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, of_scores))
            if sinks is not None:
                there = row < TOKENS * GROUP
                sink = gl.load(sinks + kv_head * GROUP + row % GROUP, mask=there, other=0.0)
                best, total = sink * 1.4426950408889634, total + 1.0
            # Of tiles of keys, from the last on: those at the causal edge, those that all queries
            # see, and those at the window's edge.
            count = high - low
            first_query = start + token - CONSUMER * TOKENS
            at_edge = gl.maximum(high - (first_query + 1) // KEYS, 1)
            at_edge = gl.minimum(at_edge, count)
            unmasked = count
            if WINDOW:
                end = start + gl.minimum(size, token + (CONSUMERS - CONSUMER) * TOKENS)
                edge = gl.cdiv(gl.maximum(end - window, 0), KEYS)
                unmasked = gl.maximum(gl.minimum(high - edge, count), at_edge)
            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            score = gl.zeros([ROWS, KEYS], gl.float32, of_scores)
            key = k_tiles.index(stage).permute((1, 0))
            score = warpgroup_mma(query, key, score, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            weight, best, total, _fade = _softmax(
                score,
                best,
                total,
                (high - 1) * KEYS,
                position,
                window,
                scale,
                softcap,
                KEYS,
                True,
                WINDOW,
                SOFTCAP,
            )
            weight = _operand(weight, q.dtype.element_ty, of_sums)
            sums = gl.zeros([ROWS, DIM], gl.float32, of_sums)
            seen = (position, window, scale, softcap, high)
            state = (sums, weight, best, total)
            for n in range(1, at_edge):
                state = _step(state, tiles, seen, n, done, rounds, step, True, WINDOW)
            for n in range(at_edge, unmasked):
                state = _step(state, tiles, seen, n, done, rounds, step, False, False)
            if WINDOW:
                for n in range(unmasked, count):
                    state = _step(state, tiles, seen, n, done, rounds, step, True, True)
            sums, weight, best, total = state
            done += count
            rounds += count - 1
            stage, phase = (done - 1) % STAGES, (done - 1) // STAGES & 1
            mbarrier.wait(v_full.index(stage), phase)
            sums = warpgroup_mma(weight, v_tiles.index(stage), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(v_empty.index(stage), count=1)
            total = gl.convert_layout(total, gl.SliceLayout(1, of_sums), assert_trivial=True)
            result = (sums * (1.0 / total)[:, None]).to(out.dtype.element_ty)
            # By way of the queries' memory, which nothing reads any more: whole lines are stored.
            query.store(result)
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, coalesced))
            real = (row < TOKENS * GROUP) & (token + row // GROUP < size)
            line = (first_token + token + row // GROUP).to(gl.int64)
            head = kv_head * GROUP + row % GROUP
            out_at = line * out_stride + head * out_head_stride
            gl.store(
                out + out_at[:, None] + channel[None, :],
                query.load(coalesced),
                mask=real[:, None],
            )
        if next_item is not None:
            mbarrier.wait(plan_full.index(turns & 1), turns // 2 & 1)
            line_of_1: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            item = gl.sum(plan.index(turns & 1).load(line_of_1), 0)
            mbarrier.arrive(plan_empty.index(turns & 1), count=1)
            turns += 1
        else:
            item += gl.num_programs(0)
    if IN_TURNS == 2:
        _last_turn(CONSUMERS, CONSUMER)


@gluon.jit
def _step(
    state,
    tiles,
    seen,
    n,
    done,
    rounds,
    step: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One tile of keys, and the values of the tile before."""
    KEYS: gl.constexpr = step[0]
    STAGES: gl.constexpr = step[1]
    CONSUMERS: gl.constexpr = step[2]
    SOFTCAP: gl.constexpr = step[3]
    IN_TURNS: gl.constexpr = step[4]
    CONSUMER: gl.constexpr = step[5]
    HOLD: gl.constexpr = step[6]
    sums, weight, best, total = state
    query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turn = tiles
    position, window, scale, softcap, high = seen
    of_scores: gl.constexpr = best.type.layout.parent
    of_sums: gl.constexpr = sums.type.layout
    stage, phase = (done + n) % STAGES, (done + n) // STAGES & 1
    before, phase_before = (done + n - 1) % STAGES, (done + n - 1) // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    if IN_TURNS == 1:
        mbarrier.wait(turn.index(CONSUMER), (rounds + n - 1 & 1) ^ (1 if CONSUMER == 0 else 0))
    elif IN_TURNS == 2:
        _await_turn(CONSUMERS, CONSUMER)
    score = gl.zeros([ROWS, KEYS], gl.float32, of_scores)
    key = k_tiles.index(stage).permute((1, 0))
    score = warpgroup_mma(query, key, score, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    sums = warpgroup_mma(weight, v_tiles.index(before), sums, is_async=True)
    if IN_TURNS == 1:
        mbarrier.arrive(turn.index((CONSUMER + 1) % CONSUMERS), count=1)
    elif IN_TURNS == 2:
        _give_turn(CONSUMERS, CONSUMER)
    score = warpgroup_mma_wait(1, deps=(score,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    new, best, total, fade = _softmax(
        score,
        best,
        total,
        (high - 1 - n) * KEYS,
        position,
        window,
        scale,
        softcap,
        KEYS,
        MASKED,
        WINDOW,
        SOFTCAP,
    )
    if HOLD:
        _hold(total)
    sums, weight = warpgroup_mma_wait(0, deps=(sums, weight))
    mbarrier.arrive(v_empty.index(before), count=1)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, of_sums), assert_trivial=True)
    sums = sums * fade[:, None]
    weight = _operand(new, weight.dtype, of_sums)
    return sums, weight, best, total


@gluon.jit
def _softmax(
    score,
    best,
    total,
    at,
    position,
    window,
    scale,
    softcap,
    KEYS: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    """Return the weights of scores, and the largest score, the sum and the factor of what was
    summed before."""
    unit = unit_of(scale, SOFTCAP)
    score = capped(score, scale, softcap, SOFTCAP)
    if MASKED:
        key = at + gl.arange(0, KEYS, layout=gl.SliceLayout(0, score.type.layout))
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - window)
        score = gl.where(visible, score, float("-inf"))
    above = gl.maximum(best, gl.max(score, axis=1) * unit)
    floor = above
    if MASKED:  # a query may see nothing of the first tiles
        floor = gl.where(above == float("-inf"), 0.0, above)
    weight = gl.exp2(score * unit - floor[:, None])
    fade = gl.exp2(best - floor)
    total = total * fade + gl.sum(weight, axis=1)
    return weight, above, total, fade


@gluon.jit
def _hold(total):
    """Keep what follows behind `total`, which is never negative: the assembler would otherwise wait
    for products before it makes the weights."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred less;
        .reg .b32 lanes;
        setp.lt.f32 less, $1, 0f00000000;
        selp.b32 lanes, 0, -1, less;
        bar.warp.sync lanes;
        mov.b32 $0, 0;
        }
        """,
        "=r,f",
        [total],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _operand(weight, kind: gl.constexpr, of_sums: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    return gl.convert_layout(weight.to(kind), left, assert_trivial=True)


# ── turns by the hardware's named barriers; those from 9 on are free ────────────────────────


@gluon.jit
def _first_turn(CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    if CONSUMER == CONSUMERS - 1:
        _arrive(9)


@gluon.jit
def _await_turn(CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    _sync(9 + CONSUMER)


@gluon.jit
def _give_turn(CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    _arrive(9 + (CONSUMER + 1) % CONSUMERS)


@gluon.jit
def _last_turn(CONSUMERS: gl.constexpr, CONSUMER: gl.constexpr):
    if CONSUMER == 0:
        _sync(9)


@gluon.jit
def _sync(barrier: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(barrier)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _arrive(barrier: gl.constexpr):
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;",
        "=r,r",
        [gl.to_tensor(barrier)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
