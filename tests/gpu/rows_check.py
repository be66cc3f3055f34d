"""Products of 65 to 256 rows, and of thousands, on a GPU: right in bf16, and how fast beside the
library's.

    python -m tests.gpu.rows_check [--limit-s 60]      what the table has, and each kind of tile
    python -m tests.gpu.rows_check --tune              what is the fastest, into the kernels' table
    python -m tests.gpu.rows_check --tune --specialised    warp-specialised tiles as well

The matrices of Llama-3.1-8B, Qwen3-0.6B and Qwen3-14B. Every output is compared with a product in
fp32. Times are those of a CUDA graph over copies of a matrix that the L2 does not hold, as a decode
step has them, beside the library's (with the activation, where there is one). An entry of the table
is faster by `WON` at least. A line a check, then "N passed, M failed"; figures go to $OUT/rows.json
if there is an $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import cache, partial
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F

from tests.gpu.report import (
    FLOPS,
    READ,
    Report,
    Tiles,
    replay_s,
    replayed,
    round_to,
    tally,
    write_table,
)
from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
from twostroke.kernels import cuda
from twostroke.kernels.cuda import rows, rows_tiles
from twostroke.kernels.cuda.backend import CudaKernels
from twostroke.kernels.cuda.rows import Tiling
from twostroke.kernels.cuda.sizes import ceil_div
from twostroke.model.linear import DenseLinear

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
# Columns (both halves, if gated), inner, gated.
Matrix = tuple[int, int, bool]
MODELS: dict[str, dict[str, Matrix]] = {
    "8b": {
        "gate_up": (28672, 4096, True),
        "down": (4096, 14336, False),
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "head": (128256, 4096, False),
    },
    "0.6b": {
        "gate_up": (6144, 1024, True),
        "down": (1024, 3072, False),
        "qkv": (4096, 1024, False),
        "o": (1024, 2048, False),
        "head": (151936, 1024, False),
    },
    "14b": {
        "gate_up": (34816, 5120, True),
        "down": (5120, 17408, False),
        "qkv": (7168, 5120, False),
        "o": (5120, 5120, False),
        "head": (151936, 5120, False),
    },
}
TUNED_ROWS = (256, 192, 128, 160, 96, 72, 4096, 2048)  # the most telling first
COPIES_BYTES = 300 << 20  # of a matrix, all copies together: several times the L2
WON = 0.97  # of the library's time, at most: below that lie two runs of one kernel
SMS, LEAST_USED = 132, 0.6
Call = Callable[[], object]

# rows, columns (of each half, if gated), inner, warps, stages, programs that fit a multiprocessor
Size = tuple[int, int, int, int, int, int]
PLAIN: dict[int, list[Size]] = {
    128: [
        (128, 256, 64, 8, 4, 1),
        (128, 256, 64, 8, 3, 1),
        (128, 128, 64, 8, 4, 1),
        (128, 128, 64, 4, 3, 2),
        (128, 64, 64, 4, 4, 2),
        (128, 128, 128, 8, 3, 1),
    ],
    192: [(192, 256, 64, 8, 3, 1), (192, 128, 64, 8, 4, 1), (192, 64, 64, 4, 3, 2)],
    256: [(256, 128, 64, 8, 4, 1), (256, 128, 64, 8, 3, 1), (256, 64, 64, 8, 4, 1)],
}
GATED: dict[int, list[Size]] = {
    128: [
        (128, 128, 64, 8, 4, 1),
        (128, 128, 64, 8, 3, 1),
        (128, 64, 64, 8, 4, 1),
        (128, 64, 64, 4, 3, 2),
    ],
    192: [(192, 128, 64, 8, 3, 1), (192, 64, 64, 8, 4, 1)],
    256: [(256, 64, 64, 8, 4, 1), (256, 64, 64, 8, 3, 1)],
}
# Of thousands: whole tiles, of which there are many.
MANY: dict[bool, list[Size]] = {
    False: [(128, 256, 64, 8, 4, 1), (256, 128, 64, 8, 4, 1), (128, 128, 64, 4, 3, 2)],
    True: [(128, 128, 64, 8, 4, 1), (128, 128, 64, 8, 3, 1), (256, 64, 64, 8, 4, 1)],
}
SPECIALISED: dict[bool, list[Size]] = {
    False: [(128, 256, 64, 4, 3, 1), (128, 128, 64, 4, 4, 1)],
    True: [(128, 128, 64, 4, 3, 1)],
}


def tilings(num_rows: int, matrix: Matrix, specialised: bool) -> Iterator[Tiling]:
    """Whole tiles, tiles whose K is split evenly, and steps shared out whatever the tiles."""
    columns, inner, gated = matrix
    columns = columns // 2 if gated else columns
    own = GATED if gated else PLAIN
    kinds = [128] if num_rows <= 128 else [192, 128, 256] if num_rows <= 192 else [256, 128]
    many = num_rows > rows.MOST_SPLIT
    for size in MANY[gated] if many else [size for kind in kinds for size in own[kind]]:
        for programs, split in shares(num_rows, columns, inner, size):
            yield Tiling(*size[:3], programs, split, False, *size[3:5])
    for size in SPECIALISED[gated] if specialised else ():
        tiles = ceil_div(columns, size[1]) * ceil_div(num_rows, size[0])
        yield Tiling(*size[:3], min(tiles, SMS), False, True, *size[3:5])


def shares(num_rows: int, columns: int, inner: int, size: Size) -> Iterator[tuple[int, bool]]:
    """Numbers of programs, and whether they split tiles."""
    tile_rows, tile_columns, step, _, _, per_sm = size
    tiles = ceil_div(columns, tile_columns) * ceil_div(num_rows, tile_rows)
    room, steps = SMS * per_sm, ceil_div(inner, step)
    if tiles / (ceil_div(tiles, room) * room) >= LEAST_USED:
        yield min(tiles, room), False
    if num_rows > rows.MOST_SPLIT:
        return
    if tiles % room and tiles * steps >= 4 * room:
        yield room, True
    even = room // tiles
    for splits in {even, even // 2}:
        if splits >= 2 and steps >= 4 * splits and tiles * splits / room >= LEAST_USED:
            yield tiles * splits, True


# ── right ───────────────────────────────────────────────────────────────────────────────────


def random_x(num_rows: int, inner: int, device: torch.device = DEVICE) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(num_rows, inner, dtype=BF16, device=device)
    return torch.randn(num_rows, inner, device=device, dtype=BF16)


def random_weight(columns: int, inner: int) -> torch.Tensor:
    return torch.randn(columns, inner, device=DEVICE, dtype=BF16).mul_(inner**-0.5)


def right_product(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    right = x.float() @ weight.float().t()
    if not gated:
        return right
    gate, up = right.chunk(2, dim=1)
    return F.silu(gate) * up


def error_of(way: Tiling, x: torch.Tensor, weight: torch.Tensor, right: torch.Tensor) -> float:
    """The largest of two runs, which must be the same, over poisoned memory."""
    gated = right.shape[1] != len(weight)
    arrived, made = rows.make_arrivals(weight), []
    for _ in range(2):
        out = poisoned(*right.shape, like=x)
        made.append(rows.run(x, weight, way, "silu" if gated else None, arrived, False, out))
    if not torch.equal(*made) or arrived.any():
        return float("inf")
    # Gated: two roundings more, of each half, and of what the activation makes of them.
    return worst(made[0], right) / (2 if gated else 1)


def check_kinds(num_rows: int, columns: int, inner: int, specialised: bool) -> float:
    """Each size of tile, with sizes that are no multiples of it."""
    error = 0.0
    for gated in (False, True):
        x, weight = random_x(num_rows, inner), random_weight(columns, inner)
        right = right_product(x, weight, gated)
        for way in dict.fromkeys(tilings(num_rows, (columns, inner, gated), specialised)):
            found = error_of(way, x, weight, right)
            if not found < BOUNDS[BF16]:
                print(f"WRONG {num_rows}×{columns}×{inner} {way}: {found:.2e}", flush=True)
            error = largest(error, found)
    return error


KINDS = (
    (65, 4128, 1104),
    (150, 8224, 2064),
    (201, 6176, 4112),
    (256, 2080, 8192),
    (2100, 1056, 528),
)


def check_all(report: Report, specialised: bool) -> None:
    def launch_without_memory() -> None:
        for (num_rows, columns, inner), gated in product(KINDS, (False, True)):
            launch_all(num_rows, (columns, inner, gated), specialised)

    cuda.compile_ahead(launch_without_memory, ("rows", KINDS, PLAIN, GATED, specialised))
    for size in KINDS:
        name = f"tiles, {'×'.join(map(str, size))}"
        report.check(name, BOUNDS[BF16], partial(check_kinds, *size, specialised))


def launch_all(num_rows: int, matrix: Matrix, specialised: bool) -> None:
    columns, inner, gated = matrix
    meta = torch.device("meta")
    x, weight = random_x(num_rows, inner, meta), random_x(columns, inner, meta)
    for way in tilings(num_rows, matrix, specialised):
        activation = "silu" if gated else None
        rows.run(x, weight, way, activation, rows.make_arrivals(weight), False)


def check_table(matrix: Matrix) -> float:
    """What the table has for a matrix, at and below the rows of each entry."""
    columns, inner, gated = matrix
    weight, error = random_weight(columns, inner), 0.0
    for num_rows in (n - less for n in rows.TUNED_ROWS for less in (0, 5)):
        if num_rows * columns > 1 << 28:  # a reference in fp64 takes long
            continue
        known = rows.TILES.get(rows.table_key(num_rows, weight, gated))
        if known is not None:
            x = random_x(num_rows, inner)
            right = right_product(x, weight, gated)
            error = largest(error, error_of(rows.tiling_of(known), x, weight, right))
    return error


# ── fast ────────────────────────────────────────────────────────────────────────────────────


@cache
def capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def timed(calls: Sequence[Call], budget_s: float = 0.004, times: int = 3) -> float:
    """Seconds of one call. As `replayed`, with less of a warm-up: there are many to compare."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture_stream()):
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    torch.cuda.synchronize()

    graph.replay()
    return replay_s(graph, budget_s, times) / len(calls)


def floor_us(num_rows: int, matrix: Matrix) -> float:
    columns, inner, _ = matrix
    moved = 2 * (columns * inner + num_rows * (inner + columns))
    return 1e6 * max(moved / READ, 2 * num_rows * columns * inner / FLOPS)


def library(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    made = F.linear(x, weight)
    return cuda.act_and_mul(made, "silu") if gated else made


def tune(end: float, models: Sequence[str], all_rows: Sequence[int], specialised: bool) -> Tiles:
    """What is faster than the library, as the table has it, or nothing; figures on the way."""
    table: Tiles = {}
    todo = [(model, name, m) for model in models for name, m in MODELS[model].items()]

    def launch_without_memory() -> None:
        for (_, _, matrix), num_rows in product(todo, all_rows):
            launch_all(num_rows, matrix, specialised)

    sizes = (PLAIN, GATED, MANY, SPECIALISED if specialised else ())
    cuda.compile_ahead(launch_without_memory, ("tune", todo, all_rows, sizes))
    for model, name, matrix in todo:
        columns, inner, gated = matrix
        count = max(2, COPIES_BYTES // (2 * columns * inner))
        first = random_weight(columns, inner)
        weights = [first, *(first.clone() for _ in range(count - 1))]
        arrived = [rows.make_arrivals(weight) for weight in weights]
        pairs = list(zip(weights, arrived, strict=True))
        for num_rows in all_rows:
            if perf_counter() > end:
                return table
            if num_rows > rows.MOST_SPLIT and name == "head":
                continue  # which has the tokens that are sampled
            x = random_x(num_rows, inner)
            right = right_product(x, first, gated)
            activation = "silu" if gated else None
            calls = [partial(library, x, weight, gated) for weight in weights]
            before = timed(calls)
            found: list[tuple[float, Tiling]] = []
            for way in dict.fromkeys(tilings(num_rows, matrix, specialised)):
                try:
                    error = error_of(way, x, first, right)
                    if not error < BOUNDS[BF16]:
                        print(f"WRONG {model} {name} {num_rows} {way}: {error:.2e}", flush=True)
                        continue
                    how = (way, activation)
                    own = [partial(rows.run, x, w, *how, a, False) for w, a in pairs]
                    found.append((timed(own), way))
                except Exception as error:
                    said = f"{type(error).__name__} {str(error)[:120]}"
                    print(f"{model} {name} {num_rows} {way}: {said}", flush=True)
            found.sort(key=lambda pair: pair[0])
            again = [
                (timed([partial(rows.run, x, w, way, activation, a, False) for w, a in pairs]), way)
                for _, way in found[:2]
            ]
            us = 1e6 * min(before, timed(calls))
            floor = floor_us(num_rows, matrix)
            print(f"{model} {name:7} {num_rows:4} {us:8.1f} µs {floor / us:4.0%} library")
            for taken, way in [*sorted(again, key=lambda pair: pair[0]), *found[2:3]]:
                share = f"{1e6 * taken:8.1f} µs {floor / taken / 1e6:4.0%}"
                print(f"{'':18} {share} {1e6 * taken / us:5.3f} {astuple(way)}", flush=True)
            if again:
                taken, best = min(again, key=lambda pair: pair[0])
                won, key = 1e6 * taken < WON * us, rows.table_key(num_rows, first, gated)
                table[key] = tuple(map(int, astuple(best))) if won else ()
        del weights, arrived, pairs
    return table


def keep(found: Tiles) -> None:
    """What is faster than the library; its other entries leave the table."""
    for key in [key for key, way in found.items() if not way]:
        rows.TILES.pop(key, None)
    won = {key: way for key, way in found.items() if way}
    write_table(rows_tiles, won)
    print(f"{len(won)} of {len(found)} are faster than the library")


def time_layers(end: float) -> dict[str, dict[str, float]]:
    """All 32 layers of the 8B and its head without attention, ms: by the library, by the table."""
    kernels, found, count = CudaKernels(DEVICE), {}, 4
    norm = torch.ones(4096, device=DEVICE, dtype=BF16)
    order = ("qkv", "o", "gate_up", "down")
    weights = [[random_weight(*MODELS["8b"][name][:2]) for name in order] for _ in range(count)]
    head = random_weight(*MODELS["8b"]["head"][:2])
    table = dict(rows.TILES)

    def forward(layers: list[list[DenseLinear]], x: torch.Tensor, residual: torch.Tensor) -> None:
        normed = x
        for qkv, o, gate_up, down in layers:
            qkv.product(normed)
            normed = kernels.add_rms_norm(o.product(x), residual, norm, 1e-5)
            out = down.product(gate_up.gated_product(normed, "silu"))
            normed = kernels.add_rms_norm(out, residual, norm, 1e-5)

    for num_rows in TUNED_ROWS:
        if perf_counter() > end:
            break
        x, residual = random_x(num_rows, 4096), random_x(num_rows, 4096)
        row: dict[str, float] = {}
        for kind, tiles in (("library", {}), ("table", table)):
            rows.TILES.clear()
            rows.TILES.update(tiles)
            layers = [[DenseLinear(w, None, kernels) for w in layer] for layer in weights]
            last = DenseLinear(head, None, kernels)
            whole = 32 / count * replayed([partial(forward, layers, x, residual)])
            sampled = x[: rows.MOST_SPLIT]
            row[kind] = round_to(1e3 * (whole + replayed([partial(last.product, sampled)] * 2)))
        found[f"layers {num_rows}"] = row
        print(f"layers {num_rows:4} {row} ms", flush=True)
    return found


def time_residual() -> dict[str, dict[str, float]]:
    """µs of a product, the residual's sum and a norm, at 4,096 rows: the sum with the norm, as the
    forward has it, and by the library with the product, which saves two passes of five."""
    found, num_rows = {}, 4096
    norm = torch.ones(4096, device=DEVICE, dtype=BF16)
    residual = random_x(num_rows, 4096)

    def with_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cuda.add_rms_norm(F.linear(x, weight), residual, norm, 1e-5)

    def with_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cuda.rms_norm(residual.addmm_(x, weight.t()), norm, 1e-5)

    for name in ("o", "down"):
        columns, inner, _ = MODELS["8b"][name]
        weights = [random_weight(columns, inner).mul_(1e-3) for _ in range(8)]
        x = random_x(num_rows, inner)
        row = {
            way.__name__: round_to(1e6 * replayed([partial(way, x, weight) for weight in weights]))
            for way in (with_norm, with_product)
        }
        found[f"residual, {name}"] = row
        print(f"{name}, {num_rows} rows, residual and norm: {row} µs", flush=True)
    return found


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="write rows_tiles.py")
    parser.add_argument("--models", default="8b,0.6b,14b", help="to tune, in this order")
    parser.add_argument("--tune-rows", default=",".join(map(str, TUNED_ROWS)))
    parser.add_argument("--specialised", action="store_true", help="warp-specialised tiles as well")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of all of it")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = perf_counter()
    end, timings = begun + args.limit_s, {}
    report = Report(args.limit_s)

    def told(what: str) -> None:
        print(f"{what}: {perf_counter() - begun:.1f} s since the start", flush=True)

    check_all(report, args.specialised)
    told("tiles")
    if args.tune and not report.failed:
        given = (args.models.split(","), tuple(map(int, args.tune_rows.split(","))))
        until = end - max(6.0, 0.08 * args.limit_s)
        report.item("tuning", lambda: keep(tune(until, *given, args.specialised)))
        told("tuning")
    for model, matrices in MODELS.items():
        for name, matrix in matrices.items():
            report.check(f"table, {model} {name}", BOUNDS[BF16], partial(check_table, matrix))
    told("table")
    if rows.TILES:
        report.item("layers", lambda: timings.update(time_layers(end)))
        told("layers")
    report.item("residual", lambda: timings.update(time_residual()))
    for name, error in report.passed.items():
        print(f"passed {name}: {error:.2e}")
    for name, said in report.failed.items():
        print(f"failed {name}: {said}")
    if "OUT" in os.environ:
        results = {"passed": report.passed, "failed": report.failed, "timings": timings}
        Path(os.environ["OUT"], "rows.json").write_text(json.dumps(results))
    return tally(len(report.passed), len(report.failed))


if __name__ == "__main__":
    sys.exit(main())
