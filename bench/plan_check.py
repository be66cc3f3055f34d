"""A comparison of the planner with a real server at three loads of each trace.

    twostroke serve --port 8791 &
    python -m bench.plan_check http://127.0.0.1:8791 TRACE [TRACE …] [--shrink 8] [--seconds 60]
                               [--steps FILE] [--json RESULTS.json]

The server is calibrated for a minute (or `--steps` has its records). With pools (`GET /pools`) the
pools are simulated. The capacity for a trace is the simulated rate for requests that all arrive at
once. Then, at each share of the capacity in `LOADS`, the first requests of the trace are predicted,
sent and compared. Nothing is fitted to these runs. Each run has the machine's load average, because
other programs make it slower than calibrated. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.output import write_result
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.http_client import Connections, Endpoint, ServerError
from twostroke.measure.load.result import environment
from twostroke.measure.load.traces import TraceRequest, at_rate, block_tokens, read_trace, scaled
from twostroke.planner.calibrate import SECONDS, calibrate
from twostroke.planner.check import compare, replay
from twostroke.planner.engine import Link
from twostroke.planner.layout import EngineLayout, shape_of_server
from twostroke.planner.predict import predict
from twostroke.planner.steptimes import StepModel, measured_model

LOADS = {"light": 0.35, "knee": 0.85, "overload": 1.3}  # shares of the capacity
PROBE = 60  # requests that all come at once
GOALS = Goals(ttft_s=1.0, tpot_s=0.1)
LINK_BYTES_PER_S = 2e9  # of pools on one machine: a copy from memory to memory
# Goals for the median error of these figures over all runs.
WANTED = {
    "p50_ttft_ms": 0.05,
    "p99_ttft_ms": 0.15,
    "p50_itl_ms": 0.05,
    "p99_itl_ms": 0.15,
    "goodput": 0.05,
}


def fitting(path: str, shrink: float, layout: EngineLayout) -> list[TraceRequest]:
    """Return the requests of a trace that the server can hold."""
    longest = min(layout.shape.max_model_len, layout.shape.kv_tokens)
    found = scaled(read_trace(path), shrink=shrink)
    return [one for one in found if one.prompt_tokens + one.output_tokens <= longest]


def capacity(
    trace: list[TraceRequest], layout: EngineLayout, model: StepModel, block: int
) -> float:
    """Return the requests a second that the layout serves if all requests wait."""
    at_once = [replace(one, at_s=0.0) for one in trace[:PROBE]]
    return predict(at_once, layout, model, GOALS, block).figures["requests_per_s"].expected


async def pools_of(url: str) -> dict[str, int]:
    """Return the engines of each pool; empty for a single engine."""
    connections = Connections(Endpoint(url, None))
    try:
        found = await connections.fetch_json("/pools")
    except ServerError:
        return {}
    finally:
        connections.close()
    return {name: count for name, count in found.items() if isinstance(count, int)}


def layout_of(url: str, records: dict[str, Any]) -> EngineLayout:
    shape, pools = shape_of_server(records, url), asyncio.run(pools_of(url))
    if "prefill" in pools:
        link = Link(shape.token_bytes, LINK_BYTES_PER_S)
        return EngineLayout(0, shape, pools["prefill"], pools["decode"], link)
    return EngineLayout(pools.get("data_parallel_size", 1), shape)


def summary(loads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median error of each figure with a goal, and how many runs were in their
    intervals."""
    rows = [row for one in loads for row in one["rows"]]
    found = {}
    for name, wanted in WANTED.items():
        of_name = [row for row in rows if row["figure"] == name and row["error"] is not None]
        if of_name:
            found[name] = {
                "median_error": median(abs(row["error"]) for row in of_name),
                "wanted": wanted,
                "inside": sum(row["inside"] for row in of_name),
                "runs": len(of_name),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--shrink", type=float, default=8.0, help="divides the traces' lengths")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--steps", type=Path, help="records of the server, or where to keep them")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps is not None and args.steps.is_file():
        records = json.loads(args.steps.read_text())
    else:
        records = asyncio.run(calibrate(args.url, None, 1024, SECONDS))
        if args.steps is not None:
            args.steps.write_text(json.dumps(records))
    model, layout = measured_model(records, args.url), layout_of(args.url, records)
    found: dict[str, Any] = {
        "layout": layout.name,
        "step_times": model.as_json(),
        "environment": environment(),
        "loads": [],
    }
    block = block_tokens(args.shrink)
    for path in args.traces:
        trace = fitting(path, args.shrink, layout)
        full = capacity(trace, layout, model, block)
        for name, share in LOADS.items():
            count = max(2, round(share * full * args.seconds))
            load = at_rate(trace[:count], share * full)
            forecast = predict(load, layout, model, GOALS, block)
            run = asyncio.run(replay(args.url, None, load, args.shrink))
            result = compare(forecast, run, GOALS)
            title = {
                "trace": Path(path).name,
                "load": name,
                "rate": share * full,
                "requests": count,
                "load_average": os.getloadavg()[0],
            }
            print(json.dumps(title), *result["problems"], flush=True)
            for row in result["rows"]:
                print(
                    f"  {row['figure']:16} predicted {row['predicted']:9.4g} ({row['low']:.4g} to "
                    f"{row['high']:.4g}), measured {row['measured']:9.4g}, "
                    f"off {row['error'] or 0.0:+.1%}{'' if row['inside'] else '  outside'}",
                    flush=True,
                )
            found["loads"].append(title | result)
    found["summary"] = summary(found["loads"])
    for name, one in found["summary"].items():
        print(
            f"{name:12} median error {one['median_error']:.1%} (goal {one['wanted']:.0%}), "
            f"{one['inside']} of {one['runs']} in their intervals"
        )
    write_result(found, args.json, indent=1)


if __name__ == "__main__":
    main()
