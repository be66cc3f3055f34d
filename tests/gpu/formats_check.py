"""Products with weights in fp8 or int8 on a GPU: right in bf16, and how fast against the bytes they
must read.

    python -m tests.gpu.formats_check [--type int8] [--no-times | --no-checks]   under a minute
    python -m tests.gpu.formats_check [--type int8] --tune [--limit-s 240]       tiles of other
                                       sizes, too; those of int8 go into the kernels' table

The matrices of Llama-3.1-8B. Outputs are compared with fp32 products of what the numbers stand for.
Times are those of a CUDA graph over copies of a matrix that the L2 does not hold, beside the time
that the weight's bytes (or the operations) take at the card's rates:

    weight_only   activations as they are
    tiled         activations quantised before, which is not counted, by our tiles or their parts
    library       the same by the library; of int8 its sums alone (torch._int_mm), nothing scaled
    bf16          the library's product of a bf16 weight

Ends with a JSON line and how many passed; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from tests.gpu.report import FLOPS, READ, is_right, replayed, round_to, tally, write_table
from tests.kernels.cuda_cases import BOUNDS, largest, worst
from tests.kernels.definitions import DEPENDENT
from twostroke.kernels import cuda
from twostroke.kernels.cuda import w8a8, w8a8_hopper, w8a8_tiles
from twostroke.kernels.cuda.backend import CudaKernels
from twostroke.kernels.cuda.tiles import Streaming, Tiling
from twostroke.kernels.cuda.w8a8 import dequantise
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import (
    E4M3,
    INT8,
    QuantizedActivations,
    W8Weight,
    dequantised,
    quantised,
    w8_weight,
)
from twostroke.model.formats import linear
from twostroke.model.formats.linear import Activations, DenseLinear, Linear, W8Linear
from twostroke.model.weights.tensors import W8_DTYPES

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
FP8_FLOPS = 1429e12  # measured, at 8192³; int8 has the same units
SHARED = 220 << 10  # bytes of a program
# Of a layer: columns (both halves, if gated), inner, gated.
MATRICES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
COPIES_BYTES = 300 << 20  # of a matrix, all copies together: several times the L2
Call = Callable[[], object]


def random_weight(columns: int, inner: int, type: torch.dtype, groups: int = 1) -> W8Weight:
    values, scale = quantised(torch.randn(columns, inner, device=DEVICE) * inner**-0.5, type)
    scale = scale.unsqueeze(1)
    if groups > 1:
        scale = scale * torch.rand(columns, groups, device=DEVICE).add_(0.5)
    return w8_weight(values, scale)


def random_x(rows: int, inner: int) -> torch.Tensor:
    return torch.randn(rows, inner, device=DEVICE, dtype=BF16)


# ── right ───────────────────────────────────────────────────────────────────────────────────


def launch_all(x: torch.Tensor, weight: W8Weight, context: StepContext) -> dict[str, Any]:
    found: dict[str, Any] = {}
    out = x.new_full((len(x), len(weight.values)), float("nan"))
    found["weight_only"] = w8a8.w8_product(x, weight, context=context, out=out)
    found["again"] = w8a8.w8_product(x, weight, context=context)  # the counters are as they were
    found["gated"] = w8a8.w8_gated_product(x, weight, "silu", context=context)
    found["quantise"] = w8a8.quantise_activations(x, weight.dtype, context=context)
    found["act_and_quantise"] = w8a8.quantised_act_and_mul(
        out, "silu", weight.dtype, context=context
    )
    norm = (torch.ones_like(x[0]), 1e-5)
    found["norm"] = cuda.add_rms_norm(x, x.clone(), *norm, context=context)
    how_quantised = {"context": context, "to": weight.dtype}
    found["norm_and_quantise"] = cuda.add_rms_norm(x, x.clone(), *norm, **how_quantised)
    if not weight.is_grouped:
        found["tiled"] = w8a8.w8a8_product(found["quantise"], weight, context=context)
        sizes = weight.values.shape
        if weight.dtype == E4M3 and all(size % w8a8.LIBRARY_STEP == 0 for size in sizes):
            found["library"] = w8a8.library_product(found["quantise"], weight)
        how = (found["quantise"], weight, "silu")
        found["tiled_gated"] = w8a8.w8a8_gated_product(*how, context=context)
    return found


def check(
    rows: int, columns: int, inner: int, groups: int, context: StepContext, type: torch.dtype
) -> dict[str, float]:
    x, plain = random_x(rows, inner), Kernels()
    weight = random_weight(2 * columns, inner, type, groups)
    found = launch_all(x, weight, context)
    right = x.float() @ dequantised(weight.values, weight.scale, torch.float32).t()
    gated = F.silu(right[:, :columns]) * right[:, columns:]
    rows8, expected = found["quantise"], plain.quantise_activations(x, weight.dtype)
    differ = (rows8.values.float() != expected.values.float()).float().mean()
    acted = found["act_and_quantise"]
    errors = {
        "weight_only": largest(worst(found["weight_only"], right), worst(found["again"], right)),
        "gated": worst(found["gated"], gated),
        "quantise": float(differ) + worst(rows8.scale, expected.scale),
        "act_and_quantise": worst(acted.values.float() * acted.scale.unsqueeze(1), gated),
        "norm_and_quantise": difference(found["norm_and_quantise"], found["norm"], context),
    }
    if groups == 1:
        of_rows = plain.w8a8_product(rows8._replace(dtype=torch.float32), weight)
        by_rows = (kind for kind in ("tiled", "library") if kind in found)
        errors |= {kind: worst(found[kind], of_rows) for kind in by_rows}
        of_gate, of_up = of_rows.to(BF16).float().chunk(2, dim=1)
        errors["tiled_gated"] = worst(found["tiled_gated"], F.silu(of_gate) * of_up)
        errors["of_8_bit_activations"] = worst(of_rows, right)
    return errors


LIMITS = dict.fromkeys(("weight_only", "gated", "tiled", "library", "tiled_gated"), BOUNDS[BF16])
# Three bits of mantissa: 2^-4 at the most, of each number. (int8 has less.)
LIMITS |= {"quantise": 1e-3, "of_8_bit_activations": 0.05, "act_and_quantise": 0.05}
LIMITS["norm_and_quantise"] = 1e-4  # the same, but for what lies between two numbers


def difference(found: QuantizedActivations, whole: torch.Tensor, context: StepContext) -> float:
    """The share of numbers and scales that are not as those of `whole`, quantised after it."""
    right = w8a8.quantise_activations(whole, found.values.dtype, context=context)
    values = (found.values.float() != right.values.float()).float().mean()
    return float(values + (found.scale != right.scale).float().mean())


def check_all(type: torch.dtype) -> tuple[dict[str, float], list[str]]:
    worsts: dict[str, float] = {}
    wrong = []
    sizes = [(1, 4096, 4096, 1), (1, 100, 1536, 1), (1, 512, 4096, 32), (7, 3072, 4096, 1)]
    sizes += [(16, 64, 14336, 1), (16, 2048, 4096, 32), (33, 2064, 4096, 1), (64, 2048, 4096, 1)]
    sizes += [(64, 512, 1024, 8), (128, 2048, 14336, 1), (300, 512, 4096, 1), (100, 64, 4096, 32)]
    if type == E4M3:  # in parts, of even and uneven sizes, and whole
        sizes += [
            (65, 1500, 4096, 1),
            (100, 104, 9088, 1),
            (200, 1600, 14336, 1),
            (256, 80, 8192, 1),
        ]
    if type == INT8:  # a scale a row; many rows, in bands of tiles
        sizes = [size for size in sizes if size[3] == 1] + [(2000, 600, 4096, 1)]
    dependent = sizes[:8:2] + sizes[-2:]
    cases = [*((size, False) for size in sizes), *((size, True) for size in dependent)]

    def launch_without_memory() -> None:
        for (rows, columns, inner, groups), dependent in cases:
            scale = torch.empty(2 * columns, groups, device="meta")
            values = torch.empty(2 * columns, inner, dtype=type, device="meta")
            x = torch.empty(rows, inner, dtype=BF16, device="meta")
            launch_all(x, w8_weight(values, scale), StepContext(dependent))

    cuda.compile_ahead(launch_without_memory, (cases, type))
    for (rows, columns, inner, groups), dependent in cases:
        size, context = (rows, columns, inner, groups), StepContext(dependent)
        for name, error in check(*size, context, type).items():
            worsts[name] = largest(worsts.get(name, 0.0), error)
            if not error < LIMITS[name]:
                told = f"{rows}×{columns}×{inner}/{groups} pdl {dependent}"
                wrong.append(f"{name} {told}: {error:.2e}")
    return worsts, wrong


# ── fast ────────────────────────────────────────────────────────────────────────────────────


def floor_us(rows: int, columns: int, inner: int, itemsize: int, flops: float) -> float:
    moved = columns * inner * itemsize + rows * (inner + columns) * 2
    return 1e6 * max(moved / READ, 2 * rows * columns * inner / flops)


def copies(name: str, type: torch.dtype) -> list[W8Weight]:
    columns, inner, _ = MATRICES[name]
    first = random_weight(columns, inner, type)
    count = max(2, COPIES_BYTES // first.num_bytes)
    return [first, *(W8Weight(*(part.clone() for part in first)) for _ in range(count - 1))]


def variants(
    name: str, rows: int, weights: list[W8Weight], x: torch.Tensor, rows8: QuantizedActivations
) -> Iterator[tuple[str, list[Call]]]:
    gated, context = MATRICES[name][2], StepContext(rows <= 64)
    run = partial(w8a8.w8_product, x, context=context)
    if gated:
        run = partial(w8a8.w8_gated_product, x, activation="silu", context=context)
    yield "weight_only", [partial(run, weight=w) for w in weights]
    is_int8 = weights[0].dtype == INT8
    in_parts = not gated and w8a8_hopper.can_multiply(rows8, weights[0])
    if rows >= 8 and (is_int8 or rows <= w8a8.MAX_TILED or in_parts):
        run = partial(w8a8.w8a8_product, rows8, context=context)
        if gated:
            run = partial(w8a8.w8a8_gated_product, rows8, activation="silu", context=context)
        yield "tiled", [partial(run, weight=w) for w in weights]
    if is_int8 and rows > 16 and not rows8.values.is_meta:
        yield "library", [partial(torch._int_mm, rows8.values, w.values.t()) for w in weights]
    elif rows >= 8 and not is_int8:
        yield "library", [partial(w8a8.library_product, rows8, w) for w in weights]


def time_all(type: torch.dtype) -> dict[str, dict[str, list[float]]]:
    """Times in µs of each matrix, number of rows and variant, and the floor's share of them."""
    found: dict[str, dict[str, list[float]]] = {}

    def launch_without_memory() -> None:
        for name, (columns, inner, _) in MATRICES.items():
            values = torch.empty(columns, inner, dtype=type, device="meta")
            weight = w8_weight(values, torch.empty(columns, 1, device="meta"))
            for rows in ROWS:
                x = torch.empty(rows, inner, dtype=BF16, device="meta")
                for _, calls in variants(
                    name, rows, [weight], x, w8a8.quantise_activations(x, type)
                ):
                    calls[0]()

    cuda.compile_ahead(launch_without_memory, (MATRICES, type))
    for name, (columns, inner, _) in MATRICES.items():
        weights = copies(name, type)
        dense = [dequantised(w.values, w.scale, BF16) for w in weights[: 1 + len(weights) // 2]]
        for rows in ROWS:
            x = random_x(rows, inner)
            rows8 = w8a8.quantise_activations(x, type)
            timed = {
                kind: replayed(calls) for kind, calls in variants(name, rows, weights, x, rows8)
            }
            bf16 = replayed([partial(F.linear, x, w) for w in dense])
            floor = floor_us(rows, columns, inner, 1, FP8_FLOPS)
            at = f"{name} {rows}"
            found[at] = {kind: [1e6 * s, floor / 1e6 / s] for kind, s in timed.items()}
            dense_floor = floor_us(rows, columns, inner, 2, FLOPS)
            found[at]["bf16"] = [1e6 * bf16, dense_floor / 1e6 / bf16]
            found[at] = {k: [round_to(n) for n in v] for k, v in found[at].items()}
            told = "  ".join(f"{k} {us:8.1f} µs {of:4.0%}" for k, (us, of) in found[at].items())
            print(f"{at:14} floor {floor:7.1f} µs   {told}", flush=True)
        del weights, dense
    for rows in (16, 64, 1024, 4096):
        x, gate_up = random_x(rows, 4096), random_x(rows, 28672)
        times = {
            "quantise": [1e6 * replayed([lambda x=x: w8a8.quantise_activations(x, type)] * 8)],
            "act_and_quantise": [
                1e6 * replayed([lambda g=gate_up: w8a8.quantised_act_and_mul(g, "silu", type)] * 8)
            ],
            "act": [1e6 * replayed([lambda g=gate_up: cuda.act_and_mul(g, "silu")] * 8)],
        }
        found[f"quantise {rows}"] = {k: [round_to(v[0])] for k, v in times.items()}
        print(f"quantise {rows:5} {found[f'quantise {rows}']}", flush=True)
    return found


def time_layers(type: torch.dtype) -> dict[str, dict[str, float]]:
    """All 32 layers without their attention, ms: norms, quantising and launches are in it."""
    kernels, found = CudaKernels(DEVICE), {}
    count, norm = 6, torch.ones(4096, device=DEVICE, dtype=BF16)
    shapes = [sizes[:2] for sizes in MATRICES.values()]
    weights = [[random_weight(*shape, type) for shape in shapes] for _ in range(count)]
    dense = [[dequantise(w, BF16) for w in layer] for layer in weights]

    def forward(layers: list[list[Linear]], x: torch.Tensor, residual: torch.Tensor) -> None:
        normed: Activations = x
        context = StepContext(len(x) <= 64)
        for qkv, o, gate_up, down in layers:
            qkv.product(normed, context=context)
            out = o.product(x, context=context)
            to = gate_up.quantised_dtype(len(x))
            normed = kernels.add_rms_norm(out, residual, norm, 1e-5, context=context, to=to)
            to = down.quantised_dtype(len(x))
            inner = gate_up.gated_product(normed, "silu", context=context, to=to)
            out = down.product(inner, context=context)
            to = qkv.quantised_dtype(len(x))
            normed = kernels.add_rms_norm(out, residual, norm, 1e-5, context=context, to=to)

    for rows in ROWS:
        x, residual = random_x(rows, 4096), random_x(rows, 4096)
        kinds: dict[str, list[list[Linear]]] = {
            "weight_only": [[W8Linear(w, None, kernels, True) for w in layer] for layer in weights],
            "bf16": [[DenseLinear(w, None, kernels) for w in layer] for layer in dense],
        }
        if rows >= 8:
            kinds["w8a8"] = [[W8Linear(w, None, kernels) for w in layer] for layer in weights]
        usual = dict(linear.WEIGHT_ONLY_ROWS)
        linear.WEIGHT_ONLY_ROWS.update(dict.fromkeys(usual, 0))
        found[f"layers {rows}"] = {
            kind: round_to(32e3 / count * replayed([partial(forward, layers, x, residual)]))
            for kind, layers in kinds.items()
        }
        linear.WEIGHT_ONLY_ROWS.update(usual)
        print(f"layers {rows:5} {found[f'layers {rows}']} ms", flush=True)
    return found


def tunings(name: str, rows: int, quantised_x: bool) -> Iterator[Tiling]:
    columns, inner, gated = MATRICES[name]
    width = columns // 2 if gated else columns
    block = max(16, 1 << (rows - 1).bit_length())
    for tile, step, warps in product((32, 64, 128), (128, 256), (4, 8)):
        first = quantised_x
        if (first and tile < 64) or (warps == 8 and tile * block < 64 * 128):
            continue
        for splits in (1,) if gated else (1, 2, 4, 8):
            programs = -(-width // tile) * splits
            if (splits > 1 and programs > 600) or inner // step // splits < 2:
                continue
            for stages in (3, 4):
                size = (
                    stages * step * (tile * (2 if gated else 1) + block * (1 if quantised_x else 2))
                )
                if size <= SHARED:
                    yield Tiling(block, tile, step, splits, first, warps, stages)


def int8_tunings(name: str, rows: int) -> Iterator[Tiling]:
    """The tilings to time: the one in use, larger tiles for many rows, splits of K for few."""
    columns, inner, gated = MATRICES[name]
    weight = w8_weight(torch.empty(columns, inner, dtype=INT8, device="meta"), torch.empty(1, 1))
    usual = w8a8.int8_tiling(rows, weight, gated)
    assert usual is not None
    yield usual
    if rows <= 128:
        yield from tunings(name, rows, quantised_x=True)
        if rows > 64:
            for splits, stages in product((1,) if gated else (1, 2, 4), (3, 4)):
                yield replace(usual, splits=splits, num_stages=stages)
        return
    tiles = ((128, 64), (64, 128), (256, 64)) if gated else ((128, 128), (128, 256), (256, 128))
    for (height, width), step, stages in product(tiles, (64, 128), (3, 4)):
        if stages * step * (height + width * (2 if gated else 1)) <= SHARED:
            yield Tiling(height, width, step, 1, False, 8, stages)


def call_all(calls: list[Call]) -> None:
    for call in calls:
        call()


def tune_one_row(type: torch.dtype) -> dict[str, list[object]]:
    """The fastest ways to stream each matrix for one row."""
    best: dict[str, list[object]] = {}
    x = {inner: random_x(1, inner) for _, inner, _ in MATRICES.values()}
    for name, (columns, inner, gated) in MATRICES.items():
        weights, run = copies(name, type), partial(w8a8.launch_streaming, context=DEPENDENT)
        activation = "silu" if gated else None
        todo = [
            Streaming(columns, 512 * warps, warps, depth)
            for columns, warps, depth in product((1, 2, 4), (1, 2), (1, 2, 4))
            if inner % (512 * warps) == 0 and columns * depth * (1 + gated) <= 16
        ]
        without = weights[0].to_meta()
        calls = [partial(run, x[inner].to("meta"), without, t, activation) for t in todo]
        cuda.compile_ahead(partial(call_all, calls), (name, "one row", type))
        found = [
            (
                round_to(
                    1e6 * replayed([partial(run, x[inner], w, t, activation) for w in weights])
                ),
                t,
            )
            for t in todo
        ]
        found.sort(key=lambda pair: pair[0])
        floor = floor_us(1, columns, inner, 1, FP8_FLOPS)
        for us, t in found[:4]:
            print(f"{name:8} one row {us:7.1f} µs {floor / us:4.0%}  {t}", flush=True)
        best[f"{name} 1"] = [(us, str(t)) for us, t in found[:2]]
    return best


def tune(limit_s: float, type: torch.dtype) -> dict[str, list[object]]:
    """The fastest tilings of each matrix and number of rows; of int8 into the table."""
    begun, best, table = perf_counter(), tune_one_row(type), {}
    some_rows = (1024, 256, 64, 128, 32) if type == INT8 else (64, 128, 256, 32, 16)
    for rows, (name, (columns, inner, gated)) in product(some_rows, MATRICES.items()):
        weights, x = copies(name, type), random_x(rows, inner)
        rows8 = w8a8.quantise_activations(x, type)
        for kind in ("weight_only", "tiled"):
            if kind == "weight_only" and (rows > 64 or type == INT8):
                continue  # slower than the library with the weight in bf16; of int8, as of fp8
            given = None if kind == "weight_only" else rows8
            activation = "silu" if gated else None
            found = []
            ways = int8_tunings(name, rows) if type == INT8 else tunings(name, rows, bool(given))
            todo = list(dict.fromkeys(ways))

            shape = x if given is None else rows8.values
            run = partial(w8a8.launch_tiled, activation=activation, context=StepContext(rows <= 64))
            meta, without = shape.to("meta"), weights[0].to_meta()
            on_meta = (
                None
                if given is None
                else QuantizedActivations(*(p.to("meta") for p in given[:2]), BF16)
            )
            calls = [partial(run, meta, on_meta, without, t) for t in todo]
            if perf_counter() - begun > limit_s:
                break
            cuda.compile_ahead(partial(call_all, calls), (name, rows, kind, type, todo))
            for t in todo:
                if perf_counter() - begun > limit_s:
                    break
                try:
                    us = 1e6 * replayed([partial(run, shape, given, w, t) for w in weights])
                    found.append((round_to(us), t))
                except Exception as error:
                    print(f"{name} {rows} {t}: {error.__class__.__name__} {str(error)[:100]}")
            found.sort(key=lambda pair: pair[0])
            floor = floor_us(rows, columns, inner, 1, FP8_FLOPS)
            for us, t in found[:3]:
                print(
                    f"{name:8} {rows:4} {kind:12} {us:7.1f} µs {floor / us:4.0%}  {t}", flush=True
                )
            best[f"{name} {rows} {kind}"] = [(us, str(t)) for us, t in found[:2]]
            if type == INT8:
                right = (t for _, t in found if is_right_tiling(t, rows8, weights[0], gated))
                chosen = next(right, None)
                if chosen is not None:
                    table[w8a8.int8_key(rows, weights[0], gated)] = tuple(map(int, astuple(chosen)))
        del weights
    if table:
        write_table(w8a8_tiles, table)
    return best


def is_right_tiling(
    way: Tiling, rows8: QuantizedActivations, weight: W8Weight, gated: bool
) -> bool:
    found = w8a8.launch_tiled(
        rows8.values, rows8, weight, way, "silu" if gated else None, DEFAULT_CONTEXT
    )
    product = Kernels().w8a8_product(rows8._replace(dtype=torch.float32), weight)
    return is_right(way, found, product, gated)


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", choices=("fp8", "int8"), default="fp8")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--limit-s", type=float, default=240.0, help="after it nothing is tuned")
    args = parser.parse_args()
    type = W8_DTYPES[args.type]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = perf_counter()
    errors, wrong = ({}, []) if args.no_checks else check_all(type)
    print(f"errors {errors}\nwrong {wrong}\n{perf_counter() - begun:.1f} s", flush=True)
    left_s = args.limit_s - (perf_counter() - begun)
    tuned = tune(left_s, type) if args.tune and not wrong else {}
    timings: dict[str, object] = {}
    if not args.no_times:
        print(f"{perf_counter() - begun:.1f} s", flush=True)
        timings |= time_all(type)
        print(f"{perf_counter() - begun:.1f} s", flush=True)
        timings |= time_layers(type)
        print(f"{perf_counter() - begun:.1f} s", flush=True)
    print(json.dumps({"errors": errors, "wrong": wrong, "timings": timings, "tuned": tuned}))
    right = sum(error < LIMITS[name] for name, error in errors.items())
    return tally(right + len(timings), len(wrong))


if __name__ == "__main__":
    sys.exit(main())
