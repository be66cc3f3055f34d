"""The planner against a real server: predicted beside measured, at three loads of each trace.

    twostroke serve --port 8791 &
    python -m bench.plan_check http://127.0.0.1:8791 TRACE [TRACE …] [--shrink 8] [--seconds 60]
                               [--steps FILE] [--json RESULTS.json]

The server is calibrated for a minute (or `--steps` has its records). Its capacity for a trace is
what a simulation serves a second of requests that all come at once. Then, at each share of it in
`LOADS`, the first requests of the trace are predicted, sent, and compared. Nothing is fitted to the
runs that are compared. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import TraceRequest, at_rate, block_tokens, read_trace, scaled
from twostroke.planner.calibrate import SECONDS, calibrate
from twostroke.planner.check import compare, replay
from twostroke.planner.layout import Layout, shape_of_server
from twostroke.planner.predict import predict
from twostroke.planner.steptimes import StepModel, measured_model

LOADS = {"light": 0.35, "knee": 0.85, "overload": 1.3}  # shares of the capacity
PROBE = 60  # requests that all come at once
GOALS = Goals(ttft_s=1.0, tpot_s=0.1)


def fitting(path: str, shrink: float, layout: Layout) -> list[TraceRequest]:
    """The requests of a trace that the server can hold."""
    longest = min(layout.shape.max_model_len, layout.shape.kv_tokens)
    found = scaled(read_trace(path), shrink=shrink)
    return [one for one in found if one.prompt_tokens + one.output_tokens <= longest]


def capacity(trace: list[TraceRequest], layout: Layout, model: StepModel, block: int) -> float:
    """Requests a second that the layout serves when they wait for it."""
    at_once = [replace(one, at_s=0.0) for one in trace[:PROBE]]
    return predict(at_once, layout, model, GOALS, block).figures["requests_per_s"].expected


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
    model, layout = measured_model(records, args.url), Layout(1, shape_of_server(records, args.url))
    found: dict[str, Any] = {"step_times": model.as_json(), "loads": []}
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
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
