"""The speed of the planner: a simulated hour of 10 requests a second on one layout.

    python -m bench.plan_speed [--seconds 3600] [--json RESULTS.json]

Simulates a synthetic trace (prompts of 1,000 tokens, answers of 200, on average) twice with the
same seed, and tells the CPU time of each run and whether both gave the same times of every token.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import process_time
from typing import Any

from bench.output import write_result
from twostroke.measure.load.load_run import gc_disabled
from twostroke.measure.load.traces import synthetic
from twostroke.measure.roofline.hardware import find_hardware
from twostroke.measure.roofline.roofline import Roofline, RooflineSettings
from twostroke.measure.roofline.shapes import find_spec
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.learned import learned_model
from twostroke.planner.simulate import VirtualClock, simulate
from twostroke.planner.steptimes import NoisyCost

RATE, PROMPT, OUTPUT = 10.0, 1000, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = synthetic(RATE, args.seconds, PROMPT, OUTPUT, seed=1)
    hardware = find_hardware("H100")
    roofline = Roofline(find_spec("llama-3.1-8b"), hardware, RooflineSettings())
    model = learned_model(roofline)
    shape = EngineShape(int(roofline.kv_tokens or 0), 131072, 256, 8192, prefix_caching=False)
    runs: list[tuple[float, Any]] = []
    for _ in range(2):
        clock, cost = VirtualClock(), NoisyCost(model)
        engines = EngineLayout(1, shape).simulated(cost, model.host_s, clock)
        began = process_time()
        with gc_disabled():
            records = simulate(trace, clock, engines)
        runs.append((process_time() - began, [list(one.token_s) for one in records]))
    result = {
        "simulated_s": args.seconds,
        "requests": len(trace),
        "steps": engines[0].usage.steps,
        "tokens": sum(one.output_tokens for one in trace),
        "cpu_s": [took_s for took_s, _ in runs],
        "equal": runs[0][1] == runs[1][1],
    }
    write_result(result, args.json, indent=1)


if __name__ == "__main__":
    main()
