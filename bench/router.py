"""A comparison of the router with round robin and with the engine of the fewest requests.

    python -m bench.router [TRACE] [--seconds 600] [--speeds 1 2] [--engines 4]
                           [--only simulated real overhead] [--json RESULTS.json]

Three parts, each policy in turn on the same requests:

    simulated  TRACE (Mooncake's, JSONL or its .gz), or a similar synthetic trace, on simulated
               engines (`router_sim.py`): Llama-3.1-8B on an H200 each. Only
               the clock is simulated: schedulers, KV caches, prefix indexes and routers are real.
               At each of `--speeds` the trace's times are divided by it.
    real       two engines of a tiny model, each a real process on a CPU; lengths divided by
               `SHRINK`, `STREAMS` requests at one time.
    overhead   CPU time of the server for each request: with one instant engine
               (`tests/instant.py`) without a router, and with two engines behind a router; also
               `Router.place` with 2, 16 and 64 engines, at 1,000 requests a second.

Hit rate: prompt tokens that the engine found cached; `best_hit_rate` is the hit rate of one cache
as large as the caches of all simulated engines. TTFT as the engine has it. Goodput: requests a
second within both goals. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter, process_time, thread_time
from typing import Any

from bench.output import write_result
from bench.router_sim import (
    SimulatedMachine,
    best_hit_rate,
    conversations,
    simulate,
    spread_arrivals,
    tokens_of,
)
from tests.tiny import tiny_folder
from twostroke.config import EngineConfig
from twostroke.engine.api import EngineClient
from twostroke.engine.remote import RemoteEngine
from twostroke.measure.load.definitions import Goals, engine_sample
from twostroke.measure.load.stats import percentile
from twostroke.measure.load.traces import MOONCAKE_BLOCK, TraceRequest, read_trace, scaled
from twostroke.observe.record import RequestRecord
from twostroke.planner.simulate import marks_of
from twostroke.request import SamplingParams
from twostroke.route.pool_settings import PoolSettings
from twostroke.route.routed_engine import RoutedEngine
from twostroke.route.router import EngineState, Placement, Prompt, Queued, Role, Router

RATE = 3.4  # requests a second of the trace that is drawn, as of Mooncake's
SHRINK, STREAMS, REAL_REQUESTS = 16, 8, 200
REAL_MAX_LEN = 4096
TINY = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "max_position_embeddings": REAL_MAX_LEN,
}
INSTANT = "tests.instant:build_instant"
OVERHEAD_REQUESTS, OVERHEAD_RATE, OVERHEAD_TOKENS = 2000, 1000.0, 4


class RoundRobin(Router):
    _turn = 0

    def _place_among(self, engines: list[EngineState], prompt: Prompt) -> Placement | None:
        self._turn += 1
        return _at(engines[self._turn % len(engines)], prompt)


class LeastLoaded(Router):
    def _place_among(self, engines: list[EngineState], prompt: Prompt) -> Placement | None:
        return _at(min(engines, key=lambda one: one.streams), prompt)


def _at(engine: EngineState, prompt: Prompt) -> Placement:
    left = prompt.num_tokens - engine.num_cached(prompt)
    return Placement(engine, False, Queued(left), "")


POLICIES: dict[str, type[Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "router": Router,
}


def figures(records: Sequence[RequestRecord], goals: Goals) -> dict[str, float]:
    ttft = [record.ttft_s for record in records]
    took_s = max(record.finished_s for record in records) - min(
        record.received_s for record in records
    )
    return {
        "requests": len(records),
        "hit_rate": sum(one.num_cached for one in records) / sum(one.num_prompt for one in records),
        "p50_ttft_s": percentile(ttft, 50),
        "p99_ttft_s": percentile(ttft, 99),
        "p50_tpot_s": percentile([record.tpot_s for record in records], 50),
        "p99_tpot_s": percentile([record.tpot_s for record in records], 99),
        "goodput_per_s": sum(goals.met(engine_sample(one)) for one in records) / took_s,
        "took_s": took_s,
    }


# ── simulated ─────────────────────────────────────────────────────────────────────────────────────


def simulated(
    trace: list[TraceRequest], speeds: Sequence[float], num_engines: int, goals: Goals
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for speed in speeds:
        load = scaled(trace, speed=speed)
        for name, router in POLICIES.items():
            began = perf_counter()
            records, states = simulate(load, num_engines, router, SimulatedMachine())
            row = figures(records, goals)
            tell(f"simulated, speed {speed:g}, {name}", row, perf_counter() - began)
            found.setdefault(f"speed {speed:g}", {})[name] = row
            assert not any(state.streams or state.queued_tokens for state in states)
    return found


# ── real ──────────────────────────────────────────────────────────────────────────────────────────


async def replay(engine: RoutedEngine, trace: Sequence[TraceRequest]) -> list[RequestRecord]:
    """Send `STREAMS` requests at a time in the trace's order."""
    gate, records = asyncio.Semaphore(STREAMS), []

    async def one(asked: TraceRequest) -> None:
        output = asked.output_tokens
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        prompt = {"prompt_token_ids": tokens_of(asked, 512 // SHRINK, 290)}
        async for each in engine.generate(prompt, params):
            if each.finished:
                records.extend(each.records)
        gate.release()

    tasks = []
    for asked in trace:
        await gate.acquire()
        tasks.append(asyncio.create_task(one(asked)))
    await asyncio.gather(*tasks)
    return records


async def real(trace: list[TraceRequest], folder: Path, goals: Goals) -> dict[str, Any]:
    load = [
        one
        for one in scaled(trace, shrink=SHRINK)
        if one.prompt_tokens + one.output_tokens < REAL_MAX_LEN
    ][:REAL_REQUESTS]
    config = EngineConfig(
        model=str(tiny_folder(folder, **TINY)),
        num_gpu_blocks_override=sum(one.prompt_tokens for one in load) // 16 // 4,
        max_num_seqs=STREAMS,
    )
    found = {}
    for name, router in POLICIES.items():
        engines = PoolSettings(data_parallel_size=2).engines(config)
        async with await RoutedEngine.start(engines) as engine:
            engine.requests.router = router([member.state for member in engine.members])
            began = perf_counter()
            row = figures(await replay(engine, load), goals)
            tell(f"real, {name}", row, perf_counter() - began)
            found[name] = row
    return found


# ── overhead ──────────────────────────────────────────────────────────────────────────────────────


async def cost(engine: EngineClient) -> dict[str, float]:
    """Return the CPU time of this process for requests of 200 tokens at a given rate."""
    params = SamplingParams(temperature=0, max_tokens=OVERHEAD_TOKENS, ignore_eos=True)
    late: list[float] = []

    async def one(n: int, due_s: float) -> None:
        late.append(monotonic() - due_s)
        prompt = {"prompt_token_ids": [5 + n % 7] * 100 + [n % 290] * 100}
        async for _ in engine.generate(prompt, params):
            pass

    await one(0, monotonic())
    cpu_s, began = process_time(), monotonic()
    tasks = []
    for n in range(OVERHEAD_REQUESTS):
        due_s = began + n / OVERHEAD_RATE
        if (wait_s := due_s - monotonic()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(one(n, due_s)))
    await asyncio.gather(*tasks)
    return {
        "cpu_us_a_request": 1e6 * (process_time() - cpu_s) / OVERHEAD_REQUESTS,
        "requests_per_s": OVERHEAD_REQUESTS / (monotonic() - began),
        "p99_late_ms": 1e3 * percentile(late, 99),
    }


def place_us(num_engines: int, trace: Sequence[TraceRequest]) -> float:
    """Time one complete routing decision with full prefix indexes."""
    states = [EngineState(f"engine-{n}", Role.BOTH) for n in range(num_engines)]
    router = Router(states)
    prompts = [Prompt(one.prompt_tokens, marks_of(one, MOONCAKE_BLOCK)) for one in trace[:1000]]
    for n, prompt in enumerate(prompts):
        states[n % num_engines].note_prompt(prompt)
    times = []
    for prompt in prompts:
        began = thread_time()
        placement = router.place(prompt)
        assert placement is not None
        placement.engine.note_prompt(prompt)
        times.append(thread_time() - began)
        placement.engine.add_queued(placement.queued)
    return 1e6 * statistics.median(times)


async def overhead(trace: list[TraceRequest], folder: Path) -> dict[str, Any]:
    config = EngineConfig(model=str(tiny_folder(folder)), max_num_seqs=64)
    found: dict[str, Any] = {"place_us": {n: place_us(n, trace) for n in (2, 16, 64)}}
    for turn in range(3):
        async with await RemoteEngine.start(config, builder=INSTANT) as single:
            runs = {"one engine, no router": await cost(single)}
        engines = PoolSettings(data_parallel_size=2).engines(config)
        async with await RoutedEngine.start(engines, builder=INSTANT) as routed:
            runs["two engines, routed"] = await cost(routed)
        for name, row in runs.items():
            tell(f"overhead {turn + 1}, {name}", row)
            found.setdefault(name, []).append(row)
    name_of = {"none": "one engine, no router", "router": "two engines, routed"}
    each = {
        key: statistics.median(row["cpu_us_a_request"] for row in found[name])
        for key, name in name_of.items()
    }
    found["router_us_a_request"] = each["router"] - each["none"]
    print(f"overhead: {json.dumps({k: v for k, v in found.items() if k != 'runs'})}", flush=True)
    return found


def tell(what: str, row: dict[str, float], took_s: float = 0.0) -> None:
    told = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
    print(f"{what}: {told}" + (f" ({took_s:.0f} s)" if took_s else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", help="Mooncake's JSONL or its .gz; drawn otherwise")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace")
    parser.add_argument("--speeds", type=float, nargs="*", default=[1.0, 2.0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=50.0)
    parts = ("simulated", "real", "overhead")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    goals = Goals(ttft_s=args.ttft_ms / 1e3, tpot_s=args.tpot_ms / 1e3)
    if args.trace:
        trace = spread_arrivals(read_trace(args.trace, seconds=args.seconds))
    else:
        trace = conversations(args.seconds, RATE)
    found: dict[str, Any] = {
        "trace": Path(args.trace).name if args.trace else "drawn",
        "seconds": args.seconds,
        "requests": len(trace),
        "goals_ms": goals.limits_ms,
        "engines": args.engines,
        "machine": SimulatedMachine()._asdict(),
        "best_hit_rate": best_hit_rate(trace, args.engines * SimulatedMachine().kv_tokens),
    }
    with tempfile.TemporaryDirectory() as folder:
        if "simulated" in args.only:
            found["simulated"] = simulated(trace, args.speeds, args.engines, goals)
        if "real" in args.only:
            found["real"] = asyncio.run(real(trace, Path(folder) / "real", goals))
        if "overhead" in args.only:
            found["overhead"] = asyncio.run(overhead(trace, Path(folder) / "instant"))
    write_result(found, args.json, indent=1)


if __name__ == "__main__":
    main()
