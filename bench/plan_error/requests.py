"""Requests of real vLLM servers with their arrivals, simulated by the planner.

The file is LLMServingSim's: times of every request of four runs. The run with two data-parallel
engines that share experts is left out, because the planner has no such layout.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

import numpy as np

from bench.plan_error.points import roofline_of
from twostroke.measure.load.definitions import Goals
from twostroke.measure.load.traces import TraceRequest
from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.learned import learned_model
from twostroke.planner.predict import predict
from twostroke.planner.steptimes import StepModel, roofline_model

# (GPU, model) of the file → shape, hardware, ranks, max_num_seqs. None of these GPUs is fitted.
RUNS = {
    ("RTX4090", "Llama-3.1-8B"): ("llama-3.1-8b", "RTX4090", 1, 256),
    ("RTXPRO6000", "Llama-3.1-8B"): ("llama-3.1-8b", "RTXPRO6000", 1, 128),
    ("RTXPRO6000", "Qwen3-32B"): ("qwen3-32b", "RTXPRO6000", 2, 128),
}
BATCHED_TOKENS = 2048
Json = dict[str, Any]


def request_rows(path: str, table: Json) -> list[Json]:
    """Return the error of the mean TTFT and TPOT of each run, ours and the plain roofline's."""
    runs: dict[tuple[str, str], list[Json]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            one = json.loads(line)
            runs[one["gpu"], one["model"]].append(one)
    rows = []
    for key, (shape, system, ranks, seqs) in RUNS.items():
        requests = sorted(runs[key], key=lambda one: float(one["queued_ts"]))
        begun = requests[0]["queued_ts"]
        trace = [
            TraceRequest(one["queued_ts"] - begun, one["input_toks"], one["output_toks"])
            for one in requests
        ]
        ttfts = [one["first_token_ts"] - one["queued_ts"] for one in requests]
        tpots = [
            (one["last_token_ts"] - one["first_token_ts"]) / (one["output_toks"] - 1)
            for one in requests
            if one["output_toks"] > 1
        ]
        roofline = roofline_of(shape, system, "bf16", ranks)
        engine = EngineShape(int(roofline.kv_tokens or 0), 32768, seqs, BATCHED_TOKENS)
        models = {
            "ours": learned_model(roofline, table),
            "plain roofline": roofline_model(roofline),
        }
        for name, model in models.items():
            rows.append(
                {"name": name, "model": key[1], "system": f"{ranks} × {key[0]}"}
                | _errors(trace, engine, model, float(np.mean(ttfts)), float(np.mean(tpots)))
            )
    return rows


def _errors(
    trace: list[TraceRequest], engine: EngineShape, model: StepModel, ttft_s: float, tpot_s: float
) -> Json:
    figures = predict(trace, EngineLayout(1, engine), model, Goals()).figures
    row: Json = {"points": len(trace)}
    for figure, measured_s in (("TTFT", ttft_s), ("TPOT", tpot_s)):
        found = figures[f"mean_{figure.lower()}_ms"]
        error = abs(found.expected / (1e3 * measured_s) - 1)
        inside = float(found.contains(1e3 * measured_s))
        row[figure] = {"median": error, "mean": error, "coverage": inside}
        row[f"{figure} measured, predicted (ms)"] = [1e3 * measured_s, *found]
    return row
