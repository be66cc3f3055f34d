"""Products of more than 64 rows, [M, K] × [N, K]ᵀ, plain and gated, where a table says that they
are faster than the library's: it is tuned on a card (`rows_tiles.py`).

    rows      ┌─────────┬─────────┬────     a tile is [rows, columns] of the result; its K is taken
    of x      │ tile 0  │ tile 1  │         in steps, whose operands the hardware fetches (TMA)
              └─────────┴─────────┴────
    steps      0 ····· K│0 ····· K│0 ··     all steps of a row of tiles, one after another,
    programs   ├── 0 ──┼── 1 ──┼── 2 ─┤     are shared out evenly (stream-K), or whole tiles are

Up to 256 rows neither the weight's bytes nor the arithmetic alone decide, and tiles are few: what a
last wave of them leaves idle is a good part of the time. A tile that several programs have steps of
is added up by whoever arrives last, from parts in fp32, in their order: a product is the same every
time. Which steps a program has depends on the number of row tiles, not of rows, so that all row
counts of one entry of the table add up in one order.

Of many rows, it is the activation in the same launch that may win.
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

# An entry of the table is for rows above the one before and up to its own; that of the last is for
# all above, too. Between 256 and 1,024 rows the waves of tiles differ too much for one entry.
LEAST_ROWS, MOST_SPLIT, LEAST_MANY = 65, 256, 1025
TUNED_ROWS = (72, 96, 128, 160, 192, 256, 2048, 4096)
GROUPED = tl.constexpr(16)  # row tiles that walk over the weight together: the L2 holds their rows
STEP = 16  # sizes are multiples of it: rows of x and of the weight begin at 16 bytes
NARROWEST = 64  # columns of a tile; by it the arrivals of a weight are counted


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int  # 64, 128, 256, or 192: a tile of 128 and one of 64
    columns: int  # of each half, if gated
    inner: int  # of K: a step
    programs: int  # of the launch, at most
    split: bool  # programs begin and end inside tiles
    specialised: bool  # a warp group of its own fetches; not with `split`
    num_warps: int
    num_stages: int


def table_key(rows: int, weight: torch.Tensor, gated: bool) -> str:
    columns, inner = weight.shape
    most = next((n for n in TUNED_ROWS if rows <= n), TUNED_ROWS[-1])
    return f"{columns}×{inner}{' gated' if gated else ''}, {most}"


def choice(
    x: torch.Tensor,
    weight: torch.Tensor,
    gated: bool,
    arrived: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> Tiling | None:
    """None: the library is faster or has not been compared, or these are not what `run` takes."""
    if not TILES or len(x) < LEAST_ROWS or MOST_SPLIT < len(x) < LEAST_MANY:
        return None
    known = TILES.get(table_key(len(x), weight, gated))
    if known is None or not can_run(x, weight, gated, out) or not _is_hopper(weight.device):
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
    count = ceil_div(weight.shape[0], NARROWEST) * ceil_div(MOST_SPLIT, NARROWEST)
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
    small = len(x) * columns < 1 << 31  # places are 32-bit numbers
    return plain and aligned and whole and same and small and x.itemsize == 2


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
    rows, more = (128, 64) if tuned.rows == 192 else (tuned.rows, 0)
    row_tiles, column_tiles = ceil_div(num_rows, tuned.rows), ceil_div(columns, tuned.columns)
    steps = ceil_div(inner, tuned.inner)
    x_more = _tiles(x, more, tuned.inner) if more else None
    operands = (_tiles(x, rows, tuned.inner), x_more, _tiles(weight, tuned.columns, tuned.inner))
    variant, varying = _variant(tuned, rows, more, activation, pdl), (*operands, num_rows, steps)
    if not tuned.split:
        grid = (min(tuned.programs, row_tiles * column_tiles),)
        variant(grid, (out,), varying, (columns,))
        return out
    assert arrived is not None
    assert num_rows <= MOST_SPLIT
    shares = max(1, min(tuned.programs // row_tiles, column_tiles * steps))
    size = 2 * shares * row_tiles * tuned.rows * (2 if gated else 1) * tuned.columns
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    variant((shares * row_tiles,), (out, partial, arrived), varying, (columns,))
    return out


def _tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns])


@cache
def _variant(
    tuned: Tiling, rows: int, more: int, activation: Activation | None, pdl: bool
) -> Variant:
    assert not (tuned.specialised and (tuned.split or more))
    return Variant(
        _shared_tiles if tuned.split else _whole_tiles,
        ROWS=rows,
        MORE=more,
        COLUMNS=tuned.columns,
        INNER=tuned.inner,
        GATED=activation is not None,
        ACTIVATION=activation or "",
        num_warps=tuned.num_warps,
        num_stages=tuned.num_stages,
        **({} if tuned.split else {"SPECIALISED": tuned.specialised}),
        **launch_options(pdl),
    )


# ── kernels ─────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _whole_tiles(
    out,
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
    SPECIALISED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row_tiles = tl.cdiv(num_rows, ROWS + MORE)
    column_tiles = tl.cdiv(N, COLUMNS)
    # Two loops become one, so that the next tile is fetched while one is stored; or a warp group
    # fetches and two multiply.
    for tile in tl.range(
        tl.program_id(0),
        row_tiles * column_tiles,
        tl.num_programs(0),
        flatten=not SPECIALISED,
        warp_specialize=SPECIALISED,
    ):
        # Programs side by side have the same columns, and rows that the L2 holds.
        group = tile // (GROUPED * column_tiles)
        in_group = tl.minimum(row_tiles - group * GROUPED, GROUPED)
        place = tile - group * (GROUPED * column_tiles)
        row = (group * GROUPED + place % in_group) * (ROWS + MORE)
        column = place // in_group * COLUMNS
        sums, others, more_sums, more_others = _multiply(
            x, x_more, weight, row, column, 0, steps, N, ROWS, MORE, COLUMNS, INNER, GATED
        )
        _finish(sums, others, out, row, column, num_rows, N, GATED, ACTIVATION)
        if MORE:
            where = (row + ROWS, column, num_rows, N)
            _finish(more_sums, more_others, out, *where, GATED, ACTIVATION)


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _shared_tiles(
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
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    SIZE: tl.constexpr = (ROWS + MORE) * WIDTH
    wait_for_previous(PDL)
    row_tiles = tl.cdiv(num_rows, ROWS + MORE)
    shares = tl.num_programs(0) // row_tiles
    row_tile, share = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    row = row_tile * (ROWS + MORE)
    partial += row_tile.to(tl.int64) * (2 * shares * SIZE)
    total = tl.cdiv(N, COLUMNS) * steps
    begin = share * total // shares
    end = (share + 1) * total // shares
    for tile in tl.range(begin // steps, tl.cdiv(end, steps)):
        column = tile * COLUMNS
        first = tile * steps  # of its steps, among all
        since = tl.maximum(begin - first, 0)
        until = tl.minimum(end - first, steps)
        sums, others, more_sums, more_others = _multiply(
            x, x_more, weight, row, column, since, until, N, ROWS, MORE, COLUMNS, INNER, GATED
        )
        if until - since == steps:
            _finish(sums, others, out, row, column, num_rows, N, GATED, ACTIVATION)
            if MORE:
                where = (row + ROWS, column, num_rows, N)
                _finish(more_sums, more_others, out, *where, GATED, ACTIVATION)
        else:
            # Its first part is of the tile that it begins in, its second of that it ends in.
            to = partial + (2 * share + (begin < first)).to(tl.int64) * SIZE
            _put(sums, to, WIDTH)
            if GATED:
                _put(others, to + COLUMNS, WIDTH)
            if MORE:
                _put(more_sums, to + ROWS * WIDTH, WIDTH)
                if GATED:
                    _put(more_others, to + ROWS * WIDTH + COLUMNS, WIDTH)
            # All threads' stores before the count that publishes them.
            tl.debug_barrier()
            first_share = ((first + 1) * shares - 1) // total
            last_share = ((first + steps) * shares - 1) // total
            count = arrived + tile * row_tiles + row_tile
            if tl.atomic_add(count, 1, sem="acq_rel") == last_share - first_share:
                tl.store(count, 0)
                for above in tl.static_range(0, ROWS + MORE, 64):
                    at = (above + tl.arange(0, 64))[:, None] * WIDTH
                    at += tl.arange(0, COLUMNS)[None, :]
                    whole = tl.zeros([64, COLUMNS], tl.float32)
                    whole_others = tl.zeros([64, COLUMNS], tl.float32)
                    for each in tl.range(first_share, last_share + 1):
                        slot = 2 * each + (each * total // shares < first)
                        part = partial + slot.to(tl.int64) * SIZE
                        whole += tl.load(part + at, cache_modifier=".cg")
                        if GATED:
                            whole_others += tl.load(part + COLUMNS + at, cache_modifier=".cg")
                    where = (row + above, column, num_rows, N)
                    _finish(whole, whole_others, out, *where, GATED, ACTIVATION)


@triton.jit
def _multiply(
    x,
    x_more,
    weight,
    row,
    column,
    since,
    until,
    N,
    ROWS: tl.constexpr,
    MORE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
):
    """Steps of a tile: its rows with the columns, with those of the second half, and both again for
    the rows below. What is not asked for is zero, or nothing."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    others = tl.zeros([ROWS, COLUMNS], tl.float32)
    more_sums = tl.zeros([MORE or 1, COLUMNS], tl.float32)
    more_others = tl.zeros([MORE or 1, COLUMNS], tl.float32)
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
    return sums, others, more_sums, more_others


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
