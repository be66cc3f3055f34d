"""The error of "predict, then run" of /learn: TTFT and TPOT of twelve settings on this machine.

    python -m bench.learn_prediction [--model MODEL] [--passes 3] [--out FILE.json]

The server's parts run without HTTP: the engine process, the experiments of `serve/learn/lab.py` and
the forecasts of `observe/forecast.py`. The engine is calibrated like on the page; then each setting
is predicted and runs in each pass, three rounds in a row, like on the page. The error of a setting
is the median of its passes: the speed of a shared machine changes within seconds. The JSON has all
passes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from twostroke.config import EngineConfig
from twostroke.engine.remote import RemoteEngine
from twostroke.measure.load.result import environment
from twostroke.observe.forecast import Workload
from twostroke.serve.fields.protocol import LearnRunRequest
from twostroke.serve.generation.service import Service
from twostroke.serve.learn.learn_export import ROUNDS
from twostroke.serve.learn.learn_routes import LearnData
from twostroke.serve.settings import ServeSettings

# Prompt, answer, streams.
SETTINGS = [
    *((32, 32, 1), (64, 64, 1), (128, 32, 1), (256, 16, 1), (256, 64, 1), (384, 32, 1)),
    *((512, 32, 1), (768, 32, 1), (1024, 64, 1), (1536, 16, 1), (64, 32, 4), (128, 32, 2)),
]
METRICS = ("ttft", "tpot")
MEDIAN_AT_MOST, EACH_AT_MOST = 0.10, 0.20


async def measure(model: str | None, passes: int) -> dict[str, Any]:
    config = EngineConfig(model=model)
    async with await RemoteEngine.start(config) as client:
        service = Service(client, ServeSettings(engine=config, log_stats=False))
        data = LearnData(service)
        await data.run(LearnRunRequest(experiment="calibration"))
        found = [
            [await _row(data, Workload(*setting)) for setting in SETTINGS] for _ in range(passes)
        ]
        service.prompts.close()
        name = client.info.model_name
    rows = [_middle(found, n) for n in range(len(SETTINGS))]
    errors = [abs(row[key]["error"]) for row in rows for key in METRICS]
    return {
        "schema_version": 1,
        "environment": environment(),
        "model": name,
        "rounds": ROUNDS,
        "rows": rows,
        "passes": found,
        "median_error": median(errors),
        "worst_error": max(errors),
        "passed": median(errors) <= MEDIAN_AT_MOST and max(errors) <= EACH_AT_MOST,
    }


def _middle(passes: list[list[dict[str, Any]]], setting: int) -> dict[str, Any]:
    """Return the row of a setting, with the pass of the median error for each metric."""
    rows = [rows[setting] for rows in passes]
    middle = {
        key: sorted((row[key] for row in rows), key=lambda one: float(one["error"]))[len(rows) // 2]
        for key in METRICS
    }
    return rows[0] | middle


async def _row(data: LearnData, load: Workload) -> dict[str, Any]:
    """Return the medians of the rounds, as on the page."""
    expected = await data.predict(load)
    assert expected is not None, "the calibration has shown steps of both phases"
    request = LearnRunRequest(experiment="predict", **asdict(load), rounds=ROUNDS)
    requests = (await data.run(request))["arms"][0]["requests"]
    rounds = [requests[n : n + load.streams] for n in range(0, len(requests), load.streams)]
    return {
        **asdict(load),
        "ttft": _compared(expected["ttft_s"], median(map(_ttft_s, rounds))),
        "tpot": _compared(expected["tpot_s"], median(map(_tpot_s, rounds))),
    }


def _ttft_s(streams: list[dict[str, Any]]) -> float:
    return mean(one["first_token_s"] - one["received_s"] for one in streams)


def _tpot_s(streams: list[dict[str, Any]]) -> float:
    return mean(
        (one["token_s"][-1] - one["token_s"][0]) / (len(one["token_s"]) - 1) for one in streams
    )


def _compared(expected_s: float, measured_s: float) -> dict[str, float]:
    error = expected_s / measured_s - 1
    return {"expected_s": expected_s, "measured_s": measured_s, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--passes", type=int, default=3, help="an odd number")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args.model, args.passes))
    print("prompt answer streams     TTFT measured   error     TPOT measured   error")
    for row in found["rows"]:
        cells = [f"{row['prompt_tokens']:6} {row['output_tokens']:6} {row['streams']:7}"]
        for key in METRICS:
            one = row[key]
            cells.append(
                f"{1e3 * one['expected_s']:7.1f} {1e3 * one['measured_s']:7.1f} ms "
                f"{one['error']:+7.1%}"
            )
        print("  ".join(cells))
    print(f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
