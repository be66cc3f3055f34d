"""The workloads of `gpu.py`, each in a function, run in a process of its own.

    python -m bench.gpu_parts SHAPE PART[,PART…] [--quick] [--settings JSON]

Prints `RESULT {"part": …}` after each part, so that a part that dies does not take others with it.
The definitions are those that vLLM was measured by: dummy weights in bf16, prefix caching off,
temperature 0.6, wall clock of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter, time
from typing import Any

import torch

from twostroke import LLM, SamplingParams
from twostroke.request import EngineRequest

SHAPES = "bench/shapes"
NANO_IN, NANO_OUT = 142_827, 133_966


class Bench:
    """One engine and the parts that run on it."""

    def __init__(self, shape: str, quick: bool, settings: dict[str, Any]) -> None:
        self.quick = quick
        start = perf_counter()
        given: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 16384}
        given |= {"load_format": "dummy", "device": "cuda", "enable_prefix_caching": False}
        path = shape if shape.endswith(".json") else f"{SHAPES}/{shape}.json"
        self.llm = LLM(path, **(given | settings))
        wait()
        self.ready_s = perf_counter() - start
        self.core = self.llm.engine.core
        self._prompt_seed = 0
        print(f"{shape}: ready in {self.ready_s:.1f} s; {self.llm.engine.memory.waterfall()}")
        self.write([self.prompt(40)] * 2, 4)

    # ── help ────────────────────────────────────────────────────────────────────────────────

    def prompt(self, size: int) -> list[int]:
        self._prompt_seed += 1
        chosen = random.Random(self._prompt_seed)
        return [chosen.randint(0, 10000) for _ in range(size)]

    def write(self, prompts: Sequence[list[int]], outputs: int | Sequence[int]) -> float:
        """Seconds of one `generate`."""
        counts = [outputs] * len(prompts) if isinstance(outputs, int) else outputs
        params = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in counts
        ]
        wait()
        start = perf_counter()
        written = self.llm.generate(list(prompts), params, use_tqdm=False)
        taken = perf_counter() - start
        assert [len(one.outputs[0].token_ids) for one in written] == list(counts)
        return taken

    def set_budget(self, tokens: int) -> None:
        scheduler = self.core.scheduler
        scheduler.config = replace(scheduler.config, max_num_batched_tokens=tokens)

    def add(self, name: str, prompt: list[int], outputs: int) -> None:
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=outputs)
        request = EngineRequest(name, prompt, params, seed=1, received_s=0.0)
        self.core.add(request)

    def drain(self) -> None:
        for name in list(self.core.scheduler._requests):
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()

    def steps(self) -> dict[str, float]:
        """What the records say of the steps since the last call, by events on the device."""
        records = list(self.core.records.steps)
        self.core.records.steps.clear()
        busy = sum(s.device_s for s in records)
        idle = sum(s.host_gap_s for s in records[1:])  # before the first nobody had asked
        if not records:
            return {}
        pure = [s.device_s for s in records if not s.prefill.tokens]
        return {
            "steps": len(records),
            "decode_step_ms": 1e3 * statistics.median(pure) if pure else 0.0,
            "device_s": busy,
            "idle_s": idle,
            "idle_share": idle / max(busy + idle, 1e-9),
        }

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    def nano(self) -> list[dict[str, Any]]:
        """nano-vLLM's workload, by tokens in a step. All prompts are drawn before all lengths."""
        chosen = random.Random(0)
        prompts = [
            [chosen.randint(0, 10000) for _ in range(chosen.randint(100, 1024))] for _ in range(256)
        ]
        outputs = [chosen.randint(100, 1024) for _ in range(256)]
        assert (sum(map(len, prompts)), sum(outputs)) == (NANO_IN, NANO_OUT)
        found = []
        for budget in (8192,) if self.quick else (512, 1024, 2048, 4096, 8192, 16384):
            self.set_budget(budget)
            if not found:
                self.write([self.prompt(100)] * 256, 8)
            self.steps()
            taken = self.write(prompts, outputs)
            row = {"budget": budget, "seconds": taken, "tok_s": NANO_OUT / taken} | self.steps()
            print(f"  nano, budget {budget}: {row['tok_s']:,.0f} tok/s, {taken:.2f} s", row)
            found.append(row)
        return found

    def decode(self) -> list[dict[str, Any]]:
        """TPOT = (time for 129 tokens − time for 1) / 128, prompts of 1,024."""
        found = []
        for batch in (1, 32) if self.quick else (1, 8, 32, 128):
            times = []
            for _ in range(1 if self.quick else 3):
                prompts = [self.prompt(1024) for _ in range(batch)]
                one = self.write(prompts, 1)
                self.steps()
                times.append((self.write(prompts, 129) - one) / 128)
            row = {"batch": batch, "tpot_ms": 1e3 * statistics.median(times)} | self.steps()
            print(f"  decode, batch {batch}: TPOT {row['tpot_ms']:.3f} ms", row)
            found.append(row)
        return found

    def prefill(self) -> list[dict[str, Any]]:
        found = []
        for size in (1024, 4096):
            times = [self.write([self.prompt(size)], 1) for _ in range(3 if self.quick else 7)]
            device = self.core.records.steps[-1].device_s
            row = {"tokens": size, "ms": 1e3 * statistics.median(times), "device_ms": 1e3 * device}
            print(f"  prefill {size}: {row['ms']:.2f} ms, on the device {row['device_ms']:.2f}")
            found.append(row)
        return found

    def interference(self) -> list[dict[str, Any]]:
        """32 streams decode, a prompt of 32k tokens arrives."""
        found, length = [], 4096 if self.quick else 32_000
        for budget in (512, 2048, 8192):
            self.set_budget(budget)
            for n in range(32):
                self.add(f"s{n}", self.prompt(256), 7000)
            for _ in range(200):  # the streams' own prompts are done long before
                self.core.step()
            times: list[float] = []
            arrived = first = 0.0
            step = 0
            while step < 100 or not first:
                if step == 50:
                    self.add("long", self.prompt(length), 4)
                    arrived = perf_counter()
                updates = self.core.step()
                now = perf_counter()
                if any(update.request_id == "s0" for update in updates):
                    times.append(now)
                if not first and any(u.request_id == "long" and u.tokens for u in updates):
                    first = now
                step += 1
            gaps = [b - a for a, b in pairwise(times)]
            steady = statistics.median(gaps[:45])
            row = {
                "budget": budget,
                "steady_ms": 1e3 * steady,
                "worst_ms": 1e3 * max(gaps),
                "worst_over_steady": max(gaps) / steady,
                "long_ttft_s": first - arrived,
                "prompt": length,
            }
            print("  interference", row)
            found.append(row)
            self.drain()
        return found

    def mixed(self) -> dict[str, Any]:
        """64 streams decode beside a steady flow of 512-token chunks: how idle is the GPU?

        Kernel time by the profiler over some steps; wall clock over others, without it.
        """
        self.set_budget(64 + 512)
        for n in range(64):
            self.add(f"s{n}", self.prompt(256), 7000)
        count = [0]

        def turn(steps: int) -> float:
            start = perf_counter()
            for _ in range(steps):
                while self.core.scheduler.num_waiting < 2:
                    count[0] += 1
                    self.add(f"p{count[0]}", prompts[count[0] % 64], 1)
                self.core.step()
            wait()
            return (perf_counter() - start) / steps

        prompts = [self.prompt(4096) for _ in range(64)]
        turn(150)
        self.steps()
        wall = turn(50 if self.quick else 300)
        by_events = self.steps()
        busy = kernel_seconds(lambda: turn(50)) / 50
        self.drain()
        row = {
            "step_ms": 1e3 * wall,
            "kernels_ms": 1e3 * busy,
            "idle_share": 1 - busy / wall if busy else None,
            "between_steps": by_events.get("idle_share"),
        }
        print("  mixed", row)
        return row

    def profile(self) -> dict[str, Any]:
        """Which kernels a decode step and a prefill are made of."""
        found: dict[str, Any] = {}
        for batch in (1, 128):
            for n in range(batch):
                self.add(f"s{n}", self.prompt(1024), 500)
            for _ in range(40):
                self.core.step()
            found[f"decode {batch}"] = self._kernels(20)
            self.drain()
        prompts = [self.prompt(4096) for _ in range(4)]
        self.set_budget(4096)
        for n, prompt in enumerate(prompts):
            self.add(f"p{n}", prompt, 1)
        found["prefill 4096"] = self._kernels(4)
        self.drain()
        return found

    def _kernels(self, steps: int) -> dict[str, float]:
        def turn() -> None:
            for _ in range(steps):
                self.core.step()
            wait()

        totals: dict[str, float] = {}
        kernel_seconds(turn, totals)
        best = sorted(totals.items(), key=lambda item: -item[1])[:14]
        for name, seconds in best:
            print(f"    {1e3 * seconds / steps:8.3f} ms a step  {name[:90]}")
        return {name[:90]: 1e3 * seconds / steps for name, seconds in best}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernel_seconds(run: Callable[[], object], totals: dict[str, float] | None = None) -> float:
    """Time of all kernels and copies on the device while `run` runs; 0 if it cannot be told."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        run()
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    total = 0.0
    for event in found.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            seconds = 1e-6 * event.time_range.elapsed_us()
            total += seconds
            if totals is not None:
                totals[event.name] = totals.get(event.name, 0.0) + seconds
    return total


PARTS = ("nano", "decode", "prefill", "interference", "mixed", "profile", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("parts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    args = parser.parse_args()
    bench = Bench(args.shape, args.quick, json.loads(args.settings))
    first_token_at = time()  # `Bench` has written a few
    for part in args.parts.split(","):
        try:
            if part == "start":
                result: Any = {"first_token_at": first_token_at, "ready_s": bench.ready_s}
            else:
                result = getattr(bench, part)()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
            wait()  # if this raises, the device is lost, and so is this process
            bench.drain()
        bench.set_budget(8192)
        bench.core.records.steps.clear()
        line = {"part": part, "shape": args.shape, "result": result}
        print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
