"""Tilings that the products of all weight formats share: the programs of a launch, the end of a
tile, and split-K.

Where a matrix has fewer tiles than the card has room for, several programs share the columns of a
tile: each has a part of K, and the last one to arrive adds the parts up, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.runtime import driver

from twostroke.kernels.activations import Activation
from twostroke.kernels.cuda.elementwise import gate_times_up
from twostroke.kernels.cuda.sizes import ceil_div, power_of_two
from twostroke.kernels.split_k import ARRIVALS_COLUMNS

# Bytes of each column that are fetched before a dependent launch waits.
FETCHED = tl.constexpr(512)
ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # else the same in plain operations

HOPPER_SHARED_BYTES = 227 << 10  # bytes of shared memory that a program may have there


@dataclass(frozen=True, slots=True)
class Streaming:
    """The launch of a product of one row: a program has all of K."""

    columns: int  # of a program
    step: int  # of K, at one time: numbers, or groups where the weight has them
    num_warps: int
    depth: int = 1  # steps that are on their way at one time, of 4 bits


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    columns: int  # of each half, if gated
    step: int  # of K, at one time: as of `Streaming`
    splits: int  # of K
    weight_first: bool  # the weight is the left operand: the matrix units take 64 of its rows
    num_warps: int
    num_stages: int
    scaled: bool = False  # groups' scales are taken before the product, of 4 bits


def table_key(format: str, rows: int, shape: tuple[int, ...], gated: bool) -> str:
    """Return the key of a table of the fastest launches, with rows padded to a power of two."""
    size = "×".join(map(str, shape))
    block = rows if rows == 1 else max(16, power_of_two(rows))
    return f"{format}, {size}{' gated' if gated else ''}, {block}"


def of_table(entry: tuple[int, ...]) -> Streaming | Tiling | None:
    """Return an entry of a table; None where the entry is empty: the library was faster."""
    if len(entry) in (3, 4):
        return Streaming(*entry)
    if not entry:
        return None
    rows, columns, step, splits, weight_first, warps, stages, *ways = entry
    return Tiling(rows, columns, step, splits, bool(weight_first), warps, stages, *map(bool, ways))


def power_of_two_below(limit: int) -> int:
    """Return the largest power of two that is not above `limit`; at least 1."""
    return 1 << max(0, limit.bit_length() - 1)


def is_contiguous_16_bit(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.dtype.itemsize == 2


def dense_product(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T, computed by the library."""
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


@cache
def shared_bytes() -> int:
    """Return the shared memory that a program may have on this GPU, in bytes. Without a GPU kernels
    are compiled for Hopper."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_BYTES
    device = driver.active.get_current_device()
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def fitted(tuned: Tiling, step_bytes: int) -> Tiling:
    """Return the tiling with fewer stages where a GPU has less shared memory than Hopper.
    `step_bytes`: of a stage, the rows' and the columns' numbers of a step of K."""
    max_stages = max(1, shared_bytes() // step_bytes)
    return tuned if tuned.num_stages <= max_stages else replace(tuned, num_stages=max_stages)


def num_columns(weight_rows: int, activation: Activation | None) -> int:
    """Return the number of columns of a product, or with an activation of the gated product."""
    return weight_rows if activation is None else weight_rows // 2


def stream_options(tuned: Streaming, activation: Activation | None) -> dict[str, Any]:
    return {
        "COLUMNS": tuned.columns,
        "num_warps": tuned.num_warps,
        "num_stages": 1,
        **_gating(activation),
    }


def tile_options(tuned: Tiling, activation: Activation | None) -> dict[str, Any]:
    return {
        "ROWS": tuned.rows,
        "COLUMNS": tuned.columns,
        "SPLITS": tuned.splits,
        "WEIGHT_FIRST": tuned.weight_first,
        "num_warps": tuned.num_warps,
        "num_stages": tuned.num_stages,
        **_gating(activation),
    }


def _gating(activation: Activation | None) -> dict[str, Any]:
    return {"GATED": activation is not None, "ACTIVATION": activation or ""}


def split_buffers(
    tuned: Tiling,
    rows: int,
    columns: int,
    arrived: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the memory for the sums of the splits of K, and the counters where splits meet; None
    if there is one split."""
    if tuned.splits == 1:
        return None, None
    assert rows <= tuned.rows
    assert tuned.columns >= ARRIVALS_COLUMNS
    size = ceil_div(columns, tuned.columns) * tuned.splits * tuned.rows * tuned.columns
    return torch.empty(size, dtype=dtype, device=arrived.device), arrived


# ── of kernels ──────────────────────────────────────────────────────────────────────────────


@triton.jit
def dot(x, weight, sums, WEIGHT_FIRST: tl.constexpr, MADE: tl.constexpr):
    if WEIGHT_FIRST and MADE:
        # The matrix units read a left operand in registers until an instruction waits for the
        # product, as this sum does; otherwise the next step's numbers could overwrite it. (The
        # compiler does not fuse the sum into a product with that limit.)
        sums += tl.dot(weight, tl.trans(x), max_num_imprecise_acc=1)
    elif WEIGHT_FIRST:
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=sums.dtype)
    else:
        sums = tl.dot(x, tl.trans(weight), sums, out_dtype=sums.dtype)
    return sums


@triton.jit
def is_last_split(sums, to, arrived, block, split, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Leave a split's sums for the last split to arrive, and return True if this split is the
    last."""
    tl.store(to + split * SIZE, sums)
    # All threads' stores before the count that publishes them.
    tl.debug_barrier()
    return tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLITS - 1


@triton.jit
def sum_of_splits(to, arrived, block, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    tl.store(arrived + block, 0)
    sums = tl.load(to)
    for other in tl.range(1, SPLITS):
        sums += tl.load(to + other * SIZE)
    return sums


@triton.jit
def store_tile(
    sums,
    others,
    row,
    column,
    there,
    out,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Activate and store [rows, columns]. `there`: the rows that exist."""
    if GATED:
        sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
    to = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=there & (column < N)[None, :])
