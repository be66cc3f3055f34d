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

Lines behind a chunk's end are fetched as zeros (see `own_descriptor` and `page_descriptor`).
`prefill_hopper_consumer.py` has what consumers do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from twostroke.kernels.cuda.prefill_hopper_consumer import ROWS, consume, place
from twostroke.kernels.cuda.stream_k_kernels import fetch, make_barriers

PIECE = gl.constexpr(64)  # channels of a swizzled line of shared memory
FAR = gl.constexpr(2**30)  # `prefill_hopper.FAR`


@gluon.jit(
    do_not_specialize=["items", "tiles", "window", "table_stride"],
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
    # The next item of a program, by the producer.
    plan = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    plan_full, plan_empty = make_barriers(2, 1), make_barriers(2, CONSUMERS)
    shared = (q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    planned = (next_item, plan, plan_full, plan_empty, items)
    where = (chunk_starts, cu_tokens, tiles, window)
    sizes: gl.constexpr = (GROUP, NUM_KV_HEADS, DIM, KEYS, STAGES, CONSUMERS, WINDOW, CHUNKS)
    how = (scale, softcap, sinks)
    to = (q, out, q_stride, q_head_stride, out_stride, out_head_stride)
    pages = (tables, chunk_rows, table_stride)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (shared, planned, where, how, to, sizes, SOFTCAP, 0)),
                (consume, (shared, planned, where, how, to, sizes, SOFTCAP, 1)),
                (_produce, (keys, values, shared, planned, where, pages, sizes, PAGE)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (shared, planned, where, how, to, sizes, SOFTCAP, 0)),
                (consume, (shared, planned, where, how, to, sizes, SOFTCAP, 1)),
                (consume, (shared, planned, where, how, to, sizes, SOFTCAP, 2)),
                (_produce, (keys, values, shared, planned, where, pages, sizes, PAGE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


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
    _q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = shared
    next_item, plan, plan_full, plan_empty, items = planned
    tables, chunk_rows, table_stride = pages
    item = gl.program_id(0)
    turns = 0
    done = 0
    while item < items:
        following = gl.atomic_add(next_item, 1, sem="relaxed") + gl.num_programs(0)
        mbarrier.wait(plan_empty.index(turns & 1), (turns // 2 & 1) ^ 1)
        line: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        plan.index(turns & 1).store(gl.full([1], 0, gl.int32, line) + following)
        mbarrier.arrive(plan_full.index(turns & 1), count=1)
        turns += 1
        kv_head, chunk, first_token, size, start, token, low, high = place(item, where, sizes)
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
                box = [FAR, first_token + size, FAR - size + at, kv_head * DIM]
                fetch(keys, box, k_full.index(stage), _as_box(k_tiles.index(stage)))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BYTES)
            if PAGE:
                column = kv_head * DIM
                _fetch_pages(values, ids, column, v_full, v_tiles, stage, KEYS, PAGE, DIM)
            else:
                column = (NUM_KV_HEADS + kv_head) * DIM
                box = [FAR, first_token + size, FAR - size + at, column]
                fetch(values, box, v_full.index(stage), _as_box(v_tiles.index(stage)))
        done += high - low
        item = following
    # The last program to end leaves the counters as they were.
    ended = gl.atomic_add(next_item + 1, 1, sem="relaxed")
    if ended == gl.num_programs(0) - 1:
        gl.store(next_item, 0)
        gl.store(next_item + 1, 0)


@gluon.jit
def _as_box(tile):
    return tile.reshape([1, 1, tile.shape[0], tile.shape[1]])


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
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=5)
    count: gl.constexpr = tiles.shape[0] * PIECES * PAGES
    boxes = tiles._reinterpret(tiles.dtype, [count, 1, 1, 1, PAGE, PIECE], layout)
    for n in gl.static_range(PAGES):
        page, left = ids[0][n], ids[1][n]
        for piece in gl.static_range(PIECES):
            to = boxes.index((stage * PIECES + piece) * PAGES + n)
            box = [page, FAR, FAR - PAGE + left, PAGE - left, column + piece * PIECE]
            fetch(cached, box, full.index(stage), to)
