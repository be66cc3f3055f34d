"""8-bit KV caches on a GPU: what is stored and read is right, and how fast attention is with it.

    python -m tests.gpu.kv_check [--tune] [--no-times] [--limit-s 90]

Decode attention of 8B heads is timed against the time that the bytes of its cache need, beside the
same in bf16. `--tune` times some tilings of the kernels. With $OUT set, times go to $OUT/kv.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

import torch
import triton

from tests.gpu.kernels_time import CUDA, SPREAD_BYTES, shuffled_tables
from tests.gpu.report import FLOPS, READ, Report, tally
from tests.kernels import cuda_cases as cases
from tests.kernels.cuda_cases import BOUNDS, Heads
from twostroke.kernels import cuda, kv_dtypes
from twostroke.kernels.cuda import decode, prefill
from twostroke.kernels.cuda.new_token import NewToken
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork, Rope
from twostroke.kv.block_layout import side_bytes

BF16 = torch.bfloat16
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NUM_HEADS, NUM_KV_HEADS, DIM, PAGE = 32, 8, 128, 16  # Llama-3.1-8B
RULE = AttentionRule(DIM**-0.5)
CHUNKS = [(0, 1), (0, 300), (129, 127), (1000, 33), (63, 65), (0, 64), (512, 512)]
LENGTHS = [1, 0, 63, 64, 65, 127, 129, 1000, 2049, 0, 16]


def name_of(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


# ── right ───────────────────────────────────────────────────────────────────────────────────


Check = tuple[str, float, Callable[[], float]]  # its name, what it may come to, and what does


def checks() -> Iterator[Check]:
    for kind in KINDS:
        yield from checks_of(kind, Heads(32, 8, 128, kv_dtype=kind), BF16)
        yield from checks_of(kind, Heads(8, 4, 256, window=70, softcap=5.0, kv_dtype=kind), BF16)
        name = f"{name_of(kind)} numbers past the type's end"
        yield name, 1e-6, lambda k=kind: check_large(k)
    for kind in (torch.float8_e4m3fn, torch.int8):
        yield from checks_of(kind, Heads(28, 4, 80, 5, kv_dtype=kind), BF16)
        yield from checks_of(kind, Heads(64, 8, 64, window=128, sinks=True, kv_dtype=kind), BF16)
        yield from checks_of(kind, Heads(9, 3, 32, kv_dtype=kind), torch.float16)


def checks_of(kind: torch.dtype, heads: Heads, dtype: torch.dtype) -> Iterator[Check]:
    name = f"{name_of(kind)} {name_of(dtype)} {heads.num_heads}/{heads.num_kv_heads}×{heads.dim}"
    name += f" page {heads.page} window {heads.window} softcap {heads.softcap}"
    name += " sinks" if heads.sinks else ""
    bound, half = BOUNDS[dtype], heads.dim // 2 if heads.dim == 128 else heads.dim // 4
    yield f"prefill {name}", bound, lambda: cases.check_prefill(heads, CHUNKS, CUDA, dtype)
    for splits, queries in ((7, 1), (7, 3)):
        lengths = [max(length, queries) if length else 0 for length in LENGTHS]
        yield (
            f"decode {name} splits {splits} queries {queries}",
            bound,
            partial(cases.check_decode, heads, lengths, splits, CUDA, dtype, queries),
        )
    many = LENGTHS * (-(-600 // (len(LENGTHS) * heads.num_kv_heads)))  # as many programs have it
    for norm, splits, lengths in ((None, 1, many), (dtype, 7, LENGTHS)):
        yield (
            f"decode+rope {name} splits {splits}, {len(lengths)} rows",
            bound,
            partial(cases.check_rope_decode, heads, half, norm, lengths, splits, CUDA, dtype),
        )
        yield (
            f"rope_store {name} norm {norm}",
            heads.bound(dtype),
            partial(cases.check_rope_store, heads, half, norm, 77, CUDA, dtype),
        )


def check_large(kind: torch.dtype) -> float:
    """Cut at the largest number of the type, and a head of zeros stays one."""
    cache = cases.Cache(Heads(1, 1, 64, kv_dtype=kind), [4], CUDA, BF16)
    qkv = torch.randn(4, 3 * 64, device=CUDA, dtype=BF16)
    qkv[0] *= 1e6
    qkv[1] = 0
    angles = torch.zeros(4, 32, device=CUDA)
    at = torch.arange(4, device=CUDA)
    right = [kv_dtypes.as_stored(part, kind) for part in qkv.view(4, 3, 64)[:, 1:].unbind(1)]
    out = cuda.rope_store(qkv, Rope(angles + 1, angles), at, cache.view(at))
    error = 0.0
    for side, cached in enumerate((cache.keys, cache.values)):
        found = cases.seen(cached)[0, :4, 0]
        if not bool(found.isfinite().all()):
            return cases.NAN
        error = cases.largest(error, float((found.to(BF16) - right[side]).abs().max()) / 1e6)
        error = cases.largest(error, float((out[:, 1 + side] - right[side]).abs().max()) / 1e6)
    return error


# ── fast ────────────────────────────────────────────────────────────────────────────────────


def layers_of(kind: torch.dtype, layers: int, blocks: int) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of layers of a pool, filled with something."""
    inner = (PAGE, NUM_KV_HEADS, DIM)
    if kind == torch.int8:
        size = side_bytes(*inner, 1, scaled=True)
        data = torch.randint(-127, 128, (blocks, layers, 2, size), device=CUDA, dtype=kind)
        parts = data[..., : math.prod(inner)].unflatten(-1, inner)
    else:
        parts = torch.empty((blocks, layers, 2, *inner), device=CUDA, dtype=kind)
        for block in parts.split(512):
            block.copy_(torch.randn(block.shape, device=CUDA, dtype=BF16))
    found = [tuple(parts[:, layer].unbind(1)) for layer in range(layers)]
    for cache in (side for sides in found for side in sides if kind == torch.int8):
        kv_dtypes.scales_of(cache).fill_(0.01)
    return found


def cache_bytes(kind: torch.dtype, tokens: int) -> int:
    """The bytes that the attention of one layer reads."""
    sides = side_bytes(PAGE, NUM_KV_HEADS, DIM, kind.itemsize, kind == torch.int8)
    return 2 * sides * tokens // PAGE


def decode_calls(
    kind: torch.dtype, batch: int, context: int, tuned: decode.DecodeTuning | None
) -> list[Callable[[], object]]:
    """With rope and store, as a decode step has it; one for each of some layers."""
    blocks = context // PAGE
    layers = max(1, -(-SPREAD_BYTES // cache_bytes(kind, batch * context)))
    caches, tables = layers_of(kind, layers, batch * blocks), shuffled_tables(batch, blocks)
    rows = torch.arange(batch, device=CUDA, dtype=torch.int32)
    lengths = torch.full_like(rows, context)
    splits = cuda.decode_splits(batch, NUM_KV_HEADS, 8192, cuda.num_sms(CUDA))
    scratch = cuda.decode_scratch(batch, NUM_HEADS, DIM, splits, CUDA)
    wide = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    qkv = torch.randn(batch, wide, device=CUDA, dtype=BF16)
    out = torch.empty(batch, NUM_HEADS, DIM, device=CUDA, dtype=BF16)
    angles, ends = torch.rand(context, DIM // 2, device=CUDA), lengths.long() - 1
    slots = tables[:, -1].long() * PAGE + PAGE - 1
    rope, work = Rope(angles, angles), DecodeWork(rows, lengths, 1, splits, scratch)
    turn = count()

    def call() -> None:
        view = KVView(*caches[next(turn) % layers], tables, slots)
        q, new = decode.heads_of_new(qkv, view), NewToken(rope, ends)
        decode.make_launch(q, view, RULE, work, out, new=new, tuned=tuned)()

    return [call] * layers


Timed = tuple[str, float, float, Callable[[], list[Callable[[], object]]]]


def time_decode(
    kind: torch.dtype, batch: int, context: int, tuned: decode.DecodeTuning | None = None
) -> Timed:
    name = f"decode {name_of(kind)} batch {batch} × {context}{f' {tuned}' if tuned else ''}"
    floor = cache_bytes(kind, batch * context)
    return name, floor, READ, lambda: decode_calls(kind, batch, context, tuned)


def time_prefill(
    kind: torch.dtype, size: int, start: int, tuned: prefill.PrefillTuning | None = None
) -> Timed:
    """A chunk of a prompt that has `start` tokens in the cache."""

    def calls() -> list[Callable[[], object]]:
        blocks = (start + size) // PAGE
        (cache,) = layers_of(kind, 1, blocks)
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        qkv = torch.randn(size, heads, DIM, device=CUDA, dtype=BF16)
        q, out = qkv[:, :NUM_HEADS], torch.empty(size, NUM_HEADS, DIM, device=CUDA, dtype=BF16)
        one = cases.ints([0], CUDA)
        ends = cases.ints([0, size], CUDA)
        view = KVView(*cache, shuffled_tables(1, blocks), one)
        longest = (0, size) if start else (size, 0)
        starts, spans = cases.ints([start], CUDA), [(start, start + size)]
        work = PrefillWork(one, starts, ends, size, *longest, spans)
        own = qkv[:, NUM_HEADS:]

        def call() -> None:  # a launch is of the stream where it was made
            for launch in prefill.make_launches(q, view, RULE, work, out, own, tuned):
                if launch is not None:
                    launch()

        return [call] * 2

    flops = 4 * NUM_HEADS * DIM * (size * start + size * size // 2)
    name = f"prefill {name_of(kind)} {size} after {start}{f' {tuned}' if tuned else ''}"
    return name, flops, FLOPS, calls


def time_store(kind: torch.dtype, tokens: int) -> Timed:
    heads = NUM_HEADS + 2 * NUM_KV_HEADS

    def calls() -> list[Callable[[], object]]:
        (cache,) = layers_of(kind, 1, tokens // PAGE)
        qkv = torch.randn(tokens, heads * DIM, device=CUDA, dtype=BF16)
        angles, at = torch.rand(tokens, DIM // 2, device=CUDA), torch.arange(tokens, device=CUDA)
        view = KVView(*cache, at, at)
        return [lambda: cuda.rope_store(qkv, Rope(angles, angles), at, view)] * 4

    moved = 2 * tokens * heads * DIM * 2 + cache_bytes(kind, tokens)
    return f"rope_store {name_of(kind)} {tokens}", moved, READ, calls


def all_times() -> Iterator[Timed]:
    for batch, context in ((128, 1024), (128, 4096), (32, 512), (8, 512), (16, 4096), (1, 4096)):
        for kind in (BF16, *KINDS):
            yield time_decode(kind, batch, context)
    for kind in (BF16, torch.float8_e4m3fn, torch.int8):
        for size, start in ((4096, 0), (2048, 4096)):
            yield time_prefill(kind, size, start)
        yield time_store(kind, 4096)


def tunings() -> Iterator[Timed]:
    for kind in (torch.float8_e4m3fn, torch.int8):
        for size in (
            (64, 2, 3),
            (64, 2, 4),
            (64, 4, 3),
            (64, 1, 3),
            (128, 2, 3),
            (128, 4, 3),
            (128, 4, 4),
        ):
            for batch, context in ((128, 1024), (128, 4096), (16, 4096), (32, 512), (8, 512)):
                yield time_decode(
                    kind, batch, context, decode.DecodeTuning(*size, min_tiles=128 // size[0])
                )
        for chosen in ((128, 64, 8, 4), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3)):
            yield time_prefill(kind, 2048, 4096, prefill.PrefillTuning(*chosen))


def compile_all(checked: Sequence[Check], timed: Sequence[Timed]) -> None:
    """Everything once, with launches that only compile: what is found then means nothing."""

    def run() -> None:
        for _, _, check in checked:
            with suppress(Exception):
                check()
        for _, _, _, calls in timed:
            with suppress(Exception):
                calls()[0]()

    names = [name for name, *_ in (*checked, *timed)]
    cuda.compile_ahead(run, ("kv_check", names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time tilings instead of all")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--limit-s", type=float, default=90.0)
    args = parser.parse_args()
    report = Report(args.limit_s)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    checked = [] if args.no_checks else list(checks())
    timed = [] if args.no_times else list(tunings() if args.tune else all_times())
    report.item("compiling", lambda: compile_all(checked, timed))
    print(f"compiled in {perf_counter() - report.begun:.0f} s", flush=True)
    for name, bound, check in checked:
        report.check(name, bound, check)
    for name, amount, rate, calls in timed:
        report.item(name, lambda n=name, a=amount, r=rate, c=calls: report.time(n, c(), a, r))
    for name, error in report.passed.items():
        print(f"ok {name}: {error:.1e}")
    for name, why in report.failed.items():
        print(f"FAILED {name}: {why}")
    if "OUT" in os.environ:
        result = {"us_share_rate": report.timings, "seconds": perf_counter() - report.begun}
        (Path(os.environ["OUT"]) / "kv.json").write_text(json.dumps(result, indent=1) + "\n")
    return tally(len(report.passed) + len(report.timings), len(report.failed))


if __name__ == "__main__":
    sys.exit(main())
