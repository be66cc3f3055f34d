"""Prefill attention on a Hopper GPU: ways to run the kernel of `prefill_hopper.py`, beside the
Triton kernel and cuDNN.

    python -m bench.gpu_prefill_attention [--only NAME …] [--json FILE]
    python -m bench.gpu_prefill_attention --memcheck
    python -m bench.gpu_prefill_attention --model llama-3.1-8b

Each way is a process of its own: first all of them compile at the same time, then one after another
checks its results and takes its times. A way that fails, hangs or is wrong does not stop the
others. Times are medians, of launches in a graph; TFLOP/s count the products below the causal edge.

`--memcheck` runs small chunks under compute-sanitizer, every tensor in an allocation of its own.
`--model` measures prefill of a whole model, without and with this kernel, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from queue import Empty, Queue
from shutil import which
from statistics import median
from subprocess import STDOUT
from tempfile import TemporaryFile
from threading import Thread
from time import monotonic
from typing import Any

COMPILE_S, RUN_S, TOTAL_S = 90.0, 30.0, 150.0  # limits of a way, and of all
MEMCHECK_S = 40.0
# Ways to run the kernel, by name: the head size, and what differs from its tuning.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (128, {}),
    "3 stages": (128, {"stages": 3}),
    "3 consumers": (
        128,
        {"keys": 64, "stages": 4, "consumers": 3, "consumer_registers": 160},
    ),
    "dim 64": (64, {}),
    "dim 64, 2 consumers": (64, {"consumers": 2, "consumer_registers": 240}),
    "dim 256": (256, {}),
}
LIBRARIES = {"Triton": 128, "dim 64, Triton": 64, "dim 256, Triton": 256, "cuDNN": 128}
FEATURES = "features"


@dataclass(frozen=True)
class Workload:
    chunks: int
    size: int
    start: int = 0

    @property
    def name(self) -> str:
        several = f"{self.chunks} × " if self.chunks > 1 else ""
        return f"{several}{self.size}" + (f" after {self.start}" if self.start else "")


WORKLOADS = [
    Workload(1, 256),
    Workload(1, 512),
    Workload(1, 1024),
    Workload(1, 2048),
    Workload(1, 4096),
    Workload(1, 16384),
    Workload(1, 32768),
    Workload(8, 512),
    Workload(8, 2048),
    Workload(1, 2048, 30000),
    Workload(1, 8192, 30000),
]


def flops(work: Workload, num_heads: int, dim: int) -> float:
    return 4 * num_heads * dim * work.chunks * work.size * (work.start + work.size / 2)


# ── a way, in its process ───────────────────────────────────────────────────────────────────


def run_way(name: str, checks_only: bool) -> None:
    """Compile, print READY, wait for a line, check and measure; print a line of JSON."""
    import torch

    from tests.kernels import cuda_cases as cases
    from tests.kernels.cuda_cases import Heads
    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import prefill, prefill_hopper

    device = torch.device("cuda")
    torch.manual_seed(1)
    dim, given = WAYS.get(name, (LIBRARIES.get(name, 128), {}))
    is_triton = name.endswith("Triton")
    tuned = replace(prefill_hopper.TUNINGS[dim], **given)

    def choose(_: int, q: Any, kv: Any, own: Any) -> Any:
        fits = prefill_hopper.can_attend(tuned, q, kv, own)
        return tuned if fits and not is_triton and q.shape[2] == dim else None

    prefill_hopper.choose = choose  # type: ignore[assignment]
    plain = Heads(32, 8, dim) if dim < 256 else Heads(16, 8, dim)
    heads = [plain]
    if name == FEATURES:
        heads = [
            Heads(32, 8, 128, window=100),
            Heads(8, 2, 128, softcap=5.0),
            Heads(8, 4, 128, window=70, softcap=5.0),
            Heads(16, 2, 128, sinks=True),
            Heads(64, 8, 128, window=128, sinks=True),
            Heads(28, 4, 128, 32),
            Heads(8, 8, 128, 64),
        ]
    chunks = [(0, 1), (0, 300), (129, 127), (1000, 33), (63, 65), (0, 64), (512, 512), (0, 700)]
    dtypes = [torch.bfloat16, torch.float16] if name == FEATURES else [torch.bfloat16]

    def check(compile_only: bool) -> dict[str, float]:
        found = {}
        for each in heads:
            for dtype in dtypes[: 2 if each is heads[0] else 1]:
                these = chunks[:3] if compile_only else chunks
                key = f"{each.num_heads}/{each.num_kv_heads} window {each.window}"
                key += f" softcap {each.softcap} sinks {each.sinks} page {each.page} {dtype}"
                torch.manual_seed(1)
                found[key] = cases.check_prefill(each, these, device, dtype)
        return found

    if name != "cuDNN":
        cuda.compile_ahead(lambda: check(True), ("bench", name))
    print("READY", flush=True)
    if not sys.stdin.readline():
        return
    errors: dict[str, float] = {}
    if name != "cuDNN":
        errors = check(False)
        again = check(False)
        if str(again) != str(errors):
            print(json.dumps({"differs": [errors, again]}), file=sys.stderr)
    result: dict[str, Any] = {"errors": errors, "times": {}}
    print(json.dumps(result), flush=True)
    if name == FEATURES or checks_only:
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for work in WORKLOADS:
            if work.start and name == "cuDNN":
                continue
            if name == "cuDNN":
                call = _cudnn(work, plain.num_heads, plain.num_kv_heads, dim)
            else:
                step = _Step(work, plain.num_heads, plain.num_kv_heads, dim)
                call = step.launches()
                if not is_triton:  # at this size
                    call()
                    found = step.out.clone()
                    step.launches(prefill.tuning(dim, 2, first=not work.start))()
                    result["errors"][work.name] = cases.worst(found, step.out)
                    del found
            result["times"][work.name] = _measure(call, stream)
            print(json.dumps(result), flush=True)


class _Step:
    """A step of such chunks, with random queries, keys and values."""

    def __init__(self, work: Workload, num_heads: int, num_kv_heads: int, dim: int) -> None:
        import torch

        from twostroke.kernels.records import AttentionRule, KVView, PrefillWork

        device, page, bf16 = torch.device("cuda"), 16, torch.bfloat16
        blocks = -(-(work.start + work.size) // page)
        used = work.chunks * blocks if work.start else 1
        pool = torch.randn(used, 2, page, num_kv_heads, dim, device=device, dtype=bf16)
        order = torch.randperm(used, device=device).int()
        tables = order.view(work.chunks, -1) if work.start else order.repeat(work.chunks, 1)
        tokens = work.chunks * work.size
        wide = num_heads + 2 * num_kv_heads
        qkv = torch.randn(tokens, wide, dim, device=device, dtype=bf16)
        self.q, self.own = qkv[:, :num_heads], qkv[:, num_heads:]
        self.out = torch.empty_like(self.q)
        rows = torch.arange(work.chunks, device=device, dtype=torch.int32)
        starts = torch.full_like(rows, work.start)
        ends = torch.arange(work.chunks + 1, device=device, dtype=torch.int32) * work.size
        longest = (0, work.size) if work.start else (work.size, 0)
        spans = [(work.start, work.start + work.size)] * work.chunks
        self.work = PrefillWork(rows, starts, ends, tokens, *longest, spans)
        self.rule = AttentionRule(dim**-0.5)
        self.view = KVView(pool[:, 0], pool[:, 1], tables, rows)

    def launches(self, tuned: Any = None) -> Callable[[], object]:
        """`tuned`: of the Triton kernel, which then computes all."""
        from twostroke.kernels.cuda import prefill

        given = (self.q, self.view, self.rule, self.work, self.out, self.own)
        made = [launch for launch in prefill.make_launches(*given, tuned) if launch is not None]

        def call() -> None:
            for launch in made:
                launch()

        return call


def _cudnn(work: Workload, num_heads: int, num_kv_heads: int, dim: int) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    bf16 = torch.bfloat16
    sizes = [(work.chunks, heads, work.size, dim) for heads in (num_heads, *[num_kv_heads] * 2)]
    q, k, v = (torch.randn(size, device="cuda", dtype=bf16) for size in sizes)

    def call() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def _measure(call: Callable[[], object], stream: Any) -> float:
    """Return the median seconds of a call, one behind another, without what launches cost the
    host."""
    import torch

    def timed(run: Callable[[], object], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    call()
    timed(call, 1)
    count = max(2, min(50, int(0.03 / timed(call, 1))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    timed(graph.replay, count)
    return median(timed(graph.replay, count) for _ in range(5))


# ── under compute-sanitizer ─────────────────────────────────────────────────────────────────


SMALL = (Workload(3, 300), Workload(1, 256, 3840))


def run_small() -> None:
    import torch

    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import prefill_hopper

    prefill_hopper.choose = lambda *_: prefill_hopper.TUNINGS[128]
    steps = {work.name: _Step(work, 32, 8, 128) for work in SMALL}
    calls = {name: step.launches() for name, step in steps.items()}
    cuda.compile_ahead(lambda: [call() for call in calls.values()], "small")
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        print(f"{name}: {'finite' if steps[name].out.isfinite().all() else 'NOT FINITE'}")


def memcheck() -> None:
    """Print what compute-sanitizer finds, the first lines of it."""
    tool = which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    how = ["--tool", "memcheck", "--target-processes", "application-only"]
    command = [tool, *how, sys.executable, "-m", "bench.gpu_prefill_attention", "--small"]
    given = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = monotonic()
    with TemporaryFile("w+") as said:
        try:
            subprocess.run(command, env=given, stdout=said, stderr=STDOUT, timeout=MEMCHECK_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(error)
        said.seek(0)
        lines = said.read().splitlines()
    print(*lines[:40], *lines[40:][-2:], sep="\n")
    print(f"memcheck: {len(lines)} lines, {monotonic() - begun:.0f} s")


# ── a whole model ───────────────────────────────────────────────────────────────────────────


def run_model(shape: str, path: Path | None) -> None:
    """Milliseconds of the device for a prompt: of the Triton kernel, of this one for first chunks,
    and for continued ones too. Steps have up to 16,640 tokens, so a longer prompt has both."""
    from bench.gpu_parts import Bench
    from twostroke.kernels.cuda import prefill_hopper

    usual = prefill_hopper.choose

    def only_first(longest: int, q: Any, kv: Any, own: Any) -> Any:
        return None if own is None else usual(longest, q, kv, own)

    ways = {"Triton": lambda *_: None, "first chunks": only_first, "pages too": usual}
    bench = Bench(shape, True, {"max_model_len": 33000})
    found: dict[str, dict[str, float]] = {}
    for size in (4096, 16384, 32768):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn, (name, choose) in product(range(4), ways.items()):
            prefill_hopper.choose = choose
            bench.core.records.steps.clear()
            bench.write([bench.prompt(size)], 1)
            if turn:
                taken = sum(step.device_s for step in bench.core.records.steps)
                times[name].append(1e3 * taken)
        found[str(size)] = {name: median(each) for name, each in times.items()}
        row = (f"{name} {median(each):.2f} ({min(each):.2f})" for name, each in times.items())
        print(f"{shape}, prefill of {size}, ms (the least): {', '.join(row)}", flush=True)
        if path is not None:
            path.write_text(json.dumps({shape: found}, indent=1), encoding="utf-8")


# ── all ways ────────────────────────────────────────────────────────────────────────────────


class Way:
    def __init__(self, name: str, checks_only: bool) -> None:
        self.name, self.lines, self.result = name, Queue[str](), dict[str, Any]()
        command = [sys.executable, "-m", "bench.gpu_prefill_attention", "--way", name]
        self.process = subprocess.Popen(
            command + ["--checks-only"] * checks_only,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        Thread(target=self._read, daemon=True).start()
        Thread(target=self._read_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put("END")

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def _until(self, end: float) -> Iterator[str]:
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - monotonic()))
            except Empty:
                self.process.kill()
                self.result["failed"] = "time limit"
                return
            if line == "END":
                if self.process.wait() != 0:
                    self.result["failed"] = "".join(self.errors)[-2000:]
                elif self.errors:
                    self.result["stderr"] = "".join(self.errors)[-2000:]
                return
            yield line

    def compile(self, end: float) -> bool:
        return any(line == "READY" for line in self._until(end))

    def run(self, end: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.close()
        for line in self._until(min(monotonic() + RUN_S, end)):
            if line.startswith("{"):
                self.result |= json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of ways")
    parser.add_argument("--checks-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memcheck", action="store_true", help="only this")
    parser.add_argument("--model", metavar="SHAPE", help="only this")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        run_way(args.way, args.checks_only)
        return
    if args.small:
        run_small()
        return
    if args.memcheck:
        memcheck()
        return
    if args.model is not None:
        run_model(args.model, args.json)
        return
    names = args.only or [*WAYS, FEATURES, *LIBRARIES]
    begun = monotonic()
    ways = [Way(name, args.checks_only) for name in names]
    ready = [way for way in ways if way.compile(begun + COMPILE_S)]
    print(f"compiled {len(ready)} of {len(ways)}: {monotonic() - begun:.0f} s", flush=True)
    for way in ready:
        way.run(begun + TOTAL_S)
        if args.json is not None:
            found = {each.name: each.result for each in ways}
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{monotonic() - begun:.0f} s")
    for way in ways:
        if "failed" in way.result:
            print(f"FAILED {way.name}: {way.result['failed'][-700:]}")
        if "stderr" in way.result:
            print(f"{way.name} says: {way.result['stderr'][-500:]}")
    print("TFLOP/s".ljust(30), *(work.name.rjust(16) for work in WORKLOADS), "   error")
    for way in ways:
        dim, _ = WAYS.get(way.name, (LIBRARIES.get(way.name, 128), {}))
        times = way.result.get("times", {})
        cells = []
        for work in WORKLOADS:
            found = times.get(work.name)
            count = flops(work, 32 if dim < 256 else 16, dim)
            cells.append(f"{count / found / 1e12:.0f} {found * 1e3:.3f}" if found else "-")
        errors = way.result.get("errors", {})
        worst = max(errors.values(), key=lambda e: (e != e, e), default=-1.0)
        print(way.name.ljust(30), *(cell.rjust(16) for cell in cells), f"{worst:10.1e}")
    print("(each TFLOP/s and milliseconds)")


if __name__ == "__main__":
    main()
