"""Code that the matrix products of all weight formats share: tilings, the store of a tile, and
split-K.

If a matrix has fewer tiles than the GPU can run at one time, several programs share a tile: each
computes a part of K, and the last program to arrive adds the parts up, in their order.
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

# Bytes of each weight row that a dependent launch fetches before it waits.
FETCHED = tl.constexpr(512)
ASM = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly

HOPPER_SHARED_BYTES = 227 << 10  # maximum shared memory of a program on Hopper


@dataclass(frozen=True, slots=True)
class Streaming:
    """The launch of a product of one row of x. A program computes its columns over all of K."""

    columns: int  # output columns of a program
    step: int  # elements of K of an iteration; of packed weights the blocks of K
    num_warps: int
    depth: int = 1  # iterations whose loads are in flight; not used by 16-bit weights


@dataclass(frozen=True, slots=True)
class Tiling:
    """The launch of a product of several rows of x. A program computes a tile of the output."""

    rows: int
    columns: int  # of gate and of up, if gated
    step: int  # of K, in one iteration: elements; of packed weights blocks (4 bits) or groups
    splits: int  # of K
    weight_first: bool  # the weight is the left operand, of which tensor cores take 64 rows
    num_warps: int
    num_stages: int
    scaled: bool = False  # 4 bits: scales are applied before the product, not after it


def table_key(format: str, rows: int, shape: tuple[int, ...], gated: bool) -> str:
    """Return the key of a table of the fastest launches, with rows padded to a power of two."""
    size = "×".join(map(str, shape))
    block = rows if rows == 1 else max(16, power_of_two(rows))
    return f"{format}, {size}{' gated' if gated else ''}, {block}"


def of_table(entry: tuple[int, ...]) -> Streaming | Tiling | None:
    """Return the launch of an entry of a table. None: the library was faster."""
    if len(entry) in (3, 4):
        return Streaming(*entry)
    if not entry:
        return None
    rows, columns, step, splits, weight_first, warps, stages, *flags = entry
    return Tiling(rows, columns, step, splits, bool(weight_first), warps, stages, *map(bool, flags))


def power_of_two_below(limit: int) -> int:
    """Return the largest power of two ≤ `limit`; at least 1."""
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
    """Return the maximum shared memory of a program on this GPU, in bytes. Without a GPU, kernels
    are compiled for Hopper."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_BYTES
    device = driver.active.get_current_device()
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"])


def fitted(tuned: Tiling, step_bytes: int) -> Tiling:
    """Return the tiling, with fewer stages if the GPU has less shared memory than Hopper.
    `step_bytes`: bytes of x and of the weight in one stage."""
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
    """Return the memory for the sums of the splits of K, and the arrival counters, or None."""
    if tuned.splits == 1:
        return None, None
    assert rows <= tuned.rows
    assert tuned.columns >= ARRIVALS_COLUMNS
    size = ceil_div(columns, tuned.columns) * tuned.splits * tuned.rows * tuned.columns
    return torch.empty(size, dtype=dtype, device=arrived.device), arrived


# ── functions of kernels ────────────────────────────────────────────────────────────────────


@triton.jit
def dot(x, weight, sums, WEIGHT_FIRST: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """Add the product to the sums. IN_REGISTERS: the kernel has computed the weight's elements."""
    if WEIGHT_FIRST and IN_REGISTERS:
        # Tensor cores read a left operand in registers until an instruction waits for the product;
        # before that, the next iteration must not overwrite the operand. The separate sum waits.
        # (With `max_num_imprecise_acc` the compiler does not fuse the sum into the product.)
        sums += tl.dot(weight, tl.trans(x), max_num_imprecise_acc=1)
    elif WEIGHT_FIRST:
        sums = tl.dot(weight, tl.trans(x), sums, out_dtype=sums.dtype)
    else:
        sums = tl.dot(x, tl.trans(weight), sums, out_dtype=sums.dtype)
    return sums


@triton.jit
def is_last_split(sums, to, arrived, block, split, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """Store the sums of a split. Return True if this split is the last to arrive."""
    tl.store(to + split * SIZE, sums)
    # The stores of all threads must come before the count that publishes them.
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
    is_row,
    out,
    N: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Apply the activation, if GATED, and store [rows, columns]. `is_row`: the rows that exist."""
    if GATED:
        sums = gate_times_up(sums, others, out.dtype.element_ty, ACTIVATION)
    to = out + row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=is_row & (column < N)[None, :])
