"""Prefill attention on a Hopper GPU: ways to run the kernel of `prefill_hopper.py`, beside the
Triton kernel and cuDNN.

    python -m bench.gpu_prefill_attention [--only NAME …] [--json FILE]

Each way is a process of its own: first all of them compile at the same time, then one after another
checks its results and takes its times. A way that fails, hangs or is wrong does not stop the
others. Times are medians; TFLOP/s count the products below the causal edge.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, Queue
from statistics import median
from threading import Thread
from time import monotonic
from typing import Any

COMPILE_S, RUN_S, TOTAL_S = 130.0, 30.0, 235.0  # limits of a way, and of all
DEFAULT: dict[str, Any] = {"keys": 128, "stages": 2}
# Ways to run the kernel, by name: what differs from DEFAULT.
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "no turns": {"in_turns": 0},
    "hardware turns": {"in_turns": 2},
    "late weights": {"hold": False},
    "late weights, hardware turns": {"hold": False, "in_turns": 2},
    "a tile a program": {"persistent": False},
    "3 stages": {"stages": 3},
    "larger producer": {"consumer_registers": 232, "producer_registers": 40},
    "64 keys": {"keys": 64, "stages": 4},
    "3 consumers": {
        "keys": 64,
        "stages": 4,
        "consumers": 3,
        "consumer_registers": 160,
        "producer_registers": 24,
    },
}
LIBRARIES = ("Triton", "cuDNN")
# Of other head sizes.
OTHER_DIMS: dict[str, tuple[int, dict[str, Any]]] = {
    "dim 64": (64, {"keys": 128, "stages": 4}),
    "dim 64, hardware turns": (64, {"keys": 128, "stages": 4, "in_turns": 2}),
    "dim 64, 3 consumers": (
        64,
        {"stages": 4, "consumers": 3, "consumer_registers": 160, "producer_registers": 24},
    ),
    "dim 64, Triton": (64, {}),
    "dim 256": (256, {"keys": 64, "stages": 2}),
    "dim 256, Triton": (256, {}),
}
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
    Workload(1, 1024),
    Workload(1, 2048),
    Workload(1, 4096),
    Workload(1, 16384),
    Workload(1, 32768),
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
    dim, given = OTHER_DIMS.get(name, (128, WAYS.get(name, {})))
    is_triton = name.endswith("Triton")
    tuned = replace(prefill_hopper.HopperTuning(**DEFAULT), **given)

    def choose(_: int, q: Any, kv: Any, own: Any) -> Any:
        fits = kv.keys.dtype == q.dtype and tuned.keys % kv.keys.shape[1] == 0
        if is_triton or q.shape[2] != dim or (own is None and not fits) or q.itemsize != 2:
            return None
        return tuned

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
    for work in WORKLOADS:
        if work.start and name == "cuDNN":
            continue
        make = _cudnn if name == "cuDNN" else _call
        call = make(work, plain.num_heads, plain.num_kv_heads, dim, prefill)
        result["times"][work.name] = _measure(call)
        print(json.dumps(result), flush=True)


def _call(
    work: Workload, num_heads: int, num_kv_heads: int, dim: int, prefill: Any
) -> Callable[[], object]:
    import torch

    from twostroke.kernels.records import AttentionRule, KVView, PrefillWork

    device, page, bf16 = torch.device("cuda"), 16, torch.bfloat16
    blocks = -(-(work.start + work.size) // page)
    used = work.chunks * blocks if work.start else 1
    pool = torch.randn(used, 2, page, num_kv_heads, dim, device=device, dtype=bf16)
    tables = torch.randperm(used, device=device).int()
    tables = tables.view(work.chunks, -1) if work.start else tables.expand(work.chunks, 1).clone()
    tokens = work.chunks * work.size
    wide = num_heads + 2 * num_kv_heads
    qkv = torch.randn(tokens, wide, dim, device=device, dtype=bf16)
    out = torch.empty_like(qkv[:, :num_heads])
    rows = torch.arange(work.chunks, device=device, dtype=torch.int32)
    starts = torch.full_like(rows, work.start)
    ends = torch.arange(work.chunks + 1, device=device, dtype=torch.int32) * work.size
    longest = (0, work.size) if work.start else (work.size, 0)
    spans = [(work.start, work.start + work.size)] * work.chunks
    step = PrefillWork(rows, starts, ends, tokens, *longest, spans)
    keys, values = pool[:, 0], pool[:, 1]
    rule, view = AttentionRule(dim**-0.5), KVView(keys, values, tables, rows)
    q, own = qkv[:, :num_heads], qkv[:, num_heads:]
    launches = [
        launch
        for launch in prefill.make_launches(q, view, rule, step, out, own)
        if launch is not None
    ]

    def call() -> None:
        for launch in launches:
            launch()

    return call


def _cudnn(
    work: Workload, num_heads: int, num_kv_heads: int, dim: int, _: Any
) -> Callable[[], object]:
    import torch
    import torch.nn.functional as F

    bf16 = torch.bfloat16
    sizes = [(work.chunks, heads, work.size, dim) for heads in (num_heads, *[num_kv_heads] * 2)]
    q, k, v = (torch.randn(size, device="cuda", dtype=bf16) for size in sizes)

    def call() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def _measure(call: Callable[[], object]) -> float:
    """Return the median seconds of a call, one behind another."""
    import torch

    def timed(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    timed(2)
    count = max(2, min(50, int(0.05 / timed(1))))
    return median(timed(count) for _ in range(5))


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
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way is not None:
        run_way(args.way, args.checks_only)
        return
    names = args.only or [*LIBRARIES, *WAYS, FEATURES, *OTHER_DIMS]
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
        dim, _ = OTHER_DIMS.get(way.name, (128, {}))
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
