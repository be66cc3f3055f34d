"""The CUDA kernels on a GPU: right first, then how fast, against what the card can do.

    python -m tests.gpu.kernels_check [--sweep] [--limit-s 140]

Each item stands alone: one that fails is reported, and the rest still runs. Calls are timed as
replays of a CUDA graph that walks over more memory than the L2 holds, as the layers of a model do.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import triton

from tests.kernels import cuda_cases as cases
from tests.kernels.cuda_cases import BOUNDS, Heads
from twostroke.kernels import cuda
from twostroke.kernels.cuda import decode, prefill

CUDA = torch.device("cuda")
READ, COPY, FLOPS = 3.99e12, 4.16e12, 783e12  # the card's ceilings, from the ledger
SPREAD_BYTES = 256 << 20  # what one round of calls walks over: several times the L2
CONTEXT = 1088
# On a GPU fp32 products are three of tf32, and exponentials are approximate.
ALLOWED = BOUNDS | {torch.float32: 1e-5}
PLAIN = (Heads(32, 8, 128), Heads(9, 3, 64))  # for every dtype; other shapes in bf16


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    hidden: int
    intermediate: int
    qk_norm: bool
    dim: int = 128


SHAPES = [
    Shape("8B", 32, 8, 4096, 14336, False),
    Shape("0.6B", 16, 8, 1024, 3072, True),
]


@dataclass
class Report:
    limit_s: float
    begun: float = field(default_factory=perf_counter)
    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    timings: dict[str, list[float]] = field(default_factory=dict)  # µs, of the floor, T a second
    first_calls_s: float = 0.0  # compiling, mostly

    def item(self, name: str, work: Callable[[], None]) -> None:
        if perf_counter() - self.begun > self.limit_s:
            self.failed[name] = "no time left"
            return
        try:
            work()
            torch.cuda.synchronize()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"[:600]
            print(f"FAILED {name}\n{traceback.format_exc()[-1500:]}", flush=True)

    def check(self, name: str, bound: float, case: Callable[[], float]) -> None:
        def work() -> None:
            torch.manual_seed(len(name))
            error = case()
            if not error < bound:
                raise AssertionError(f"error {error:.2e}, allowed {bound:.0e}")
            self.passed[name] = error

        self.item(name, work)

    def time(
        self, name: str, calls: Sequence[Callable[[], object]], amount: float, rate: float
    ) -> None:
        """One call, where `calls` are one round over different memory, against the time that
        `amount` bytes or operations need at `rate` a second."""

        def work() -> None:
            begun = perf_counter()
            calls[0]()
            torch.cuda.synchronize()
            first = perf_counter() - begun
            self.first_calls_s += first
            each = replayed(calls)
            share, reached = amount / rate / each, amount / each / 1e12
            self.timings[name] = [round_to(n) for n in (each * 1e6, share, reached)]
            unit = "TFLOP/s" if rate == FLOPS else "TB/s"
            figures = f"{each * 1e6:9.2f} µs {share:6.1%} {reached:7.2f} {unit}"
            print(f"{name:52} {figures}  ({first:.1f} s)", flush=True)

        self.item(name, work)


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


def replayed(calls: Sequence[Callable[[], object]]) -> float:
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()

    def measure(rounds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / rounds

    rounds = max(1, min(50, int(0.01 / measure(1))))
    return median(measure(rounds) for _ in range(5)) / len(calls)


# ── right ───────────────────────────────────────────────────────────────────────────────────


def check_all(report: Report) -> None:
    chunks = [(0, 1), (0, 300), (129, 127), (1000, 33), (63, 65), (0, 64), (512, 512)]
    lengths = [1, 0, 63, 64, 65, 127, 129, 1000, 2049, 0, 16]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        bound = ALLOWED[dtype]
        for heads in (
            *PLAIN,
            Heads(16, 8, 128, 32),
            Heads(32, 32, 80, interleaved=True),
            Heads(28, 4, 96, 64),
            Heads(8, 4, 256),
            Heads(32, 8, 128, window=100),
            Heads(8, 2, 128, softcap=5.0),
            Heads(8, 4, 256, window=70, softcap=5.0),
        ):
            if dtype != torch.bfloat16 and heads not in PLAIN:
                continue
            name = f"{kind} {heads.num_heads}/{heads.num_kv_heads}×{heads.dim}"
            name += f" page {heads.page} window {heads.window} cap {heads.softcap}"
            report.check(
                f"prefill {name}",
                bound,
                lambda h=heads, d=dtype: cases.check_prefill(h, chunks, CUDA, d),
            )
            for splits in (1, 7) if heads.dim == 128 else (7,):
                report.check(
                    f"decode {name} splits {splits}",
                    bound,
                    lambda h=heads, d=dtype, s=splits: cases.check_decode(h, lengths, s, CUDA, d),
                )
        for rows, width in ((1, 4096), (77, 1024), (3, 5120), (9, 33)):
            report.check(
                f"norms {kind} {rows}×{width}",
                bound,
                lambda r=rows, w=width, d=dtype: cases.check_norms(r, w, CUDA, d),
            )
            report.check(
                f"silu {kind} {rows}×{width}",
                bound,
                lambda r=rows, w=width, d=dtype: cases.check_silu(r, w, CUDA, d),
            )
        for heads, half, norm in (
            (Heads(32, 8, 128), 64, False),
            (Heads(16, 8, 128), 64, True),
            (Heads(9, 3, 80, interleaved=True), 16, True),
        ):
            report.check(
                f"rope_store {kind} {heads.num_heads}×{heads.dim}",
                bound,
                lambda h=heads, a=half, n=norm, d=dtype: cases.check_rope_store(
                    h, a, n, 77, CUDA, d
                ),
            )
    for vocab, spread in ((151936, 1.0), (151936, 5.0), (128256, 0.05), (49152, 2.0)):
        # Of 120 draws: those whose first two stand closer than fp32 can tell.
        report.check(
            f"sample {vocab} spread {spread}, other tokens",
            3,
            lambda v=vocab, s=spread: len(cases.check_sample(120, v, s, CUDA, torch.float32)),
        )
    report.check("decode again and again", 1e-9, check_repeats)
    report.check("decode, graph, lengths changed", ALLOWED[torch.bfloat16], check_graph)


def check_repeats() -> float:
    """Whichever split arrives last merges in the same order: the same bits each time."""
    call, _ = decode_call(SHAPES[0], 8, 1, splits=17)
    first = call().clone()
    return max(float((call() - first).abs().max()) for _ in range(50))


def check_graph() -> float:
    """One captured launch serves other lengths, padding rows among them."""
    heads = Heads(32, 8, 128)
    cache = cases.Cache(heads, [700, 300, 65], CUDA, torch.bfloat16)
    q = torch.randn(3, 32, 128, device=CUDA, dtype=torch.bfloat16)
    scratch = cuda.decode_scratch(3, 32, 128, 9, CUDA)
    rows, lengths = cases.ints(cache.rows, CUDA), cases.ints([1, 1, 1], CUDA)
    out = torch.empty_like(q)

    def call() -> None:
        where = (cache.keys, cache.values, cache.tables, rows, lengths)
        cuda.decode_attention(q, *where, heads.scale, None, 9, scratch, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    error = 0.0
    for now in ([700, 300, 65], [1, 0, 64], [0, 0, 0], [699, 299, 1]):
        lengths.copy_(cases.ints(now, CUDA))
        out.fill_(cases.NAN)
        graph.replay()
        for index, length in enumerate(now):
            right = torch.zeros(1, 32, 128, device=CUDA)
            if length:
                part = q[index : index + 1]
                right = cases.expected_attention(part, cache, index, length - 1, length)
            error = cases.largest(error, cases.worst(out[index : index + 1], right))
    return error


# ── fast ────────────────────────────────────────────────────────────────────────────────────


def random_pool(shape: Shape, layers: int, blocks: int, page: int) -> torch.Tensor:
    size = (layers, 2, blocks, page, shape.num_kv_heads, shape.dim)
    return torch.randn(size, device=CUDA, dtype=torch.bfloat16)


def shuffled_tables(rows: int, blocks: int) -> torch.Tensor:
    return torch.randperm(rows * blocks, device=CUDA).int().view(rows, blocks)


def decode_call(
    shape: Shape,
    batch: int,
    layers: int,
    splits: int | None = None,
    tuned: decode.Tuning | None = None,
    page: int = 16,
    lengths: Sequence[int] = (),
) -> tuple[Callable[[], torch.Tensor], int]:
    """A call that takes the next layer each time, and the splits it uses."""
    contexts = cases.ints(lengths or [CONTEXT] * batch, CUDA)
    blocks = -(-int(contexts.max()) // page)
    pool = random_pool(shape, layers, batch * blocks, page)
    tables = shuffled_tables(batch, blocks)
    q = torch.randn(batch, shape.num_heads, shape.dim, device=CUDA, dtype=torch.bfloat16)
    splits = splits or cuda.decode_splits(batch, shape.num_kv_heads, 8192)
    scratch = cuda.decode_scratch(batch, shape.num_heads, shape.dim, splits, CUDA)
    rows = torch.arange(batch, device=CUDA, dtype=torch.int32)
    out = torch.empty_like(q)
    turn = count()

    def call() -> torch.Tensor:
        keys, values = pool[next(turn) % layers]
        where = (keys, values, tables, rows, contexts)
        return cuda.decode_attention(
            q, *where, shape.dim**-0.5, None, splits, scratch, out=out, tuned=tuned
        )

    return call, splits


def time_decode(report: Report, shape: Shape, batch: int, ragged: bool = False, **how: Any) -> None:
    """All of one context, or as long as those of nano-vLLM's workload are on the way."""
    lengths = [CONTEXT] * batch
    if ragged:
        lengths = [100 + 7919 * row % 1600 for row in range(batch)]
    kv_bytes = sum(lengths) * 2 * shape.num_kv_heads * shape.dim * 2
    layers = max(1, min(64, -(-SPREAD_BYTES // kv_bytes)))
    call, splits = decode_call(shape, batch, layers, lengths=lengths, **how)
    name = f"decode {shape.name} batch {batch}{' ragged' * ragged} splits {splits}"
    name += "".join(f" {key} {value}" for key, value in how.items() if key != "splits")
    report.time(name, [call] * layers, kv_bytes, READ)


def time_prefill(
    report: Report,
    shape: Shape,
    size: int,
    start: int = 0,
    tuned: prefill.Tuning | None = None,
    page: int = 16,
) -> None:
    blocks = -(-(start + size) // page)
    pool = random_pool(shape, 1, blocks, page)
    tables = shuffled_tables(1, blocks)
    q = torch.randn(size, shape.num_heads, shape.dim, device=CUDA, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    where = [cases.ints(values, CUDA) for values in ([0], [start], [0, size])]

    def call() -> None:
        keys, values = pool[0]
        cuda.prefill_attention(
            q, keys, values, tables, *where, size, shape.dim**-0.5, None, out=out, tuned=tuned
        )

    flops = 4 * shape.num_heads * shape.dim * (start * size + size * size / 2)
    name = f"prefill {shape.name} {size} after {start}" + (f" {tuned}" if tuned else "")
    report.time(name, [call] * 2, flops, FLOPS)


def time_small(report: Report, shape: Shape, tokens: int) -> None:
    heads, kv, dim, bf16 = shape.num_heads, shape.num_kv_heads, shape.dim, torch.bfloat16
    wide = (heads + 2 * kv) * dim
    sets = max(1, min(64, SPREAD_BYTES // (tokens * shape.hidden * 2)))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=CUDA, dtype=bf16)

    def each(make: Callable[[], Callable[[], object]], used: int) -> list[Callable[[], object]]:
        return [make() for _ in range(max(1, min(sets, SPREAD_BYTES // used)))]

    weight, head_weight = random(shape.hidden), random(dim)
    row = tokens * shape.hidden * 2

    def add_norm() -> Callable[[], object]:
        x, residual = random(tokens, shape.hidden), random(tokens, shape.hidden)
        return lambda: cuda.add_rms_norm(x, residual, weight, 1e-5)

    name = f"{shape.name} {tokens} tokens"
    report.time(f"add_rms_norm {name}", each(add_norm, 4 * row), 4 * row, COPY)

    def norm() -> Callable[[], object]:
        x = random(tokens, shape.hidden)
        return lambda: cuda.rms_norm(x, weight, 1e-5)

    report.time(f"rms_norm {name}", each(norm, 2 * row), 2 * row, COPY)

    def silu() -> Callable[[], object]:
        x = random(tokens, 2 * shape.intermediate)
        return lambda: cuda.silu_and_mul(x)

    used = tokens * shape.intermediate * 6
    report.time(f"silu_and_mul {name}", each(silu, used), used, COPY)
    pool = random_pool(shape, 1, -(-tokens // 16), 16)
    angles = torch.rand(8192, dim // 2, device=CUDA)
    positions = torch.arange(tokens, device=CUDA)
    norms = (head_weight, head_weight) if shape.qk_norm else (None, None)

    def rope() -> Callable[[], object]:
        qkv = random(tokens, wide)
        keys, values = pool[0]
        where = (angles, angles, positions, positions, keys, values, heads, kv)
        return lambda: cuda.rope_store(qkv, *norms, 1e-6, *where)

    used = tokens * wide * 4
    report.time(f"rope_store {name}", each(rope, used), used, COPY)


def time_sample(report: Report, batch: int, vocab: int) -> None:
    logits = [torch.randn(batch, vocab, device=CUDA, dtype=torch.bfloat16) for _ in range(4)]
    keys = torch.randint(0, 2**32, (2, batch), device=CUDA)
    for spread in (1.0, 4.0):
        for each in logits:
            each *= spread
        for temperature, top_k, top_p in ((0.0, 0, 1), (0.6, 0, 1), (0.6, 0, 0.9), (0.6, 20, 0.95)):
            if spread > 1 and top_k == 0 and top_p == 1:
                continue
            columns = (
                torch.full((batch,), temperature, device=CUDA),
                torch.full((batch,), top_k, device=CUDA, dtype=torch.int32),
                torch.full((batch,), float(top_p), device=CUDA),
                torch.zeros(batch, device=CUDA),
            )
            calls = [lambda x=x, c=columns: cuda.sample(x, *c, *keys) for x in logits]
            name = f"sample {batch}×{vocab} t {temperature} k {top_k} p {top_p} spread {spread}"
            report.time(name, calls, batch * vocab * 2, READ)


def time_all(report: Report) -> None:
    for shape in SHAPES:
        for batch in (1, 8, 32, 128, 256):
            time_decode(report, shape, batch)
        time_decode(report, shape, 128, ragged=True)
        for size in (1024, 4096, 8192, 32768):
            time_prefill(report, shape, size)
        time_prefill(report, shape, 512, 4096)
        for tokens in (1, 128, 4096):
            time_small(report, shape, tokens)
    for batch in (1, 256):
        time_sample(report, batch, 151936)


def sweep(report: Report) -> None:
    """Which tiles, pipelines and splits are best here: what `tuning` should say."""
    large, small = SHAPES
    for batch, choices in (
        (1, (8, 16, 32, 64)),
        (8, (4, 8, 16)),
        (32, (1, 2, 4, 8)),
        (128, (1, 4)),
    ):
        for splits in choices:
            time_decode(report, large, batch, splits=splits)
    for tile, warps, stages in (
        (32, 4, 4),
        (32, 2, 4),
        (64, 4, 5),
        (64, 2, 4),
        (64, 8, 4),
        (128, 4, 4),
        (128, 8, 4),
        (128, 8, 5),
    ):
        tuned = decode.Tuning(tile, warps, stages)
        time_decode(report, large, 128, splits=1, tuned=tuned)
        time_decode(report, small, 128, splits=1, tuned=tuned)
    for batch in (128, 256):
        for splits in (1, 2, 4, 8):
            time_decode(report, large, batch, ragged=True, splits=splits)
    for page in (32, 64):
        time_decode(report, large, 128, splits=1, page=page)
    for queries, keys, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 4, 3),
        (128, 128, 8, 3),
        (128, 128, 8, 5),
        (64, 64, 4, 3),
        (64, 64, 4, 5),
        (128, 32, 8, 5),
    ):
        choice = prefill.Tuning(queries, keys, warps, stages)
        for size in (1024, 4096, 32768):
            time_prefill(report, large, size, tuned=choice)


def worst_by_kind(passed: dict[str, float]) -> dict[str, float]:
    """Kernel and dtype → the largest error of its checks."""
    found: dict[str, float] = {}
    for name, error in passed.items():
        kind = " ".join(name.split()[:2])
        found[kind] = round_to(max(error, found.get(kind, 0.0)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles and splits too")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--limit-s", type=float, default=140.0)
    parser.add_argument("--out", type=Path, help="a file for the JSON too")
    args = parser.parse_args()
    report = Report(args.limit_s)
    device = torch.cuda.get_device_name()
    print(device, "torch", torch.__version__, "triton", triton.__version__)
    if not args.no_checks:
        check_all(report)
        print(f"{len(report.passed)} checks passed, {perf_counter() - report.begun:.0f} s")
    for part in (time_all, sweep) if args.sweep else (time_all,):
        report.item(part.__name__, lambda part=part: part(report))
    for name, why in report.failed.items():
        print(f"FAILED {name}: {why}")
    result = {
        "check": "cuda kernels",
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "passed": len(report.passed),
        "errors": worst_by_kind(report.passed),
        "failed": sorted(report.failed),
        "us_share_rate": report.timings,
        "seconds": round_to(perf_counter() - report.begun),
        "first_calls_s": round_to(report.first_calls_s),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
