"""Products with weights of 4 and 8 bits on a GPU: right in bf16, and how fast against the bytes
they must read.

    python -m tests.gpu.packed_check [--limit-s 85]    of all of it; what does not fit is left out
        [--no-times | --no-checks]
    python -m tests.gpu.packed_check --tune            what is the fastest, into the kernels' table

The matrices of Llama-3.1-8B. Outputs are compared with fp32 products of what the numbers stand for.
Times are those of a CUDA graph over copies of a matrix that the L2 does not hold, beside the time
that the weight's bytes take at the card's rate, and the library's product of a bf16 weight. A line
a check, then "N passed, M failed"; figures go to $OUT/packed.json if there is an $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
import torch.nn.functional as F

from tests.equivalence.harness import small_spec
from tests.gpu.cuda_check import ERROR_SHARE, Rounded, forced, texts_of
from tests.gpu.reference_check import SPECS
from tests.gpu.report import (
    FLOPS,
    READ,
    Report,
    Tiles,
    is_right,
    replayed,
    round_to,
    tally,
    write_table,
)
from tests.kernels.cuda_cases import BOUNDS, largest, worst
from tests.loud import Loud
from tests.rig import Rig
from twostroke import LLM, SamplingParams
from twostroke.exec.graphs import CudaRecorder, EagerReplay, Record
from twostroke.kernels import cuda
from twostroke.kernels.cuda import packed, packed_tiles, stream_k
from twostroke.kernels.cuda.backend import CudaKernels
from twostroke.kernels.packed import (
    Codes,
    PackedWeight,
    dequantised,
    pack,
    packed_weight,
    quantised,
)
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.reference import Kernels
from twostroke.kernels.split_k import ARRIVALS_COLUMNS
from twostroke.measure.quality.quality import phase_difference
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.formats.linear import DenseLinear, Linear, PackedLinear
from twostroke.model.formats.weight_formats import weight_formats
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.importance import measure_importance
from twostroke.model.torch.load_layers import LoadOptions
from twostroke.model.weights import WeightSource

DEVICE, BF16, FP16 = torch.device("cuda"), torch.bfloat16, torch.float16
# Of a layer: columns (both halves, if gated), inner, gated.
MATRICES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}
ROWS = (1, 8, 16, 32, 64, 128, 256)
FEW_ROWS = (1, 16, 128)
# Bits, group, and what groups have: int4 as --quantization makes it, GPTQ's and AWQ's, and the
# blocks of GGUF files (Q4_0; Q4_1 and Q4_K; Q8_0; Q5_K; Q6_K).
FORMATS = {
    "int4": (4, 128, ""),
    "zeros": (4, 128, "zero"),
    "int4/64": (4, 64, ""),
    "zeros/32": (4, 32, "zero"),
    "Q4_0": (4, 32, ""),
    "Q4_K": (4, 32, "offset"),
    "Q8_0": (8, 32, ""),
    "Q5_K": (8, 32, "offset"),
    "Q6_K": (8, 16, ""),
    "w8": (8, 128, ""),
}
REPEATED = 20  # launches of one product
COPIES_BYTES = 300 << 20  # of a matrix, all copies together: several times the L2
Call = Callable[[], object]


def random_weight(columns: int, inner: int, format: str = "int4") -> PackedWeight:
    bits, group, kind = FORMATS[format]
    shape = (columns, inner // group)
    codes = torch.randint(0, 1 << bits, (columns, inner), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(shape, device=DEVICE).add_(0.5) * (inner**-0.5 * 2.0 ** (2 - bits))
    zero = offset = None
    if kind == "zero":
        zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, device=DEVICE)
    if kind == "offset":
        offset = scale * -(torch.rand(shape, device=DEVICE) * (1 << bits))
    return pack(Codes(bits, codes, scale, zero, offset))


def random_x(rows: int, inner: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(rows, inner, device=DEVICE, dtype=dtype)


def x_meta(rows: int, inner: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(rows, inner, dtype=dtype, device="meta")


# ── right ───────────────────────────────────────────────────────────────────────────────────


def check(
    rows: int,
    columns: int,
    inner: int,
    format: str,
    context: StepContext,
    dtype: torch.dtype = BF16,
) -> float:
    """The largest error of a product to a given place, of the same once more (the counters are as
    they were), and of the gated pair."""
    x, weight = random_x(rows, inner, dtype), random_weight(2 * columns, inner, format)
    right = x.float() @ dequantised(weight, torch.float32).t()
    out = x.new_full((rows, 2 * columns), float("nan"))
    error = worst(packed.packed_product(x, weight, context=context, out=out), right)
    error = largest(error, worst(packed.packed_product(x, weight, context=context), right))
    gated = F.silu(right[:, :columns]) * right[:, columns:]
    # Two roundings more: of each half, and of what the activation makes of them.
    acted = worst(packed.packed_gated_product(x, weight, "silu", context=context), gated)
    return largest(error, acted / 2)


def check_repeats(rows: int, columns: int, inner: int, gated: bool) -> float:
    """Launches of a product whose tiles are shared that give others than the first."""
    x, weight = random_x(rows, inner), random_weight(2 * columns, inner)
    programs, blocks = stream_k.num_multiprocessors(), inner // stream_k.BLOCK
    plan = stream_k.plan(rows, 2 * columns, blocks, programs, len(weight.arrived))
    assert plan.shares_tiles(blocks) or not stream_k.can_multiply(x, weight)
    if gated:
        run = partial(packed.packed_gated_product, x, weight, "silu")
    else:
        run = partial(packed.packed_product, x, weight)
    first, *others = [run() for _ in range(REPEATED)]
    assert not weight.arrived.any()
    return sum(not torch.equal(first, other) for other in others)


def check_whole(columns: int, inner: int, format: str) -> float:
    weight = random_weight(columns, inner, format)
    return worst(packed.dequantise(weight, BF16), dequantised(weight, torch.float32))


def check_rounding() -> float:
    """The error of 4 bits for a normal matrix, against rounding without a search for the scale."""
    weight = torch.randn(512, 4096, device=DEVICE)
    found = pack(quantised(weight, 128))
    error = float((dequantised(found, torch.float32) - weight).norm() / weight.norm())
    own = weight.view(512, -1, 128)
    unit = own.abs().amax(2, keepdim=True) / 7
    plain = float(((own / unit).round() * unit - own).norm() / weight.norm())
    print(f"rounding to 4 bits: {error:.4f} of a normal matrix, without a search {plain:.4f}")
    return error / plain


def meta_weight(columns: int, inner: int, format: str) -> PackedWeight:
    bits, group, kind = FORMATS[format]
    shape, of = (columns, inner // group), {"device": "meta"}
    codes = torch.empty(columns, inner * bits // 8, dtype=torch.uint8, **of)
    zero = torch.empty(shape, dtype=torch.uint8, **of) if kind == "zero" else None
    offset = torch.empty(shape, dtype=torch.float16, **of) if kind == "offset" else None
    return packed_weight(bits, codes, torch.empty(shape, dtype=torch.float16, **of), zero, offset)


def check_all(report: Report) -> None:
    sizes = [(1, 4096, 4096), (1, 100, 1536), (2, 64, 128), (7, 3072, 4096), (16, 50, 14336)]
    sizes += [
        (33, 2064, 4096),
        (100, 64, 384),
        (128, 2048, 14336),
        (200, 300, 4096),
        (300, 512, 4096),
    ]
    cases = [("int4", *size) for size in sizes]
    cases += [("zeros", *size) for size in sizes[1::2]]
    others = ((1, 100, 1536), (7, 300, 4096), (33, 100, 768), (100, 64, 1024))
    cases += [(format, *size) for format, size in product([*FORMATS][2:], others)]
    # Of `stream_k`: tiles of every height, of which some rows and columns are nobody's.
    high = [(150, 4500, 4096), (180, 4500, 4096), (256, 4500, 4096), (1000, 2300, 4096)]
    cases += [("int4", *size) for size in ((65, 33, 128), (2048, 100, 512), *high)]
    of_4_bits = [format for format, (bits, *_) in FORMATS.items() if bits == 4]
    cases += [(format, *high[n % 3]) for n, format in enumerate(of_4_bits[1:])]
    halves = [("int4", *high[0]), ("zeros/32", *high[2]), ("Q4_K", *high[1])]
    cases = [(BF16, *case) for case in cases] + [(FP16, *case) for case in halves]

    def launch_without_memory() -> None:
        for dtype, format, rows, columns, inner in cases:
            x, weight = x_meta(rows, inner, dtype), meta_weight(2 * columns, inner, format)
            packed.packed_product(x, weight, context=StepContext(rows <= 16))
            packed.packed_gated_product(x, weight, "silu", context=StepContext(rows <= 16))

    cuda.compile_ahead(launch_without_memory, cases)
    for dtype, format, rows, columns, inner in cases:
        name = f"{format} {rows}×{columns}×{inner}" + (" fp16" if dtype == FP16 else "")
        run = partial(check, rows, columns, inner, format, StepContext(rows <= 16), dtype)
        report.check(name, BOUNDS[dtype], run)
    for size, gated in product(((128, 2048, 14336), *high[:3]), (False, True)):
        name = "{}×{}×{}".format(*size) + f" {REPEATED} times" + (", gated" if gated else "")
        report.check(name, 0.5, partial(check_repeats, *size, gated))
    for format in FORMATS:
        name = f"{format} dequantised"
        report.check(name, BOUNDS[BF16], partial(check_whole, 300, 1536, format))
    report.check("rounding to 4 bits", 0.97, check_rounding)


# ── whole models ────────────────────────────────────────────────────────────────────────────


def check_model(
    spec: ModelSpec, source: WeightSource, quantization: str | None, decode: str | None = None
) -> float:
    """Every step of some texts, against fp32 and the same weights: the error of bf16 and these
    kernels, as a share of that of bf16 and the reference's. `decode`: of steps that only decode,
    where that is another."""
    formats, texts = (
        weight_formats(spec, source, quantization, keep_gguf_blocks=True),
        texts_of(spec),
    )
    assert formats
    length = max(map(len, texts)) + 16
    others = None if decode is None else weight_formats(spec, source, decode)

    def rig_of(dtype: torch.dtype, kernels: Kernels, record: Record) -> Rig:
        how = (dtype, DEVICE, length, kernels)
        decoder = Decoder(spec, source, *how, LoadOptions(formats, others), dependent_launch=True)
        return Rig(decoder, texts, record=record)

    # Padded as in graphs: the number of rows decides whether fp8 rounds activations.
    exact, plain = (
        forced(rig_of(dtype, Kernels(), EagerReplay()), 20) for dtype in (torch.float32, BF16)
    )
    ours = forced(rig_of(BF16, CudaKernels(DEVICE), CudaRecorder(DEVICE)), 20)
    errors = [float((found - exact).pow(2).mean().sqrt()) for found in (plain, ours)]
    same = float((ours.argmax(-1) == exact.argmax(-1)).float().mean())
    print(f"  rms {errors[1]:.4f}, the reference's {errors[0]:.4f}; {same:.1%} of tokens the same")
    return errors[1] / errors[0]


def check_models(report: Report) -> None:
    llama, _ = load_hf_config(Path("bench/shapes/llama-3.1-8b.json"))
    some = replace(llama, layers=llama.layers[:1], vocab_size=2048)
    for name, spec in (("small", small_spec(**SPECS["qwen3"])), ("a layer of the 8B", some)):
        source = Rounded(Loud(spec), spec)
        for asked in ("int4", "int8"):
            report.check(f"{asked}, {name}", ERROR_SHARE, partial(check_model, spec, source, asked))
        for both in (("fp8", "int4"), ("int4", "fp8")):
            run = partial(check_model, spec, source, *both)
            report.check("prefill {}, decode {}, {}".format(*both, name), ERROR_SHARE, run)
    report.check("an engine, prefill fp8, decode int4", 0.5, check_phases)
    report.check("importance", 0.1, check_importance)
    report.check("an engine, int4, calibrated", 0.5, check_calibration)
    if find_spec("gguf") is None or find_spec("pytest") is None:
        print("GGUF models are left out: the packages gguf and pytest write them")
        return
    from tests.model.weights.test_packed_blocks import MIXTURE, source_of, write

    for usual in (BlockType.Q4_K, BlockType.Q8_0, BlockType.Q5_K):
        with TemporaryDirectory() as folder:
            file = write(Path(folder) / "m.gguf", usual, MIXTURE)
            given = (spec_from_gguf(file), source_of(file), None)
            # Tiles of Q4_K round scales and offsets to bf16, too.
            bound = 1.2 * ERROR_SHARE if usual == BlockType.Q4_K else ERROR_SHARE
            report.check(f"{usual} and Q6_K", bound, partial(check_model, *given))


def check_phases() -> float:
    """A start with a format a phase, graphs and all: by how much the phases' log-probabilities
    differ, of tokens that it writes."""
    both = {"prefill_quantization": "fp8", "decode_quantization": "int4"}
    sizes = {"max_model_len": 256, "num_gpu_blocks_override": 64}
    llm = LLM("bench/shapes/qwen3-0.6b.json", load_format="dummy", **sizes, **both)
    prompts = [[(7 * n * n + size) % 1000 for n in range(size)] for size in (20, 60)]
    found = phase_difference(llm, prompts, 24)
    print(f"  {llm.engine.info().weights}; {llm.engine.memory.waterfall()}; {found}")
    assert found["max"] > 0
    return float(found["mean"])


def check_importance() -> float:
    """The importance of columns by a calibration text: bf16 on the card against fp32 on the CPU."""
    spec = small_spec(**SPECS["qwen3"])
    source, windows = Rounded(Loud(spec), spec), [[*range(n, n + 64)] for n in (5, 100, 300)]
    ours, exact = (
        measure_importance(spec, source, windows, dtype, torch.device(device), 256)
        for dtype, device in ((BF16, "cuda"), (torch.float32, "cpu"))
    )
    return max(
        float((ours[name].cpu() - counts).norm() / counts.norm()) for name, counts in exact.items()
    )


def check_calibration() -> float:
    """A start with it, graphs and all."""
    from tests.tiny import TEXT, tiny_folder

    with TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text("\n".join(40 * TEXT), encoding="utf-8")
        sizes = {"hidden_size": 256, "intermediate_size": 512, "torch_dtype": "bfloat16"}
        tiny = tiny_folder(Path(folder) / "tiny", **sizes)
        how = {"quantization": "int4", "calibration": Path(folder) / "text.txt"}
        llm = LLM(str(tiny), num_gpu_blocks_override=64, **how)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (out,) = llm.generate([TEXT[0]], params)
        return float(len(out.outputs[0].token_ids) != 8)


# ── fast ────────────────────────────────────────────────────────────────────────────────────


def floor_us(rows: int, weight: PackedWeight) -> float:
    columns, inner = weight.shape
    moved = weight.num_bytes + rows * (inner + columns) * 2
    return 1e6 * max(moved / READ, 2 * rows * columns * inner / FLOPS)


def copies(name: str, format: str) -> list[PackedWeight]:
    columns, inner, _ = MATRICES[name]
    first = random_weight(columns, inner, format)
    count = max(2, COPIES_BYTES // first.num_bytes)
    return [first, *(clone(first) for _ in range(count - 1))]


def clone(weight: PackedWeight) -> PackedWeight:
    bits, *parts = weight
    return PackedWeight(bits, *(None if part is None else part.clone() for part in parts))


def call(name: str, x: torch.Tensor, weight: PackedWeight) -> Call:
    context = StepContext(len(x) <= 64)
    if MATRICES[name][2]:
        return partial(packed.packed_gated_product, x, weight, "silu", context=context)
    return partial(packed.packed_product, x, weight, context=context)


def time_all(end: float, formats: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Times in µs of each format, matrix and number of rows, the floor's share, bf16's times."""
    found: dict[str, dict[str, float]] = {}

    def launch_without_memory() -> None:
        for format, (name, (columns, inner, _)) in product(formats, MATRICES.items()):
            weight = meta_weight(columns, inner, format)
            for rows in ROWS if format == "int4" else FEW_ROWS:
                call(name, x_meta(rows, inner), weight)()

    cuda.compile_ahead(launch_without_memory, formats)
    dense_us: dict[tuple[str, int], float] = {}
    for format, name in product(formats, MATRICES):
        weights = copies(name, format)
        dense = [dequantised(w, BF16) for w in weights[:2]]
        for rows in ROWS if format == "int4" else FEW_ROWS:
            if perf_counter() > end:
                return found
            x, at = random_x(rows, MATRICES[name][1]), f"{format} {name} {rows}"
            us = 1e6 * replayed([call(name, x, w) for w in weights])
            if (name, rows) not in dense_us:
                bf16 = CudaKernels.gated_product if MATRICES[name][2] else CudaKernels.product
                more = {"activation": "silu"} if MATRICES[name][2] else {}
                calls = [partial(bf16, x, w, **more) for w in dense]
                dense_us[name, rows] = 1e6 * replayed(calls)
            floor = floor_us(rows, weights[0])
            given = {"us": us, "of_floor": floor / us, "bf16_us": dense_us[name, rows]}
            found[at] = {k: round_to(v) for k, v in given.items()}
            slower = "  SLOWER" if us > dense_us[name, rows] else ""
            print(
                f"{at:22} {us:8.1f} µs {floor / us:4.0%}  bf16 {dense_us[name, rows]:8.1f}{slower}",
                flush=True,
            )
        del weights, dense
    return found


def time_layers(end: float) -> dict[str, dict[str, float]]:
    """All 32 layers without their attention, ms: norms and launches are in it."""
    kernels, found = CudaKernels(DEVICE), {}
    count, norm = 6, torch.ones(4096, device=DEVICE, dtype=BF16)
    weights = [[random_weight(*sizes[:2]) for sizes in MATRICES.values()] for _ in range(count)]
    dense = [[packed.dequantise(w, BF16) for w in layer] for layer in weights]

    def forward(layers: list[list[Linear]], x: torch.Tensor, residual: torch.Tensor) -> None:
        normed, context = x, StepContext(len(x) <= 64)
        for qkv, o, gate_up, down in layers:
            qkv.product(normed, context=context)
            out = o.product(x, context=context)
            normed = kernels.add_rms_norm(out, residual, norm, 1e-5, context=context)
            inner = gate_up.gated_product(normed, "silu", context=context)
            out = down.product(inner, context=context)
            normed = kernels.add_rms_norm(out, residual, norm, 1e-5, context=context)

    for rows in (1, 8, 16, 32, 64, 128, 256, 4096):
        if perf_counter() > end:
            break
        x, residual = random_x(rows, 4096), random_x(rows, 4096)
        kinds: dict[str, list[list[Linear]]] = {
            "int4": [[PackedLinear(w, None, kernels) for w in layer] for layer in weights],
            "bf16": [[DenseLinear(w, None, kernels) for w in layer] for layer in dense],
        }
        found[f"layers {rows}"] = {
            kind: round_to(32e3 / count * replayed([partial(forward, layers, x, residual)]))
            for kind, layers in kinds.items()
        }
        print(f"layers {rows:5} {found[f'layers {rows}']} ms", flush=True)
    return found


# ── tuning ──────────────────────────────────────────────────────────────────────────────────

Tuning = packed.Streaming | packed.Tiling
TUNED_ROWS = (1, 16, 32, 64, 128, 256)
MAX_TUNED = {4: 64, 8: 256}  # of 4 bits, more are `stream_k`'s


def streamings(weight: PackedWeight, gated: bool) -> Iterator[packed.Streaming]:
    usual = packed.choose_streaming(weight, gated)
    assert usual is not None
    yield usual
    block = packed.stream_block(weight)
    blocks, whole = weight.shape[1] // block, (1024 if weight.bits == 4 else 256) // block
    for columns, warps, depth in product((1, 2, 4), (1, 2), (1, 2, 4)):
        # As many codes in flight as a thread has registers for.
        few = columns * depth * (1 + gated) <= 16
        if few and columns * warps > 1 and blocks % (warps * whole) == 0:
            yield packed.Streaming(columns, warps * whole, warps, depth)


def tilings(rows: int, weight: PackedWeight, gated: bool) -> Iterator[packed.Tiling]:
    """Yield the tiling that is used, and tilings that differ from it in one or two fields."""
    if weight.bits == 4:
        usual = packed.choose_tiling_4(rows, weight, gated)
    else:
        usual = packed.choose_tiling_8(min(128, rows), weight, gated)
    if usual is None:
        return
    steps = weight.shape[1] // (weight.block if weight.bits == 4 else weight.group)
    if rows > usual.rows:
        usual = replace(usual, splits=1)
    changes = changes_4(usual, rows) if weight.bits == 4 else changes_8(usual, rows)
    for way in (replace(usual, **change) for change in changes):
        can_split = not gated and rows <= way.rows and way.columns >= ARRIVALS_COLUMNS
        if steps % way.step == 0 and way.splits <= max(1, steps // way.step * can_split):
            yield way


def changes_4(usual: packed.Tiling, rows: int) -> list[dict[str, int]]:
    splits, step, stages = usual.splits, usual.step, usual.num_stages
    found: list[dict[str, int]] = [
        {},
        {"splits": 2 * splits},
        {"splits": splits // 2 or 1},
        {"num_stages": stages + 1},
        {"columns": 128, "num_warps": 8},
    ]
    if rows <= 32:
        # Tiles of 32 columns have the instructions of all GPUs, of 64 and 16 rows Hopper's own.
        narrow = {"columns": 32, "num_warps": 2}
        found.append({"step": step // 2 or 1, "num_stages": stages + 2})
        found += [narrow, {**narrow, "splits": splits // 2 or 1}, {**narrow, "step": 2 * step}]
        if rows == 1:
            found += [{"rows": 16}, {"rows": 16, "splits": splits // 2 or 1}]
    else:
        found += [{"step": step // 2 or 1}, {"step": 2 * step}, {"num_stages": stages - 1}]
    return found


def changes_8(usual: packed.Tiling, rows: int) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [
        {},
        {"columns": 64 if usual.columns == 32 else 128},
        {"num_stages": 7 - usual.num_stages},
        {"splits": usual.splits // 2 or 1},
    ]
    if rows <= 16:
        found.append({"step": 2 * usual.step, "num_stages": 3})
    else:
        found.append({"weight_first": not usual.weight_first})
    return found


def is_right_way(way: Tuning | None, x: torch.Tensor, weight: PackedWeight, gated: bool) -> bool:
    if way is None:
        return True
    found = packed.run(x, weight, way, "silu" if gated else None, DEFAULT_CONTEXT)
    return is_right(way, found, x.float() @ dequantised(weight, torch.float32).t(), gated)


def call_all(calls: list[Call]) -> None:
    for one in calls:
        one()


def tune(
    end: float, formats: tuple[str, ...], all_rows: tuple[int, ...]
) -> dict[str, list[object]]:
    """The fastest of each format, number of rows and matrix, as the table has it."""
    table: Tiles = {}
    for format, rows in product(formats, all_rows):
        if rows > MAX_TUNED[FORMATS[format][0]]:
            continue
        todo: dict[str, list[Tuning]] = {}
        calls: list[Call] = []
        for name, (columns, inner, gated) in MATRICES.items():
            without, x = meta_weight(columns, inner, format), x_meta(rows, inner)
            ways: list[Tuning] = list(tilings(rows, without, gated))
            if rows == 1:
                ways = [*streamings(without, gated), *ways]
            todo[name] = list(dict.fromkeys(ways))
            how = ("silu" if gated else None, StepContext(rows <= 64))
            calls += [partial(packed.run, x, without, way, *how) for way in todo[name]]
            calls.append(partial(packed.library_product, x, without))
        if perf_counter() > end - 4:
            break
        cuda.compile_ahead(partial(call_all, calls), (format, rows, todo))
        for name, (_, inner, gated) in MATRICES.items():
            if perf_counter() > end:
                return table
            weights, x = copies(name, format), random_x(rows, inner)
            how = ("silu" if gated else None, StepContext(rows <= 64))
            found: list[tuple[float, Tuning | None]] = []
            for way in todo[name]:
                try:
                    us = replayed([partial(packed.run, x, w, way, *how) for w in weights])
                    found.append((round_to(1e6 * us), way))
                except Exception as error:
                    print(f"{name} {rows} {way}: {type(error).__name__} {str(error)[:100]}")
            if rows > 16 or not found:
                run = partial(library, x, gated)
                found.append((round_to(1e6 * replayed([partial(run, w) for w in weights])), None))
            found.sort(key=lambda pair: pair[0])
            floor = floor_us(rows, weights[0])
            for us, chosen in found[:3]:
                shown = "library" if chosen is None else str(chosen).split(".")[-1]
                print(f"{format:5} {name:8} {rows:4} {us:7.1f} µs {floor / us:4.0%} {shown}")
            sys.stdout.flush()
            right = (way for _, way in found if is_right_way(way, x, weights[0], gated))
            best = next(right, None)
            key = packed.table_key(rows, weights[0], gated)
            table[key] = () if best is None else tuple(map(int, astuple(best)))
            del weights
    return table


def library(x: torch.Tensor, gated: bool, weight: PackedWeight) -> torch.Tensor:
    made = packed.library_product(x, weight)
    return cuda.act_and_mul(made, "silu") if gated else made


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="write packed_tiles.py")
    parser.add_argument("--tune-formats", default="int4,Q4_K,Q6_K")
    parser.add_argument("--tune-rows", default=",".join(map(str, TUNED_ROWS)))
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--limit-s", type=float, default=85.0, help="of all of it")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = perf_counter()
    end, timings = begun + args.limit_s, {}
    report = Report(args.limit_s * (1.0 if args.no_times else 0.5))

    def told(what: str) -> None:
        print(f"{what}: {perf_counter() - begun:.1f} s since the start", flush=True)

    if not args.no_checks:
        check_all(report)
        told("products")
        check_models(report)
        told("models")
    report.limit_s = args.limit_s
    if args.tune:
        rows = tuple(map(int, args.tune_rows.split(",")))
        formats = tuple(args.tune_formats.split(","))
        until = end - 0.2 * args.limit_s
        report.item("tuning", lambda: write_table(packed_tiles, tune(until, formats, rows)))
        told("tuning")
    if not args.no_times:
        report.item("layers", lambda: timings.update(time_layers(end - 0.1 * args.limit_s)))
        told("layers")
        report.item("times", lambda: timings.update(time_all(end, ("int4", "Q4_K", "Q6_K"))))
        told("times")
    for name, error in report.passed.items():
        print(f"passed {name}: {error:.2e}")
    for name, said in report.failed.items():
        print(f"failed {name}: {said}")
    if "OUT" in os.environ:
        given = {"passed": report.passed, "failed": report.failed, "timings": timings}
        Path(os.environ["OUT"], "packed.json").write_text(json.dumps(given))
    return tally(len(report.passed) + len(timings), len(report.failed))


if __name__ == "__main__":
    sys.exit(main())
