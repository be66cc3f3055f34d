"""What consumers of `prefill_hopper_kernels.py` do: scores, their softmax, and sums of values."""

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

ROWS = gl.constexpr(64)  # of queries that a consumer has: what the matrix units take


@gluon.jit
def place(item, where, sizes: gl.constexpr):
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
def consume(
    shared,
    planned,
    where,
    how,
    to,
    sizes: gl.constexpr,
    SOFTCAP: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    GROUP: gl.constexpr = sizes[0]
    DIM: gl.constexpr = sizes[2]
    KEYS: gl.constexpr = sizes[3]
    STAGES: gl.constexpr = sizes[4]
    CONSUMERS: gl.constexpr = sizes[5]
    WINDOW: gl.constexpr = sizes[6]
    TOKENS: gl.constexpr = ROWS // GROUP  # of a consumer
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = shared
    _next_item, plan, plan_full, plan_empty, items = planned
    scale, softcap, sinks = how
    q, out, q_stride, q_head_stride, out_stride, out_head_stride = to
    window = where[3]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LANES: gl.constexpr = DIM // 8 if DIM < 256 else 32
    coalesced: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    query = q_tiles.index(CONSUMER)
    tiles = (query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    step: gl.constexpr = (KEYS, STAGES, CONSUMERS, SOFTCAP, CONSUMER)
    _first_turn(CONSUMERS, CONSUMER)
    item = gl.program_id(0)
    turns = 0
    done = 0
    while item < items:
        kv_head, _chunk, first_token, size, start, token, low, high = place(item, where, sizes)
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
                state = _step(state, tiles, seen, n, done, step, True, WINDOW)
            for n in range(at_edge, unmasked):
                state = _step(state, tiles, seen, n, done, step, False, False)
            if WINDOW:
                for n in range(unmasked, count):
                    state = _step(state, tiles, seen, n, done, step, True, True)
            sums, weight, best, total = state
            done += count
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
        mbarrier.wait(plan_full.index(turns & 1), turns // 2 & 1)
        line_of_1: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        item = gl.sum(plan.index(turns & 1).load(line_of_1), 0)
        mbarrier.arrive(plan_empty.index(turns & 1), count=1)
        turns += 1
    _last_turn(CONSUMERS, CONSUMER)


@gluon.jit
def _step(
    state,
    tiles,
    seen,
    n,
    done,
    step: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """One tile of keys, and the values of the tile before."""
    KEYS: gl.constexpr = step[0]
    STAGES: gl.constexpr = step[1]
    CONSUMERS: gl.constexpr = step[2]
    SOFTCAP: gl.constexpr = step[3]
    CONSUMER: gl.constexpr = step[4]
    sums, weight, best, total = state
    query, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = tiles
    position, window, scale, softcap, high = seen
    of_scores: gl.constexpr = best.type.layout.parent
    of_sums: gl.constexpr = sums.type.layout
    stage, phase = (done + n) % STAGES, (done + n) // STAGES & 1
    before, phase_before = (done + n - 1) % STAGES, (done + n - 1) // STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    _await_turn(CONSUMERS, CONSUMER)
    score = gl.zeros([ROWS, KEYS], gl.float32, of_scores)
    key = k_tiles.index(stage).permute((1, 0))
    score = warpgroup_mma(query, key, score, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    sums = warpgroup_mma(weight, v_tiles.index(before), sums, is_async=True)
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
def _operand(weight, kind: gl.constexpr, of_sums: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, of_sums, 2)
    return gl.convert_layout(weight.to(kind), left, assert_trivial=True)


# ── turns, by the hardware's named barriers: those from 9 on are free ───────────────────────


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
