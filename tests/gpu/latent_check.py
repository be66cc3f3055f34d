"""The kernels of latent attention on a GPU: right in bf16, and how fast against what they must do.

    python -m tests.gpu.latent_check [--tune | --no-times | --no-checks] [--limit-s 200]

Sizes of DeepSeek-V2-Lite (16 heads) and V3 (128), and 32 and 64 heads as ranks have them. Outputs
are compared with plain attention in float64, then a small model's tokens with the reference's, in
graphs. Times are those of a CUDA graph over caches many times the L2, beside what the bytes of the
cache and the operations take at the rates of `report.py`. `--tune`: the decode kernel in several
tunings. Ends with a JSON line and how many passed; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from time import perf_counter
from typing import Any

import torch

from tests.equivalence.test_latent_matrix import latent_spec
from tests.gpu.cuda_check import QUICK_WAYS, compare_logprobs, compare_tokens
from tests.gpu.report import FLOPS, READ, replayed, round_to, tally
from tests.kernels import latent_cases as cases
from tests.kernels.cuda_cases import BOUNDS
from tests.kernels.latent_cases import V2_LITE, V3, Sizes
from twostroke.kernels import cuda
from twostroke.kernels.cuda import latent, latent_prefill
from twostroke.kernels.cuda.latent import LatentDecodeTuning
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork, StepContext

DEVICE, BF16, FP32 = torch.device("cuda"), torch.bfloat16, torch.float32
MINICPM3 = Sizes(40, 256, 32, 64, 64)
BATCHES, CONTEXTS = (1, 8, 32, 128), (1024, 8192, 32768)
CACHE_BYTES = 2 << 30  # that the rounds of one measurement go over, at the most
TUNINGS = {
    16: [
        LatentDecodeTuning(16, 64, True, 4, 2, 1),
        LatentDecodeTuning(16, 64, True, 8, 2, 1),
        LatentDecodeTuning(16, 32, False, 4, 3, 2),
        LatentDecodeTuning(16, 32, False, 4, 4, 1),
        LatentDecodeTuning(16, 32, False, 8, 3, 2),
        LatentDecodeTuning(64, 64, False, 8, 2, 1),
    ],
    128: [
        LatentDecodeTuning(64, 64, False, 8, 2, 1),
        LatentDecodeTuning(64, 32, False, 8, 3, 1),
        LatentDecodeTuning(64, 64, True, 8, 2, 1),
        LatentDecodeTuning(32, 64, True, 8, 2, 1),
        LatentDecodeTuning(16, 64, True, 4, 2, 1),
        LatentDecodeTuning(64, 32, False, 8, 2, 1),
    ],
}


class Results:
    def __init__(self) -> None:
        self.errors: dict[str, float] = {}
        self.wrong: list[str] = []
        self.num_passed = 0
        self.times: dict[str, Any] = {}

    def check(self, name: str, bound: float, case: Callable[[], float]) -> None:
        torch.manual_seed(len(name))
        try:
            self.errors[name] = round_to(case())
        except Exception as error:
            self.fail(f"{name}: {type(error).__name__}: {error}")
            return
        if self.errors[name] < bound:
            self.num_passed += 1
        else:
            self.fail(f"{name}: {self.errors[name]}, allowed {bound}")

    def fail(self, what: str) -> None:
        self.wrong.append(what[:400])
        print("WRONG", what, flush=True)


class Quiet(Results):
    """While kernels are compiled ahead and not launched: what is found means nothing."""

    def fail(self, what: str) -> None: ...


def check_kernels(results: Results) -> None:
    bound, lengths = BOUNDS[BF16], [1, 0, 63, 64, 65, 700, 1500]

    def decode(name: str, sizes: Sizes, *how: Any, dtype: torch.dtype = BF16) -> None:
        case = partial(cases.check_decode, sizes, lengths, *how[:1], DEVICE, dtype, *how[1:])
        # In fp32 products are three of tf32, and exponentials are approximate.
        results.check(f"decode {name} {how}", bound if dtype == BF16 else 1e-5, case)

    def prefill(name: str, sizes: Sizes, *chunks: tuple[int, int]) -> None:
        case = partial(cases.check_prefill, sizes, chunks, DEVICE, BF16)
        results.check(f"prefill {name} {chunks}", 2 * bound, case)

    for name, sizes in (("lite", V2_LITE), ("v3", V3)):
        for splits in (1, 7):
            decode(name, sizes, splits)
        prefill(name, sizes, (0, 300), (0, 1), (0, 129))
        prefill(name, sizes, (700, 200), (0, 65), (64, 64))
        case = partial(cases.check_rope_store, sizes, 9, BF16, DEVICE, BF16)
        results.check(f"store {name}", bound, case)
    decode("32 heads", replace(V3, num_heads=32), 7)
    lengths = [3, 0, 66, 700]
    decode("lite, 3 queries", V2_LITE, 4, 3)
    decode("v3, 3 queries", V3, 4, 3)
    decode("minicpm3", MINICPM3, 3)
    prefill("minicpm3", MINICPM3, (0, 200), (300, 40))
    decode("fp32", replace(V2_LITE, rank=128), 2, dtype=FP32)


def check_models(results: Results) -> None:
    """Small ones, in graphs, against the reference on the same card."""
    for name in ("latent", "mixed"):
        spec = latent_spec(name)
        tokens = compare_tokens(f"{name}, fp32", spec, DEVICE, QUICK_WAYS)
        for check in (tokens, compare_logprobs(f"{name}, bf16", spec, DEVICE)):
            try:
                for passed in check:
                    results.num_passed += 1
                    print("equal:", passed, flush=True)
            except Exception as error:
                results.fail(f"{name}: {type(error).__name__}: {error}")


def decode_calls(
    sizes: Sizes, batch: int, context: int, tuned: LatentDecodeTuning | None
) -> list[Callable[[], object]]:
    """The same step over caches of their own, in blocks of any order."""
    width, blocks = sizes.width, context // sizes.page
    each = batch * context * width * 2
    count = max(1, min(8, CACHE_BYTES // each))
    tables = (torch.randperm(batch * blocks) + 1).view(batch, blocks).to(DEVICE, torch.int32)
    q = torch.randn(batch, sizes.num_heads, sizes.rank, device=DEVICE, dtype=BF16)
    q_rope = torch.randn(batch, sizes.num_heads, sizes.rope, device=DEVICE, dtype=BF16)
    rows = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    lengths = torch.full_like(rows, context)
    splits = splits_of(sizes, batch, context, tuned)
    scratch = cuda.decode_scratch(batch, sizes.num_heads, sizes.rank, splits, DEVICE)
    work = DecodeWork(rows, lengths, 1, splits, scratch)
    out, calls = torch.empty_like(q), []
    for _ in range(count):
        keys = torch.empty(batch * blocks + 1, sizes.page, 1, width, device=DEVICE, dtype=BF16)
        keys.normal_()
        view = KVView(keys, keys, tables, rows)
        how = (AttentionRule(sizes.scale), work, StepContext(batch <= 64))
        calls.append(
            lambda view=view, how=how: latent.latent_decode_attention(
                q, q_rope, view, *how, out=out, tuned=tuned
            )
        )
    return calls


def splits_of(sizes: Sizes, batch: int, context: int, tuned: LatentDecodeTuning | None) -> int:
    given = (batch, sizes.num_heads, sizes.width, context, cuda.num_sms(DEVICE))
    if tuned is None:
        return latent.latent_decode_splits(*given)
    before = latent.tuning
    latent.tuning = lambda *_: tuned  # type: ignore[assignment]
    try:
        return latent.latent_decode_splits.__wrapped__(*given)
    finally:
        latent.tuning = before


def floors_us(sizes: Sizes, batch: int, context: int) -> tuple[float, float]:
    """Shares of the card's limits: of the cache's bytes and of the operations."""
    entries = batch * context
    flops = 2 * entries * sizes.num_heads * (2 * sizes.rank + sizes.rope)
    return 1e6 * entries * sizes.width * 2 / READ, 1e6 * flops / FLOPS


def time_decode(
    results: Results,
    name: str,
    sizes: Sizes,
    batch: int,
    context: int,
    tuned: LatentDecodeTuning | None = None,
) -> None:
    if batch * context > 1 << 20:  # as 2 ** 20 entries, and no quicker to measure
        return
    label = f"{name} {batch}x{context}" + (f" {astuple(tuned)}" if tuned else "")
    try:
        us = 1e6 * replayed(decode_calls(sizes, batch, context, tuned))
    except Exception as error:
        results.times[label] = f"{type(error).__name__}: {error}"[:200]
        print(label, results.times[label], flush=True)
        return
    read, flops = floors_us(sizes, batch, context)
    share = max(read, flops) / us
    figures = {"us": us, "read_us": read, "flops_us": flops, "of_floor": share}
    splits = splits_of(sizes, batch, context, tuned)
    results.times[label] = {key: round_to(value) for key, value in figures.items()}
    results.times[label]["splits"] = splits
    print(f"{label:48} {us:9.1f} µs, floor {max(read, flops):8.1f} {share:6.1%}", flush=True)
    torch.cuda.empty_cache()


def time_prefill(
    results: Results,
    name: str,
    sizes: Sizes,
    tuned: latent_prefill.LatentPrefillTuning | None = None,
) -> None:
    """A first chunk of 4,096 tokens, and 2,048 after 30,720 that are cached; expansion included."""
    for start, size in ((0, 4096), (30720, 2048)):
        end, heads = start + size, sizes.num_heads
        keys = torch.randn(end // 16 + 1, 16, 1, sizes.width, device=DEVICE, dtype=BF16)
        table = (torch.randperm(end // 16) + 1).view(1, -1).to(DEVICE, torch.int32)
        dim = sizes.nope + sizes.rope
        q = torch.randn(size, heads, dim, device=DEVICE, dtype=BF16)
        kv_b = torch.randn(heads, sizes.nope + sizes.value, sizes.rank, device=DEVICE, dtype=BF16)
        kv = torch.randn(size, sizes.width, device=DEVICE, dtype=BF16)
        out = torch.empty(size, heads, sizes.value, device=DEVICE, dtype=BF16)
        row, starts, ends = (
            torch.tensor(given, device=DEVICE, dtype=torch.int32)
            for given in ([0], [start], [0, size])
        )
        longest = (0, size) if start else (size, 0)
        work = PrefillWork(row, starts, ends, size, *longest, [(start, end)])
        where = (q, kv_b, KVView(keys, keys, table, row), AttentionRule(sizes.scale), work)

        def run(where: Any = where, kv: Any = kv, out: Any = out) -> None:
            latent_prefill.latent_prefill_attention(*where, out=out, chunk_kv=kv, tuned=tuned)

        label = f"prefill {name} {start}+{size}" + (f" {astuple(tuned)}" if tuned else "")
        try:
            us = 1e6 * replayed([run])
        except Exception as error:
            results.times[label] = f"{type(error).__name__}: {error}"[:200]
            print(label, results.times[label], flush=True)
            continue
        expansion = 2 * end * heads * (sizes.nope + sizes.value) * sizes.rank
        pairs = size * (size + 1) // 2 + size * start
        flops = expansion + 2 * pairs * heads * (dim + sizes.value)
        floor = 1e6 * flops / FLOPS
        results.times[label] = {"us": round_to(us), "flops_us": round_to(floor)}
        results.times[label]["of_floor"] = round_to(floor / us)
        print(f"{label:48} {us:9.1f} µs, floor {floor:8.1f} {floor / us:6.1%}", flush=True)
        torch.cuda.empty_cache()


def tuned_runs() -> Iterator[tuple[int, LatentDecodeTuning]]:
    for heads, tunings in TUNINGS.items():
        for tuned in tunings:
            yield heads, tuned


def compile_all(tune: bool) -> None:
    """As many at a time as there are cores, in place of one after another."""
    with suppress(Exception):  # what does not compile is told where it is launched
        if not tune:
            check_kernels(Quiet())
    runs = tuned_runs() if tune else [(heads, None) for heads in (16, 32, 64, 128)]
    for heads, tuned in runs:
        for batch in (1, 96):
            with suppress(Exception):
                decode_calls(replace(V3, num_heads=heads), batch, 1024, tuned)[0]()


def timings(results: Results, tune: bool) -> Iterator[Callable[[], None]]:
    if tune:
        for heads, tuned in tuned_runs():
            for batch, context in ((1, 32768), (32, 8192), (128, 1024)):
                sizes = replace(V3, num_heads=heads)
                yield partial(time_decode, results, str(heads), sizes, batch, context, tuned)
        for queries, keys, warps, stages in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
            tiles = latent_prefill.LatentPrefillTuning(queries, keys, warps, stages)
            yield partial(time_prefill, results, "v3", V3, tiles)
        return
    for name, sizes in (("lite", V2_LITE), ("v3", V3)):
        for batch, context in product(BATCHES, CONTEXTS):
            yield partial(time_decode, results, name, sizes, batch, context)
        yield partial(time_prefill, results, name, sizes)
    for heads in (32, 64):
        yield partial(
            time_decode, results, f"{heads} heads", replace(V3, num_heads=heads), 32, 8192
        )


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="times of other tunings, no checks")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--limit-s", type=float, default=200.0)
    args = parser.parse_args()
    begun, results = perf_counter(), Results()
    end = begun + args.limit_s
    torch.backends.cuda.matmul.allow_tf32 = False
    cuda.compile_ahead(lambda: compile_all(args.tune), ("latent_check", args.tune))
    print(f"compiled in {perf_counter() - begun:.1f} s", flush=True)
    if not args.tune and not args.no_checks:
        check_kernels(results)
        check_models(results)
        print(f"checked in {perf_counter() - begun:.1f} s", flush=True)
    for timing in [] if args.no_times else timings(results, args.tune):
        if perf_counter() > end:
            results.fail("no time left for all timings")
            break
        timing()
    took = round(perf_counter() - begun, 1)
    found = {"errors": results.errors, "times": results.times, "wrong": results.wrong}
    print(json.dumps({"check": "latent", "seconds": took, **found}))
    return tally(results.num_passed + len(results.times), len(results.wrong))


if __name__ == "__main__":
    sys.exit(main())
