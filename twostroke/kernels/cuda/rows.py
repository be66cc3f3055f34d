"""Products of 65 to 256 rows, [M, K] × [N, K]ᵀ, plain and gated, where a table says that they are
faster than the library's; it is tuned on a card (`rows_tiles.py`).

    rows      ┌─────────┬─────────┬────     a tile is [rows, columns] of the result, K of it in steps
    of x      │ tile 0  │ tile 1  │         whose operands the hardware fetches (TMA)
              └─────────┴─────────┴────
    steps      0 ····· K│0 ····· K│0 ··     all steps of all tiles, one after another,
    programs   ├── 0 ──┼── 1 ──┼── 2 ─┤     are shared out evenly (stream-K)

At these row counts neither the weight's bytes nor the arithmetic alone decide, and tiles are few:
what a last wave of them leaves idle is a good part of the time. A tile that several programs have
steps of is added up by whoever arrives last, from parts in fp32, in their order: a product is the
same every time. Which steps a program has depends on the number of row tiles, not of rows, so that
all row counts of one entry of the table add up in one order too.

Programs that differ in the tile of rows alone walk over the weight side by side: one of them finds
it in the L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.launch import Variant
from twostroke.kernels.cuda.pdl import launch_options, wait_for_previous
from twostroke.kernels.cuda.rows_tiles import TILES
from twostroke.kernels.cuda.sizes import ceil_div

LEAST_ROWS, MOST_ROWS = 65, 256
TUNED_ROWS = (72, 96, 128, 160, 192, 256)  # an entry of the table is for up to so many
STEP = 16  # sizes are multiples of it: rows of x and of the weight begin at 16 bytes
NARROWEST = 64  # columns of a tile; by it the arrivals of a weight are counted


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # 64, 128, 256, or 192: a tile of 128 and one of 64
    columns: int  # of each half, if gated
    inner: int  # of K: a step
    programs: int  # of the launch; fewer, if that is no multiple of the tiles of rows
    split: bool  # programs begin and end inside tiles
    specialised: bool  # a warp group of its own fetches; not with `split`
    num_warps: int
    num_stages: int


def table_key(rows: int, weight: torch.Tensor, gated: bool) -> str:
    columns, inner = weight.shape
    most = next(n for n in TUNED_ROWS if rows <= n)
    return f"{columns}×{inner}{' gated' if gated else ''}, {most}"


def choice(
    x: torch.Tensor,
    weight: torch.Tensor,
    gated: bool,
    arrived: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> Tiling | None:
    """None: the library is faster or has not been compared, or these are not what `run` takes."""
    if not TILES or not LEAST_ROWS <= len(x) <= MOST_ROWS or not _is_hopper(weight.device):
        return None
    known = TILES.get(table_key(len(x), weight, gated))
    if known is None or not can_run(x, weight, gated, out):
        return None
    tuned = tiling_of(known)
    return None if tuned.split and arrived is None else tuned


def tiling_of(known: tuple[int, ...]) -> Tiling:
    rows, columns, inner, programs, split, specialised, num_warps, num_stages = known
    sizes = (rows, columns, inner, programs)
    return Tiling(*sizes, bool(split), bool(specialised), num_warps, num_stages)


def _is_hopper(device: torch.device) -> bool:
    """Whose shared memory and copy engine the tiles are made for."""
    if device.type == "cuda":
        return _capability(device.index)[0] == 9
    if device.type == "meta" and torch.cuda.is_available():
        return _capability(torch.cuda.current_device())[0] == 9
    return True  # interpreted, or compiled for one


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def arrivals(weight: torch.Tensor) -> torch.Tensor | None:
    """Where the programs of a product with this weight meet: zero between launches. None if no
    entry of the table has need of it."""
    columns, inner = weight.shape
    same = (f"{columns}×{inner},", f"{columns}×{inner} ")
    ways = (tiling_of(way) for key, way in TILES.items() if key.startswith(same))
    return make_arrivals(weight) if any(way.split for way in ways) else None


def make_arrivals(weight: torch.Tensor) -> torch.Tensor:
    count = ceil_div(weight.shape[0], NARROWEST) * ceil_div(MOST_ROWS, NARROWEST)
    return torch.zeros(count, dtype=torch.int32, device=weight.device)


def can_run(
    x: torch.Tensor, weight: torch.Tensor, gated: bool, out: torch.Tensor | None = None
) -> bool:
    """Whether these are what the copy engine takes."""
    columns, inner = weight.shape
    plain = x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    aligned = (x.data_ptr() | weight.data_ptr()) % 16 == 0
    whole = columns % (2 * STEP if gated else STEP) == 0 == inner % STEP
    same = out is None or (out.dtype == x.dtype and out.is_contiguous())
    return plain and aligned and whole and same and x.itemsize == 2


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    tuned: Tiling,
    activation: Activation | None,
    arrived: torch.Tensor | None,
    pdl: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product, or with an activation the gated one. `arrived`: see `arrivals`; needed if the
    tiling splits."""
    (num_rows, inner), gated = x.shape, activation is not None
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    assert out.dtype == x.dtype
    rows, more = (128, 64) if tuned.rows == 192 else (tuned.rows, 0)
    row_tiles, column_tiles = ceil_div(num_rows, tuned.rows), ceil_div(columns, tuned.columns)
    steps = ceil_div(inner, tuned.inner)
    most = column_tiles * steps if tuned.split else column_tiles
    shares = max(1, min(tuned.programs // row_tiles, most))
    partial = None
    if tuned.split:
        assert arrived is not None
        assert tuned.columns >= NARROWEST <= tuned.rows
        size = tuned.rows * tuned.columns * (2 if gated else 1)
        partial = torch.empty(2 * shares * row_tiles * size, dtype=torch.float32, device=x.device)
    variant = _variant(tuned, rows, more, activation, pdl)
    x_tiles = TensorDescriptor(x, [num_rows, inner], [inner, 1], [rows, tuned.inner])
    x_more = TensorDescriptor(x, [num_rows, inner], [inner, 1], [more, tuned.inner]) if more else None
    size = [weight.shape[0], inner]
    weight_tiles = TensorDescriptor(weight, size, [inner, 1], [tuned.columns, tuned.inner])
    variant(
        (shares * row_tiles,),
        (out, partial, arrived if tuned.split else None),
        (x_tiles, x_more, weight_tiles, num_rows, steps),
        (columns,),
    )
    return out


@cache
def _variant(tuned: Tiling, rows: int, more: int, activation: Activation | None, pdl: bool) -> Variant:
    assert not (tuned.specialised and (tuned.split or more))
    return Variant(
        _specialised_rows if tuned.specialised else _rows,
        ROWS=rows,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **({} if tuned.specialised else {"MORE": more, "SPLIT": tuned.split}),
        **launch_options(pdl),
    )


# ── kernels ─────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _rows(
    out,
    partial,
    arrived,
    x,
    x_more,
    weight,
    num_rows,
    steps,
    N,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row_tiles = tl.cdiv(num_rows, ROWS + MORE)
    column_tiles = tl.cdiv(N, COLUMNS)
    shares = tl.num_programs(0) // row_tiles
    row_tile, share = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    row = row_tile * (ROWS + MORE)
    total = column_tiles * steps
    if SPLIT:
        begin = share * total // shares
        end = (share + 1) * total // shares
    else:
        begin = share * column_tiles // shares * steps
        end = (share + 1) * column_tiles // shares * steps
    # Of whole tiles the two loops become one: the next tile is fetched while one is stored.
    for tile in tl.range(begin // steps, tl.cdiv(end, steps), flatten=not SPLIT):
        column = tile * COLUMNS
        first = tile * steps  # of its steps, among all
        since, until = 0, steps
        if SPLIT:
            since = tl.maximum(begin - first, 0)
            until = tl.minimum(end - first, steps)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        others = tl.zeros([ROWS, COLUMNS], tl.float32)
        if MORE:
            more_sums = tl.zeros([MORE, COLUMNS], tl.float32)
            more_others = tl.zeros([MORE, COLUMNS], tl.float32)
        for step in tl.range(since, until):
            part = x.load([row, step * INNER])
            gate = weight.load([column, step * INNER])
            sums = tl.dot(part, gate.T, sums)
            if MORE:
                more_part = x_more.load([row + ROWS, step * INNER])
                more_sums = tl.dot(more_part, gate.T, more_sums)
            if GATED:
                up = weight.load([N + column, step * INNER])
                others = tl.dot(part, up.T, others)
                if MORE:
                    more_others = tl.dot(more_part, up.T, more_others)
        if not SPLIT or until - since == steps:
            _finish(sums, others, out, row, column, num_rows, N, GATED, ACTIVATION)
            if MORE:
                where = (row + ROWS, column, num_rows, N)
                _finish(more_sums, more_others, out, *where, GATED, ACTIVATION)
        else:
            WIDTH: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
            SIZE: tl.constexpr = (ROWS + MORE) * WIDTH
            own = partial + row_tile.to(tl.int64) * (2 * shares * SIZE)
            to = own + (2 * share + (begin < first)).to(tl.int64) * SIZE
            _put(sums, to, WIDTH)
            if MORE:
                _put(more_sums, to + ROWS * WIDTH, WIDTH)
            if GATED:
                _put(others, to + COLUMNS, WIDTH)
                if MORE:
                    _put(more_others, to + ROWS * WIDTH + COLUMNS, WIDTH)
            # All threads' stores before the count that publishes them.
            tl.debug_barrier()
            first_share = ((first + 1) * shares - 1) // total
            last_share = ((first + steps) * shares - 1) // total
            count = arrived + tile * row_tiles + row_tile
            if tl.atomic_add(count, 1, sem="acq_rel") == last_share - first_share:
                tl.store(count, 0)
                for each in tl.static_range((ROWS + MORE) // 64):
                    _add_parts(
                        own,
                        out,
                        row + each * 64,
                        column,
                        num_rows,
                        N,
                        first_share,
                        last_share,
                        first,
                        total,
                        shares,
                        each * 64,
                        SIZE,
                        COLUMNS,
                        GATED,
                        ACTIVATION,
                    )


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _specialised_rows(
    out,
    partial,
    arrived,
    x,
    x_more,
    weight,
    num_rows,
    steps,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Whole tiles; a warp group fetches, two multiply."""
    wait_for_previous(PDL)
    row_tiles = tl.cdiv(num_rows, ROWS)
    column_tiles = tl.cdiv(N, COLUMNS)
    shares = tl.num_programs(0) // row_tiles
    row, share = tl.program_id(0) % row_tiles * ROWS, tl.program_id(0) // row_tiles
    for tile in tl.range(share, column_tiles, shares, warp_specialize=True):
        column = tile * COLUMNS
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        others = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in tl.range(0, steps):
            part = x.load([row, step * INNER])
            gate = weight.load([column, step * INNER])
            sums = tl.dot(part, gate.T, sums)
            if GATED:
                up = weight.load([N + column, step * INNER])
                others = tl.dot(part, up.T, others)
        if GATED:
            sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
        _store(sums, out, row, column, num_rows, N)


@triton.jit
def _finish(
    sums, others, out, row, column, num_rows, N, GATED: tl.constexpr, ACTIVATION: tl.constexpr
):
    if GATED:
        sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
    _store(sums, out, row, column, num_rows, N)


@triton.jit
def _store(tile, out, row, column, num_rows, N):
    rows = row + tl.arange(0, tile.shape[0])
    columns = column + tl.arange(0, tile.shape[1])
    mask = (rows < num_rows)[:, None] & (columns < N)[None, :]
    to = out + rows[:, None] * N + columns[None, :]
    tl.store(to, tile.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _put(tile, to, WIDTH: tl.constexpr):
    """To rows of WIDTH numbers."""
    at = tl.arange(0, tile.shape[0])[:, None] * WIDTH + tl.arange(0, tile.shape[1])[None, :]
    tl.store(to + at, tile)


@triton.jit
def _add_parts(
    own,
    out,
    row,
    column,
    num_rows,
    N,
    first_share,
    last_share,
    first,
    total,
    shares,
    row_in_tile,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """64 rows of a tile that several programs have a part of."""
    WIDTH: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    at = (row_in_tile + tl.arange(0, 64))[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
    sums = tl.zeros([64, COLUMNS], tl.float32)
    others = tl.zeros([64, COLUMNS], tl.float32)
    for share in tl.range(first_share, last_share + 1):
        slot = 2 * share + (share * total // shares < first)
        part = own + slot.to(tl.int64) * SIZE
        sums += tl.load(part + at, cache_modifier=".cg")
        if GATED:
            others += tl.load(part + COLUMNS + at, cache_modifier=".cg")
    _finish(sums, others, out, row, column, num_rows, N, GATED, ACTIVATION)
