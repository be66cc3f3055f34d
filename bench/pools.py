"""A comparison of one prefill and one decode engine, a core each, with one engine on both cores.

    python -m bench.pools [MODEL.gguf] [--loads 0.12x50 0.4x20] [--repeat 1] [--only SERVER …]
                          [--ttft-ms 4000] [--tpot-ms 100] [--json RESULTS.json]

Every server is loaded once and stopped while another server is measured. The servers run two
workloads in turn:

    load          Poisson arrivals, RATE a second for SECONDS: prompts of 200 to 2,000 tokens and
                  answers of 50 to 200, both drawn uniformly; the same arrivals for every server.
                  An engine on two small cores can serve the first load, but not the second.
                  Worst gap, p99 of the gaps, TTFT, requests a second within both goals, and the
                  number of hand-overs.
    interference  like bench/cpu.py --interference: four streams decode and 4,000 tokens arrive; the
                  worst gap, the steady gap, and the part of the streams' own contexts.

The servers: `colocated` with its defaults, and `pools`; with --only also `colocated, budget 512`,
without a bound on stalls. Times are the client's. The defaults take five minutes on two
Neoverse-N1 cores. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from bench.cpu_interference import MeasuredServer, planned
from twostroke.measure.load.definitions import Goals, Sample
from twostroke.measure.load.workload import PlannedRequest
from twostroke.model.find import hub

FIRST_PORT = 8961
PROMPTS, OUTPUTS = (200, 2000), (50, 200)
LATE_S = 600.0  # that the last answers may take
POOLS = ["--prefill-engines", "1", "--decode-engines", "1"]
SERVERS = {
    "colocated": ["--threads", "2"],
    "colocated, budget 512": [
        "--threads", "2", "--max-num-batched-tokens", "512", "--max-num-seqs", "32",
        "--max-decode-stall", "0",
    ],
    "pools": ["--threads", "1", *POOLS],
}  # fmt: skip
MEASURED = ("colocated", "pools")


def a_load(text: str) -> tuple[float, float]:
    rate, _, seconds = text.partition("x")
    return float(rate), float(seconds)


def arrivals(rate: float, seconds: float, seed: int) -> list[PlannedRequest]:
    """Return the same requests for every server, without shared prefixes."""
    rng, at_s, found = random.Random(f"pools {rate} {seed}"), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt, output = rng.randint(*PROMPTS), rng.randint(*OUTPUTS)
        one = planned(prompt, rng.randrange(1, 10**9), output)
        found.append(PlannedRequest(at_s, one.prompt, prompt, output))
    return found


async def replay(server: MeasuredServer, load: list[PlannedRequest]) -> tuple[list[Sample], float]:
    client, begun = server._client(), perf_counter()

    async def send(one: PlannedRequest) -> Sample:
        due_s = begun + one.at_s
        await asyncio.sleep(max(0.0, due_s - perf_counter()))
        return await client.send(one, due_s)

    try:
        async with asyncio.timeout(load[-1].at_s + LATE_S):
            samples = await asyncio.gather(*(send(one) for one in load))
    finally:
        client.connections.close()
    return samples, perf_counter() - begun


def figures(samples: list[Sample], took_s: float, goals: Goals) -> dict[str, float]:
    good = [one for one in samples if one.ok]
    gaps = sorted(gap for one in good for gap in one.itls_s)
    ttft = sorted(one.ttft_s for one in good)
    tpot = sorted(one.tpot_s for one in good if one.tpot_s is not None)
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "worst_gap_s": gaps[-1],
        "p99_itl_s": at(gaps, 0.99),
        "median_itl_s": at(gaps, 0.5),
        "p50_ttft_s": at(ttft, 0.5),
        "p99_ttft_s": at(ttft, 0.99),
        "p50_tpot_s": at(tpot, 0.5),
        "goodput_per_s": sum(map(goals.met, samples)) / took_s,
        "took_s": took_s,
    }


def handed_over(server: MeasuredServer, took_s: float) -> int:
    """Return the number of requests of the last seconds that changed the engine after prefill."""
    with urlopen(f"{server.url}/records?seconds={min(600, took_s + 1):.0f}") as answer:
        found = json.load(answer)["requests"]
    return sum("handed over" in one["route"] for one in found)


def at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def words(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model otherwise")
    loads = [(0.12, 50.0), (0.4, 20.0)]
    parser.add_argument("--loads", type=a_load, nargs="*", default=loads, metavar="RATExSECONDS")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--ttft-ms", type=float, default=4000.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", choices=tuple(SERVERS), default=MEASURED)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = args.model or str(hub.resolve(None).path)
    goals = Goals(ttft_s=args.ttft_ms / 1e3, tpot_s=args.tpot_ms / 1e3)
    servers: list[MeasuredServer] = []
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    try:
        for n, (name, flags) in enumerate(SERVERS.items()):
            if name not in args.only:
                continue
            port = FIRST_PORT + n
            command = [sys.executable, "-m", "twostroke", "serve", model, *flags]
            command += ["--served-model-name", "m", "--port", str(port)]
            servers.append(MeasuredServer(name, command, port, "m", {}))
            print(f"{name} is loaded", flush=True)
        for run in range(args.repeat):
            for rate, seconds in args.loads:
                load = arrivals(rate, seconds, run)
                for server in servers:
                    with server.process.awake():
                        row = figures(*asyncio.run(replay(server, load)), goals)
                        row["handed_over"] = handed_over(server, row["took_s"])
                    note(runs, f"rate {rate:g}", server.name, row)
            for server in servers:
                note(runs, "interference", server.name, server.measure(run))
    finally:
        for server in servers:
            server.process.close()
    told: dict[str, Any] = {
        "loads": [{"rate": rate, "seconds": seconds} for rate, seconds in args.loads],
        "goals_ms": goals.limits_ms,
        "medians": {
            workload: {name: medians(rows) for name, rows in each.items()}
            for workload, each in runs.items()
        },
        "runs": runs,
    }
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told["medians"]))


def note(
    runs: dict[str, dict[str, list[dict[str, float]]]],
    workload: str,
    name: str,
    row: dict[str, float],
) -> None:
    runs.setdefault(workload, {}).setdefault(name, []).append(row)
    print(f"{workload}, {name}: {words(row)}", flush=True)


if __name__ == "__main__":
    main()
