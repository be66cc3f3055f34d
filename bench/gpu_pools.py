"""One prefill and one decode process on one GPU, KV by CUDA IPC, beside one engine that does both.

    python -m bench.gpu_pools [--shape llama-3.1-8b] [--limit-s 150] [--json FILE] [--quick]

Dummy weights, token ids in and out, no HTTP: times are those of the process that routes. Each
system is started alone, in this order, the next only if there is time for it:

    pools             one prefill engine (budget 8,192) and one decode engine, half the memory each
    budget 8192, 512  one engine without a bound on stalls
    pools, MPS        as pools, under NVIDIA's Multi-Process Service, where it can be started: the
                      kernels of two processes run beside each other, not in turns

On each: prompts alone (TTFT, and the gap to the second token, which is where a hand-over shows, and
what was fetched how fast), then 32 streams beside which 32,000 tokens arrive: their gaps before,
and until the long prompt's second token. Of two such runs the second counts. Ends with one JSON
line; with `--json`, or in the folder that OUT names, the file is written anew after every part.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from bench.gpu_workloads import SHAPES, Prompts
from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.outputs import RequestOutput
from twostroke.request import RequestOutputKind, SamplingParams
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine

STREAMS, STREAM_PROMPT, LONG = 32, 512, 32_000
ALONE = (1024, 8192, LONG)
STEADY_S, BEGUN_S = 1.0, monotonic()
PART_S = {"pools": 45.0, "budget 8192": 32.0, "budget 512": 32.0, "pools, MPS": 40.0}
CEILING = """
import torch
words = torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")
other, best = torch.empty_like(words), 1e9
for _ in range(6):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(); other.copy_(words); end.record(); end.synchronize()
    best = min(best, start.elapsed_time(end) / 1e3)
print((2 << 30) / best)
"""


class Bench:
    def __init__(self, engine: RoutedEngine | RemoteEngine, quick: bool) -> None:
        self.engine, self.prompt = engine, Prompts()
        self.long = 2000 if quick else LONG
        self.alone_sizes = (256, 2000) if quick else ALONE
        if isinstance(engine, RoutedEngine):  # every prompt is handed over, however short
            engine.requests.router._place_directly = lambda *_: None  # type: ignore[method-assign]

    async def write(self, size: int, tokens: int, times: list[float]) -> RequestOutput:
        """One stream; when its tokens came."""
        params = SamplingParams(
            temperature=0.6,
            seed=1,
            ignore_eos=True,
            max_tokens=tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        last = None
        async for output in self.engine.generate(self.prompt(size), params):
            last = output
            times.extend([monotonic()] * len(output.outputs[0].token_ids))
        assert last is not None
        return last

    async def alone(self, size: int) -> dict[str, Any]:
        rows = []
        for _ in range(3):
            times: list[float] = []
            start = monotonic()
            before = self.fetched()
            output = await self.write(size, 16, times)
            num_bytes, seconds = (b - a for a, b in zip(before, self.fetched(), strict=True))
            gaps = [1e3 * (b - a) for a, b in pairwise(times)]
            row = {
                "ttft_ms": 1e3 * (times[0] - start),
                "second_ms": gaps[0],
                "gap_ms": statistics.median(gaps[1:]),
            }
            if seconds:
                row |= {"fetched_bytes": num_bytes, "fetch_ms": 1e3 * seconds}
                row["bytes_per_s"] = num_bytes / seconds
            rows.append(row)
        found: dict[str, Any] = {
            name: statistics.median(row[name] for row in rows[1:]) for name in rows[-1]
        }
        return found | {"route": output.records[0].route}

    def fetched(self) -> tuple[float, float]:
        totals = [one.transfers for one in self.engine.engines_by_name().values() if one.transfers]
        return sum(one.num_bytes for one in totals), sum(one.seconds for one in totals)

    async def interference(self) -> dict[str, Any]:
        times: list[list[float]] = [[] for _ in range(STREAMS)]
        tasks = [asyncio.create_task(self.write(STREAM_PROMPT, 8000, one)) for one in times]
        try:
            while min(map(len, times)) < 50:
                await asyncio.sleep(0.01)
            begun = monotonic()
            await asyncio.sleep(STEADY_S)
            long: list[float] = []
            arrived = monotonic()
            output = await self.write(self.long, 8, long)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        steady = [gap for one in times for gap in gaps_within(one, begun, arrived)]
        until_first = [gap for one in times for gap in gaps_within(one, arrived, long[0])]
        beside = [gap for one in times for gap in gaps_within(one, arrived, long[1])]
        return {
            "steady_ms": 1e3 * statistics.median(steady),
            "steady_worst_ms": 1e3 * max(steady),
            "median_ms": 1e3 * statistics.median(beside),
            "p99_ms": 1e3 * sorted(beside)[int(0.99 * len(beside))],
            "worst_ms": 1e3 * max(beside),
            "worst_until_first_ms": 1e3 * max(until_first),
            "worst_over_steady": max(beside) / statistics.median(steady),
            "long_ttft_s": long[0] - arrived,
            "long_second_ms": 1e3 * (long[1] - long[0]),
            "tokens_beside": len(beside),
            "route": output.records[0].route,
        }

    async def run(self) -> dict[str, Any]:
        found: dict[str, Any] = {"alone": {}}
        await self.write(64, 8, [])
        for size in self.alone_sizes:
            found["alone"][str(size)] = await self.alone(size)
            progress(f"prompts of {size} alone: {json.dumps(found['alone'][str(size)])}")
        first = await self.interference()
        progress(f"beside a long prompt, first: {json.dumps(first)}")
        found["interference"] = await self.interference()
        found["first_worst_ms"] = first["worst_ms"]
        return found


def gaps_within(times: list[float], start: float, end: float) -> list[float]:
    """Those that end in that span, the one that it cuts off included: it may be the longest."""
    return [b - a for a, b in pairwise(times) if b >= start and a <= end]


def progress(text: str) -> None:
    print(f"[{monotonic() - BEGUN_S:6.1f} s] {text}", file=sys.stderr, flush=True)


def end_children_with_stacks() -> None:
    """End child processes that hang. They write their stacks to stderr, if PYTHONFAULTHANDLER is
    set in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                progress(f"process {folder.name} is ended; it was here:")
                os.kill(int(folder.name), signal.SIGABRT)


async def measure(name: str, shape: str, device: str, quick: bool) -> dict[str, Any]:
    common = EngineConfig(
        model=shape if shape.endswith(".json") else f"{SHAPES}/{shape}.json",
        load_format="dummy",
        device=device,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096 if quick else 40_960,
        max_num_seqs=64,
        gpu_memory_utilization=0.8,
        max_decode_stall=0,
        max_num_batched_tokens=512 if name == "budget 512" else 8192,
        kernels="auto" if device == "cuda" else "reference",
    )
    start = perf_counter()
    engine: RoutedEngine | RemoteEngine
    if name.startswith("pools"):
        settings = PoolSettings(prefill_engines=1, decode_engines=1)
        engine = await RoutedEngine.start(settings.engines(common), restart_limit=1)
    else:
        engine = await RemoteEngine.start(common, restart_limit=1)
    async with engine:
        ready_s = perf_counter() - start
        progress(f"{name}: ready in {ready_s:.1f} s")
        found = await Bench(engine, quick).run()
        each = {one: info.info for one, info in engine.engines_by_name().items()}
        kv_bytes = {one: info.kv_bytes for one, info in each.items()}
        if isinstance(engine, RoutedEngine):
            await engine.drain(10)
            await engine.audit()
    return {"ready_s": ready_s, "kv_bytes": kv_bytes} | found


@contextmanager
def multi_process_service() -> Iterator[bool]:
    """NVIDIA's service for the processes started meanwhile; False if it cannot be had."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(places)
        try:
            started = subprocess.run([control, "-d"], timeout=20, check=False)
            yield started.returncode == 0
        finally:
            subprocess.run([control], input=b"quit\n", timeout=20, check=False)
            for place in places:
                del os.environ[place]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--limit-s", type=float, default=150.0)
    parser.add_argument("--only", nargs="*", choices=tuple(PART_S))
    parser.add_argument("--quick", action="store_true", help="shorter prompts: to try it out")
    out = os.environ.get("OUT")
    parser.add_argument("--json", type=Path, default=Path(out) / "gpu_pools.json" if out else None)
    args = parser.parse_args()
    os.environ["PYTHONFAULTHANDLER"] = "1"
    begun, results = perf_counter(), {"bench": "gpu_pools", "shape": args.shape}

    def note(name: str, found: Any) -> None:
        results[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    if args.device == "cuda":
        run = [sys.executable, "-c", CEILING]
        ceiling = subprocess.run(run, capture_output=True, text=True, check=False)
        note("copy_bytes_per_s", float(ceiling.stdout) if ceiling.stdout else ceiling.stderr[-300:])
    for name, part_s in PART_S.items():
        left_s = args.limit_s - (perf_counter() - begun)
        if args.only and name not in args.only:
            continue
        if left_s < part_s:
            note(name, f"left out: {left_s:.0f} s were left")
            continue

        async def part(name: str = name, left_s: float = left_s) -> dict[str, Any]:
            try:
                async with asyncio.timeout(left_s):
                    return await measure(name, args.shape, args.device, args.quick)
            except TimeoutError:
                raise TimeoutError(f"not done after {left_s:.0f} s") from None

        faulthandler.dump_traceback_later(left_s)
        stacks = threading.Timer(max(1.0, left_s - 2), end_children_with_stacks)
        stacks.start()
        try:
            if "MPS" in name:
                with multi_process_service() as there:
                    note(name, asyncio.run(part()) if there else "not to be had here")
            else:
                note(name, asyncio.run(part()))
        except Exception as error:
            note(name, f"failed: {type(error).__name__}: {error}"[:1000])
        finally:
            stacks.cancel()
            faulthandler.cancel_dump_traceback_later()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
