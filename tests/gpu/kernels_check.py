"""The CUDA kernels on a GPU: right first, then how fast, against what the card can do.

    python -m tests.gpu.kernels_check [--sweep | --no-times] [--part 1/3]
                                        [--limit-s 140]

Each item stands alone: one that fails is reported, and the rest still runs. `--sweep` times the
choices between kernels instead of all kernels. `--part 1/3`: every third check, from the first.
Ends with a JSON line and how many passed; exits
with 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import reduce
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch
import triton

from tests.gpu.kernels_time import CUDA, SHAPES, check_pdl, decode_call, sweep, time_all
from tests.gpu.report import Report, part, round_to, tally
from tests.kernels import cuda_cases as cases
from tests.kernels.cuda_cases import BOUNDS, Heads
from tests.kernels.definitions import DEPENDENT
from twostroke.kernels import cuda
from twostroke.kernels.cuda import prefill_hopper
from twostroke.kernels.cuda.stream_k import is_hopper
from twostroke.kernels.records import DEFAULT_CONTEXT

# On a GPU fp32 products are three of tf32, and exponentials are approximate.
ALLOWED = BOUNDS | {torch.float32: 1e-5}
SPLIT_CHUNKS = [(9000, 16), (3000, 41), (0, 5), (700, 1)]
PLAIN = (Heads(32, 8, 128), Heads(9, 3, 64))  # for every dtype; other shapes in bf16


CHUNKS = [(0, 1), (0, 300), (129, 127), (1000, 33), (63, 65), (0, 64), (512, 512)]


def check_all(report: Report) -> None:
    chunks = CHUNKS
    lengths = [1, 0, 63, 64, 65, 127, 129, 1000, 2049, 0, 16]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        bound = ALLOWED[dtype]
        for heads in (
            *PLAIN,
            Heads(16, 8, 128, 32),
            Heads(32, 32, 80),
            Heads(28, 4, 96, 64),
            Heads(8, 4, 256),
            Heads(32, 8, 128, window=100),
            Heads(8, 2, 128, softcap=5.0),
            Heads(8, 4, 256, window=70, softcap=5.0),
            Heads(32, 8, 128, kv_dtype=torch.float16),
            Heads(8, 4, 256, kv_dtype=torch.float32),
            Heads(64, 8, 64, sinks=True),
            Heads(64, 8, 64, window=128, sinks=True),
        ):
            if dtype != torch.bfloat16 and heads not in PLAIN:
                continue
            name = f"{kind} {heads.num_heads}/{heads.num_kv_heads}×{heads.dim}"
            name += f" page {heads.page} window {heads.window} softcap {heads.softcap}"
            name += f" cache {heads.kv_dtype}" if heads.kv_dtype else ""
            name += " sinks" if heads.sinks else ""
            report.check(
                f"prefill {name}",
                bound,
                lambda h=heads, d=dtype: cases.check_prefill(h, chunks, CUDA, d),
            )
            report.check(
                f"prefill {name}, short chunks over long contexts",
                bound,
                lambda h=heads, d=dtype: cases.check_prefill(h, SPLIT_CHUNKS, CUDA, d),
            )
            for splits in (1, 7) if heads.dim == 128 else (7,):
                report.check(
                    f"decode {name} splits {splits}",
                    bound,
                    lambda h=heads, d=dtype, s=splits: cases.check_decode(h, lengths, s, CUDA, d),
                )
                for queries in (2, 5):
                    several = [max(length, queries) if length else 0 for length in lengths]
                    report.check(
                        f"decode {name} splits {splits} queries {queries}",
                        bound,
                        lambda h=heads, d=dtype, s=splits, n=queries, ls=several: (
                            cases.check_decode(h, ls, s, CUDA, d, n)
                        ),
                    )
                # With splits there is a norm; of heads of other sizes half of the channels rotate.
                half = heads.dim // 2 if heads.dim == 128 else heads.dim // 4
                report.check(
                    f"decode+rope {name} splits {splits}",
                    bound,
                    lambda h=heads, a=half, d=dtype, s=splits: cases.check_rope_decode(
                        h, a, d if s > 1 else None, lengths, s, CUDA, d
                    ),
                )
        for rows, width in ((1, 4096), (77, 1024), (3, 5120), (9, 33)):
            for norm in {dtype, torch.float32}:
                report.check(
                    f"norms {kind} {rows}×{width} weights {norm}",
                    bound,
                    lambda r=rows, w=width, d=dtype, n=norm: cases.check_norms(r, w, CUDA, d, n),
                )
            for activation in ("silu", "gelu_tanh"):
                report.check(
                    f"{activation} {kind} {rows}×{width}",
                    bound,
                    lambda r=rows, w=width, d=dtype, a=activation: cases.check_act_and_mul(
                        r, w, CUDA, d, a
                    ),
                )
        for rows, width, inner in (
            (1, 14336, 4096),
            (1, 1023, 14336),
            (1, 33, 1536),
            (1, 151936, 512),
            (2, 3072, 1024),
            (4, 1024, 2048),
            (16, 4100, 4096),
            (33, 3072, 1024),
            (64, 4096, 4096),
            (65, 512, 80),
        ):
            for context, activation in (
                (DEFAULT_CONTEXT, "silu"),
                (DEPENDENT, "silu"),
                (DEPENDENT, "gelu_tanh"),
            ):
                mode = " pdl" if context.dependent_launch else ""
                report.check(
                    f"products {kind} {rows}×{width}×{inner} {activation}{mode}",
                    bound,
                    lambda r=rows, w=width, i=inner, d=dtype, a=activation, c=context: (
                        cases.check_products(r, w, i, CUDA, d, a, c)
                    ),
                )
        for heads, half, norm in (
            (Heads(32, 8, 128), 64, None),
            (Heads(16, 8, 128), 64, dtype),
            (Heads(9, 3, 80), 16, dtype),
            (Heads(8, 4, 256), 128, torch.float32),
            (Heads(8, 4, 256, kv_dtype=torch.float16), 128, torch.float32),
            (Heads(32, 8, 128, scaled=True), 64, None),
        ):
            report.check(
                f"rope_store {kind} {heads.num_heads}×{heads.dim} cache {heads.kv_dtype or dtype}"
                f"{' scaled' * heads.scaled}",
                max(bound, heads.bound(dtype)),
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
    for dtype in (torch.bfloat16, torch.float32):
        # Adjusted logits, tokens, and what is kept of them.
        report.check(
            f"adjust {dtype}, parts that differ",
            0.5,
            lambda d=dtype: cases.check_adjust(45, 151936, CUDA, d).count(False),
        )
    for count in (0, 20):
        report.check(f"log-probabilities, {count} best", 1e-5, lambda n=count: check_logprobs(n))
    if is_hopper():
        check_hopper_prefill(report)
    report.check("decode again and again", 1e-9, check_repeats)
    report.check("decode, graph, lengths changed", ALLOWED[torch.bfloat16], check_graph)
    report.check("dependent launches in a graph", ALLOWED[torch.bfloat16], check_pdl)


def check_hopper_prefill(report: Report) -> None:
    """Chunks that are too short for `prefill_hopper.choose`, and continued ones, by that kernel."""
    for heads, dtype in (
        (Heads(32, 8, 128), torch.bfloat16),
        (Heads(32, 8, 128), torch.float16),
        (Heads(28, 4, 128, 32, window=100), torch.bfloat16),
        (Heads(8, 8, 128, 64, softcap=5.0), torch.float16),
        (Heads(8, 4, 128, window=70, softcap=5.0, sinks=True), torch.bfloat16),
        (Heads(64, 8, 64), torch.bfloat16),
        (Heads(64, 8, 64, window=128, sinks=True), torch.float16),
        (Heads(8, 4, 256), torch.bfloat16),
        (Heads(8, 4, 256, window=70, softcap=5.0), torch.float16),
    ):
        name = f"Hopper's prefill {str(dtype).removeprefix('torch.')} {heads}"
        report.check(name, ALLOWED[dtype], lambda h=heads, d=dtype: hopper_prefill(h, d))


def hopper_prefill(heads: Heads, dtype: torch.dtype) -> float:
    asked: list[int] = []
    tuned = prefill_hopper.TUNINGS[heads.dim]

    def choose(longest: int, *given: object) -> object:
        asked.append(longest)
        assert prefill_hopper.can_attend(tuned, *given)  # type: ignore[arg-type]
        return tuned

    with patch.object(prefill_hopper, "choose", choose):
        error = cases.check_prefill(heads, CHUNKS, CUDA, dtype)
    assert len(asked) == 3  # of all chunks over the cache; then of first ones, and of continued
    return error


def check_logprobs(count: int) -> float:
    same, error = cases.check_logprobs(151936, count, CUDA, torch.float32)
    return error if same else 1.0


def check_repeats() -> float:
    """Whichever split arrives last merges in the same order: the same bits each time."""
    error = 0.0
    for rope in (False, True):
        call, _ = decode_call(SHAPES[0], 8, 1, splits=17, rope=rope)
        first = call().clone()
        found = [float((call() - first).abs().max()) for _ in range(50)]
        error = reduce(cases.largest, found, error)
    return error


def check_graph() -> float:
    """One captured launch serves other lengths, padding rows among them."""
    heads = Heads(32, 8, 128)
    cache = cases.Cache(heads, [700, 300, 65], CUDA, torch.bfloat16)
    q = torch.randn(3, 32, 128, device=CUDA, dtype=torch.bfloat16)
    scratch = cuda.decode_scratch(3, 32, 128, 9, CUDA)
    work = cases.decode_work(cache, [1, 1, 1], 9, scratch)
    out = torch.empty_like(q)

    def call() -> None:
        cuda.decode_attention(q, cache.view(), heads.rule_on(CUDA), work, out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    error = 0.0
    for now in ([700, 300, 65], [1, 0, 64], [0, 0, 0], [699, 299, 1]):
        work.lengths.copy_(cases.ints(now, CUDA))
        out.fill_(cases.NAN)
        graph.replay()
        for index, length in enumerate(now):
            right = torch.zeros(1, 32, 128, device=CUDA)
            if length:
                right = cases.expected_attention(q[index : index + 1], cache, index, length - 1)
            error = cases.largest(error, cases.worst(out[index : index + 1], right))
    return error


def worst_by_kind(passed: dict[str, float]) -> dict[str, float]:
    """Kernel and dtype → the largest error of its checks."""
    found: dict[str, float] = {}
    for name, error in passed.items():
        kind = " ".join(name.split()[:2])
        found[kind] = round_to(max(error, found.get(kind, 0.0)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time the choices instead")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--part", type=part, default=slice(None), help="2/3: the second of three")
    parser.add_argument("--limit-s", type=float, default=140.0)
    parser.add_argument("--out", type=Path, help="a file for the JSON too")
    args = parser.parse_args()
    report = Report(args.limit_s, args.part)
    device = torch.cuda.get_device_name()
    print(device, "torch", torch.__version__, "triton", triton.__version__)
    if not args.no_checks:
        check_all(report)
        print(f"{len(report.passed)} checks passed, {perf_counter() - report.begun:.0f} s")
    timed = sweep if args.sweep else time_all
    if not args.no_times:
        report.item(timed.__name__, lambda: timed(report))
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
    return tally(len(report.passed) + len(report.timings), len(report.failed))


if __name__ == "__main__":
    sys.exit(main())
