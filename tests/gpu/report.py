"""A report of the correctness and speed of products on a GPU, item by item."""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType

import torch
import torch.nn.functional as F

from tests.kernels.cuda_cases import BOUNDS, worst

Tiles = dict[str, tuple[int, ...]]  # of a kernel's table

READ, COPY, FLOPS = 3.99e12, 4.16e12, 783e12  # the card's ceilings, from the ledger


@dataclass
class Report:
    limit_s: float
    part: slice = field(default_factory=lambda: slice(None))  # of the checks
    begun: float = field(default_factory=perf_counter)
    passed: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    timings: dict[str, list[float]] = field(default_factory=dict)  # µs, of the floor, T a second
    first_calls_s: float = 0.0  # compiling, mostly
    num_checks: int = 0  # those of all parts

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
        number, self.num_checks = self.num_checks, self.num_checks + 1
        if number not in range(number + 1)[self.part]:
            return

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


def part(text: str) -> slice:
    """ "2/4": every fourth, from the second."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write 1/4 to 4/4, for instance")
    return slice(int(number) - 1, None, int(count))


def tally(passed: int, failed: int) -> int:
    """The last line of every check, which `python -m tests.gpu` reads; returns the exit status."""
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


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

    return replay_s(graph, 0.01, 5) / len(calls)


def replay_s(graph: torch.cuda.CUDAGraph, budget_s: float, times: int) -> float:
    """Seconds of one replay: the median of so many measurements, each of about `budget_s`."""

    def measure(rounds: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(rounds):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / rounds

    rounds = max(1, min(50, int(budget_s / measure(1))))
    return median(measure(rounds) for _ in range(times))


def is_right(way: object, found: torch.Tensor, product: torch.Tensor, gated: bool) -> bool:
    """Return whether a way of computing a product gave the product in bf16; print it if not."""
    if gated:
        gate, up = product.chunk(2, dim=1)
        product = F.silu(gate) * up
    error, bound = worst(found, product), 2 * BOUNDS[torch.bfloat16]
    if not error < bound:
        print(f"WRONG {way}: {error:.2e}")
    return error < bound


def write_table(module: ModuleType, found: Tiles) -> None:
    """Over what a kernel's table of tiles has, in place and to $OUT."""
    module.TILES.update(found)
    path = Path(str(module.__file__))
    before, _ = path.read_text(encoding="utf-8").split("TILES:")
    entries = sorted(module.TILES.items())
    lines = "".join(f"    {json.dumps(key, ensure_ascii=False)}: {way},\n" for key, way in entries)
    table = f"{{\n{lines}}}" if lines else "{}"
    text = f"{before}TILES: dict[str, tuple[int, ...]] = {table}\n"
    for place in (path, *(Path(os.environ[n], path.name) for n in ("OUT",) if n in os.environ)):
        place.write_text(text, encoding="utf-8")
