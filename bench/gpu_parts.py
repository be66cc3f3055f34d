"""The workloads of `gpu.py`, each in a function, run in a process of its own.

    python -m bench.gpu_parts SHAPE PART[,PART…] [--quick] [--settings JSON] [--budgets N,…]

Prints `RESULT {"part": …}` after each part, so that a part that dies does not take others with it.
What prefill, TPOT and nano-vLLM's workload are is in `gpu_workloads.py`; vLLM is measured by the
same definitions (`peers/vllm_gpu.py`).
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter, time
from typing import Any

import torch

from bench.gpu_workloads import (
    BATCHES,
    DECODE_PROMPT,
    DECODE_RUNS,
    DECODE_TOKENS,
    LONG_SIZES,
    MAX_MODEL_LEN,
    NANO_OUT,
    PREFILL_RUNS,
    PREFILL_SIZES,
    RETURN_SIZES,
    SHAPES,
    TEMPERATURE,
    Prompts,
    nano_workload,
)
from twostroke import LLM, SamplingParams
from twostroke.request import EngineRequest
from twostroke.sched.slo import Pacer
from twostroke.sched.work import AttentionWork


class Bench:
    """One engine and the parts that run on it."""

    def __init__(
        self, shape: str, quick: bool, settings: dict[str, Any], budgets: Sequence[int] = ()
    ) -> None:
        self.quick = quick
        self.budgets = budgets or ((8192,) if quick else (512, 1024, 2048, 4096, 8192, 16384))
        start = perf_counter()
        # 16 prompts of 1,024 and a slot for each request that writes already: without the latter
        # the end of a prompt is left over for one more step.
        given: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": 16384 + 256,
        }
        given |= {"device": "cuda", "enable_prefix_caching": False}
        if not shape.endswith(".gguf"):
            given |= {"load_format": "dummy"}
        path = shape if shape.endswith((".json", ".gguf")) else f"{SHAPES}/{shape}.json"
        self.llm = LLM(path, **(given | settings))
        wait()
        self.ready_s = perf_counter() - start
        self.core = self.llm.engine.core
        self.own_budget = self.core.scheduler.config.max_num_batched_tokens
        self.prompt = Prompts()
        print(f"{shape}: ready in {self.ready_s:.1f} s; {self.llm.engine.memory.waterfall()}")
        self.write([self.prompt(40)] * 2, 4)

    # ── help ────────────────────────────────────────────────────────────────────────────────

    def write(self, prompts: Sequence[list[int]], outputs: int | Sequence[int]) -> float:
        """Seconds of one `generate`."""
        counts = [outputs] * len(prompts) if isinstance(outputs, int) else outputs
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False)
            for n in counts
        ]
        wait()
        start = perf_counter()
        written = self.llm.generate(list(prompts), params, use_tqdm=False)
        taken = perf_counter() - start
        assert [len(one.outputs[0].token_ids) for one in written] == list(counts)
        return taken

    def set_budget(self, tokens: int, stall: float | None = None) -> None:
        scheduler = self.core.scheduler
        scheduler.config = replace(
            scheduler.config, max_num_batched_tokens=tokens, max_decode_stall=stall
        )
        pacer = Pacer(scheduler.config, AttentionWork(scheduler.config.groups))
        scheduler.pacer = scheduler._prefill._pacer = pacer

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
        """Return figures of the steps since the last call, from device events in their records."""
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
        """nano-vLLM's workload, by tokens in a step."""
        prompts, outputs = nano_workload()
        found: list[dict[str, Any]] = []
        for budget in self.budgets:
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
        found = []
        for batch in (1, 32) if self.quick else BATCHES:
            times = []
            for _ in range(1 if self.quick else DECODE_RUNS):
                prompts = [self.prompt(DECODE_PROMPT) for _ in range(batch)]
                one = self.write(prompts, 1)
                self.steps()
                taken = self.write(prompts, DECODE_TOKENS) - one
                times.append(taken / (DECODE_TOKENS - 1))
            row = {"batch": batch, "tpot_ms": 1e3 * statistics.median(times)} | self.steps()
            print(f"  decode, batch {batch}: TPOT {row['tpot_ms']:.3f} ms", row)
            found.append(row)
        return found

    def prefill(self) -> list[dict[str, Any]]:
        """Wall clock of one token, and of the same runs what the device was at work for."""
        runs = 3 if self.quick else PREFILL_RUNS
        return [self._first_token(size, runs) for size in PREFILL_SIZES]

    def long(self) -> list[dict[str, Any]]:
        """Long prompts; then one whose prefix is cached, if the settings enable prefix caching."""
        longest = self.core.scheduler.config.max_model_len - 2
        sizes = [size for size in LONG_SIZES if size <= longest]
        found = [self._first_token(size, 3) for size in sizes]
        if self.core.scheduler.config.prefix_caching:
            for size in (size for size in RETURN_SIZES if size <= longest):
                found.append(self._first_token(size, PREFILL_RUNS, self.prompt(size)))
        return found

    def _first_token(self, size: int, runs: int, cached: list[int] | None = None) -> dict[str, Any]:
        """Time prompts of `size` tokens. `cached`: time this prompt, whose prefix is cached."""
        walls, devices = [], []
        self.write([cached or self.prompt(size)], 1)
        for _ in range(runs):
            self.core.records.steps.clear()
            walls.append(1e3 * self.write([cached or self.prompt(size)], 1))
            devices.append(1e3 * sum(step.device_s for step in self.core.records.steps))
        rest = [wall - device for wall, device in zip(walls, devices, strict=True)]
        row = {
            "tokens": size,
            "cached": cached is not None,
            "ms": statistics.median(walls),
            "device_ms": statistics.median(devices),
            "host_ms": statistics.median(rest),
            "walls_ms": walls,
        }
        name = f"prefill {size}" + (" cached" if cached else "")
        print(
            f"  {name}: {row['ms']:.2f} ms, on the device {row['device_ms']:.2f}, "
            f"beside it {row['host_ms']:.2f}; {min(walls):.2f} to {max(walls):.2f}"
        )
        return row

    def interference(self) -> list[dict[str, Any]]:
        """32 streams decode, a prompt of 32k tokens arrives; with three fixed budgets, and with the
        bound on stalls that a server has by default. Of two times the second counts: the first is
        where libraries choose their kernels for these shapes."""
        found, length = [], 4096 if self.quick else 32_000
        for budget, stall in ((8192, 8.0), (512, None), (2048, None), (8192, None)):
            self.set_budget(budget, stall)
            times = [self._interfere(self.prompt(length)) for _ in range(2)]
            row = {"budget": budget, "stall": stall, "prompt": length} | times[-1]
            row["first_worst_ms"] = times[0]["worst_ms"]
            print("  interference", row)
            found.append(row)
        return found

    def _interfere(self, long: list[int]) -> dict[str, Any]:
        for n in range(32):
            self.add(f"s{n}", self.prompt(256), 7000)
        for _ in range(60):  # the streams' own prompts are done long before
            self.core.step()
        times: list[float] = []
        arrived = first = 0.0
        step = after = 0
        while after < 20:
            if step == 50:
                arrived = perf_counter()
                self.add("long", long, 4)
            updates = self.core.step()
            now = perf_counter()
            if any(update.request_id == "s0" for update in updates):
                times.append(now)
            if not first and any(u.request_id == "long" and u.tokens for u in updates):
                first = now
            step += 1
            after += first > 0
        self.drain()
        gaps = [end - start for start, end in pairwise(times)]
        steady = statistics.median(gaps[:45])
        slowed = [gap for gap, at in zip(gaps, times[1:], strict=True) if arrived <= at <= first]
        return {
            "steady_ms": 1e3 * steady,
            "worst_ms": 1e3 * max(slowed),
            "median_ms": 1e3 * statistics.median(slowed),
            "worst_over_steady": max(slowed) / steady,
            "long_ttft_s": first - arrived,
            "gaps_ms": [round(1e3 * gap, 3) for gap in slowed],
        }

    def mixed(self) -> dict[str, Any]:
        """64 streams decode beside a steady flow of 512-token chunks: how idle is the GPU?

        Twice: by events between steps, while nobody watches; and by the profiler, as the share of
        the time from the first kernel to the last in which none runs. That also sees gaps inside a
        step, but launching is slower under it, so it is the upper bound.
        """
        self.set_budget(64 + 512)
        for n in range(64):
            self.add(f"s{n}", self.prompt(256), 7000)
        count = [0]
        prompts = [self.prompt(4096) for _ in range(64)]

        def turn(steps: int) -> float:
            start = perf_counter()
            for _ in range(steps):
                while self.core.scheduler.num_waiting < 2:
                    count[0] += 1
                    self.add(f"p{count[0]}", prompts[count[0] % 64], 1)
                self.core.step()
            wait()
            return (perf_counter() - start) / steps

        turn(150)
        self.steps()
        wall = turn(50 if self.quick else 300)
        by_events = self.steps()
        watched = [0.0]

        def turn_watched() -> None:
            watched[0] = turn(50)

        events = device_events(turn_watched)
        self.drain()
        busy, span = busy_and_span(events)
        row = {
            "step_ms": 1e3 * wall,
            "between_steps": by_events.get("idle_share"),
            "watched_step_ms": 1e3 * watched[0],
            "busy_ms": 1e3 * busy / 50,
            "span_ms": 1e3 * span / 50,
            "idle_share": 1 - busy / span if span else None,
        }
        print("  mixed", row)
        return row

    def profile(self) -> dict[str, Any]:
        """Profile the kernels of a decode step and of a prefill."""
        found: dict[str, Any] = {}
        for batch in (1, 8, 32, 128):
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

        events = device_events(turn)
        totals: dict[str, float] = {}
        for name, start, end in events:
            totals[name] = totals.get(name, 0.0) + end - start
        best = sorted(totals.items(), key=lambda item: -item[1])[:14]
        for name, seconds in best:
            print(f"    {1e3 * seconds / steps:8.3f} ms a step  {name[:90]}")
        busy, span = busy_and_span(events)
        print(f"    {1e3 * busy / steps:8.3f} ms a step busy, {1e3 * span / steps:.3f} in all")
        found = {name[:90]: 1e3 * seconds / steps for name, seconds in best}
        return found | {"busy": 1e3 * busy / steps, "span": 1e3 * span / steps}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Event = tuple[str, float, float]  # name, start, end in seconds


def device_events(run: Callable[[], object]) -> list[Event]:
    """All kernels and copies on the device while `run` runs; none if there is no device."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        run()
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    return [
        (event.name, 1e-6 * event.time_range.start, 1e-6 * event.time_range.end)
        for event in found.events() or ()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]


def busy_and_span(events: Sequence[Event]) -> tuple[float, float]:
    """Seconds in which anything ran, and from the first start to the last end. What overlaps
    counts once."""
    if not events:
        return 0.0, 0.0
    ordered = sorted((start, end) for _, start, end in events)
    busy, until = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, until - ordered[0][0]


PARTS = ("nano", "decode", "prefill", "long", "interference", "mixed", "profile", "start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("parts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    parser.add_argument("--budgets", default="", help="of nano: tokens in a step")
    args = parser.parse_args()
    logging.basicConfig(format="  %(message)s")  # what the start was made of, and the memory
    logging.getLogger("twostroke").setLevel(logging.INFO)
    imported_at = time()
    budgets = [int(budget) for budget in args.budgets.split(",") if budget]
    bench = Bench(args.shape, args.quick, json.loads(args.settings), budgets)
    first_token_at = time()  # `Bench` has written a few
    for part in args.parts.split(","):
        try:
            if part == "start":
                result: Any = {"imported_at": imported_at, "first_token_at": first_token_at}
                result["ready_s"] = bench.ready_s
            else:
                result = getattr(bench, part)()
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
            wait()  # if this raises, the device is lost, and so is this process
            bench.drain()
        bench.set_budget(bench.own_budget)
        bench.core.records.steps.clear()
        line = {"part": part, "shape": args.shape, "result": result}
        print("RESULT " + json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
