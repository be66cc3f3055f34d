"""The cost of observation, without a model: records, causes of gaps, transfer, totals.

    python -m bench.observe [--json FILE]

Runs an engine's loop with an executor that computes nothing, and times the work of observation in
each step: the step's record with its gaps by cause (`StepRecorder.add`), packing the record for the
HTTP process, reading the record there, and adding the record to the totals; also the end of a
request and a scrape. One more comparison for each token in `commit` is timed separately.
Prints a table, ends with one JSON line.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from array import array
from time import perf_counter
from timeit import repeat
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from bench.output import write_result
from bench.scheduler import Instant, scheduler_with
from twostroke.engine.api import EngineClient, EngineLoad
from twostroke.engine.core import EngineCore
from twostroke.model.describe.cost import CostModel
from twostroke.observe.record import Records, StepRecord
from twostroke.observe.totals import Totals
from twostroke.serve.monitor.metrics import ServerMetrics

STEPS = 400
BUDGET_US = 50.0  # at 32 streams

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[StepRecord]).decode


def microseconds(times: list[float]) -> float:
    return 1e6 * statistics.median(times)


def measure(running: int) -> dict[str, float]:
    cost = CostModel(1e9, 1e8, 1e5, 1e9, 1e8, 1e5)
    core = EngineCore(scheduler_with(running, 0, 5000), Instant(), cost)
    record, record_s = core.recorder.add, []

    def timed(*args: Any) -> None:
        start = perf_counter()
        record(*args)
        record_s.append(perf_counter() - start)

    core.recorder.add = timed  # type: ignore[method-assign, assignment]
    totals = Totals(8192)
    times: dict[str, list[float]] = {"pack": [], "unpack": [], "totals": []}
    for _ in range(STEPS):
        core.step()
        start = perf_counter()
        packed = encode([core.records.steps[-1]._replace(slots=())])
        times["pack"].append(perf_counter() - start)
        start = perf_counter()
        (back,) = decode(packed)
        times["unpack"].append(perf_counter() - start)
        start = perf_counter()
        totals.add_step(back)
        times["totals"].append(perf_counter() - start)
    row = {"record_us": microseconds(record_s), "commit_us": per_token_us() * running}
    row |= {f"{name}_us": microseconds(taken) for name, taken in times.items()}
    return {"streams": running, **row, "step_us": sum(row.values())}


def per_token_us() -> float:
    """Time the comparison of `Scheduler.commit` for a token: is its step the next one?"""
    steps, slots = array("q", range(100)), 64
    code = "steps[-1] != 99 or 3 >= slots"
    return 1e6 * min(repeat(code, globals={"steps": steps, "slots": slots}, number=100_000)) / 1e5


def measure_end(tokens: int) -> float:
    """Time the end of a request with this number of tokens: its sums and its worst gap."""
    scheduler = scheduler_with(8, 0, 5000)
    core = EngineCore(scheduler, Instant(), CostModel(1e9, 1e8, 1e5, 1e9, 1e8, 1e5))
    for _ in range(tokens):
        core.step()
    request = next(iter(scheduler._requests.values()))
    account = core.ledger._accounts.get(request.request_id)
    if account is None:  # its first token came before the ledger was there
        core.ledger.open(request.record)
        account = core.ledger._accounts[request.request_id]
    times = []
    for _ in range(50):
        core.ledger._accounts[request.request_id] = account
        start = perf_counter()
        core.ledger.close(request.record)
        times.append(perf_counter() - start)
    return microseconds(times)


def measure_page() -> float:
    info = SimpleNamespace(max_model_len=8192, block_size=16, kv_tokens=65536, device="cpu")
    info.read_bytes_per_s = info.ops_per_s = 1.0
    kv = scheduler_with(8, 0, 5000).kv.usage()
    client = SimpleNamespace(
        info=info,
        records=Records(),
        healthy=True,
        num_restarts=0,
        dropped={},
        load=lambda: EngineLoad(0, 0, kv),
    )
    metrics = ServerMetrics(cast(EngineClient, client), "model")
    times = []
    for _ in range(30):
        start = perf_counter()
        metrics.text()
        times.append(perf_counter() - start)
    return microseconds(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    rows = [measure(running) for running in (8, 32, 256)]
    parts = ("record", "commit", "pack", "unpack", "totals", "step")
    print("µs a step   streams  " + "  ".join(f"{part:>7}" for part in parts))
    for row in rows:
        print(f"{row['streams']:19}  " + "  ".join(f"{row[f'{part}_us']:7.1f}" for part in parts))
    at_32 = rows[1]["step_us"]
    end_us, page_us = measure_end(500), measure_page()
    print(f"a request's end (500 tokens) {end_us:.0f} µs; a scrape {page_us / 1e3:.1f} ms")
    write_result(
        {
            "bench": "observe",
            "machine": platform.machine(),
            "python": platform.python_version(),
            "rows": rows,
            "request_end_us": end_us,
            "scrape_us": page_us,
            "budget_us": BUDGET_US,
            "within_budget": at_32 < BUDGET_US,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
