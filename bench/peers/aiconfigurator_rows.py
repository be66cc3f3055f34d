"""Predictions of aiconfigurator-core for measured points, as JSON: id → [TTFT in ms, TPOT in ms].

    python -m venv aic && aic/bin/pip install aiconfigurator-core
    aic/bin/python bench/peers/aiconfigurator_rows.py aiconfigurator_silicon_sample.csv.gz OUT.json

Runs in an environment of its own, without twostroke. A row that the package cannot predict gets the
name of the error. `bench/plan_error.py --peer OUT.json` compares the predictions.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import sys
from collections import Counter
from typing import Any

from aiconfigurator_core.sdk import common
from aiconfigurator_core.sdk.backends.factory import get_backend
from aiconfigurator_core.sdk.config import ModelConfig, RuntimeConfig
from aiconfigurator_core.sdk.models import get_model
from aiconfigurator_core.sdk.perf_database import get_database

# Names of the table that the package knows under another name.
MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}


# Number formats to try one after the other: those of the row first, then with 16-bit attention,
# then the package's defaults for the model. The package has no measurements of some formats.
ATTEMPTS: tuple[tuple[bool, str | None], ...] = (
    (True, None),
    (True, "bfloat16"),
    (False, None),
    (False, "bfloat16"),
)


def predicted(row: dict[str, str]) -> tuple[float, float]:
    """Return TTFT and TPOT in ms from the first number formats that the package has."""
    failed: Exception | None = None
    for of_row, attention in ATTEMPTS:
        try:
            return attempt(row, of_row, attention)
        except Exception as error:  # the package raises many kinds
            failed = failed or error
    assert failed is not None
    raise failed


def attempt(row: dict[str, str], of_row: bool, attention: str | None) -> tuple[float, float]:

    def number(name: str, default: int = 1) -> int:
        return int(float(row[name] or default)) or default

    database = get_database(row["system"], row["backend"], "current")
    model_path = MODELS.get(row["model_path"], row["model_path"])
    config: dict[str, Any] = {
        "tp_size": number("tp_size"),
        "pp_size": number("pp_size"),
        "attention_dp_size": number("attention_dp_size"),
        "moe_tp_size": number("moe_tp_size"),
        "moe_ep_size": number("moe_ep_size"),
        "system": row["system"],
    }
    if attention is not None:
        config["fmha_quant_mode"] = common.FMHAQuantMode[attention]
    if of_row and row["gemm_quant_mode"]:
        config["gemm_quant_mode"] = common.GEMMQuantMode[row["gemm_quant_mode"]]
    if of_row and row["moe_quant_mode"] and "gpt-oss" not in model_path:
        config["moe_quant_mode"] = common.MoEQuantMode[row["moe_quant_mode"]]
    model = get_model(model_path, ModelConfig(**config), row["backend"])
    isl = int(row["isl"])
    runtime = RuntimeConfig(batch_size=number("batch_size"), isl=isl, osl=int(row["osl"]))
    # A step with prefill computes one prompt: the package's own default.
    found = get_backend(row["backend"]).run_agg(model, database, runtime, ctx_tokens=isl)
    figures = found.get_result_dict()
    return float(figures["ttft"]), float(figures["tpot"])


def mend_ranks(row: dict[str, str]) -> None:
    """Correct the number of GPUs of a row whose experts are split in both ways (8 × 8). The table
    has the product, 64, as the number of GPUs. The measurement had 8 GPUs, as in
    `bench/plan_error/points.py`, and each has some of the experts."""
    ways = row["moe_tp_size"], row["moe_ep_size"]
    both = len(set(ways)) == 1 and ways[0] not in ("", "1")
    if both and int(row["tp_size"]) == int(ways[0]) ** 2:
        row["tp_size"], row["moe_tp_size"] = ways[0], "1"


def main() -> None:
    logging.disable(logging.CRITICAL)
    source, target = sys.argv[1:]
    found: dict[str, Any] = {}
    errors: Counter[str] = Counter()
    with gzip.open(source, "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "agg"]
    for number, row in enumerate(rows):
        mend_ranks(row)
        try:
            found[row["id"]] = predicted(row)
        except Exception as error:  # the package raises many kinds
            found[row["id"]] = f"{type(error).__name__}: {error}"[:200]
            errors[
                f"{row['model_path']} {row['system']} {row['backend']} {found[row['id']]}"[:160]
            ] += 1
        if number % 200 == 0:
            print(number, len(rows), file=sys.stderr, flush=True)
    for name, count in errors.most_common():
        print(count, name, file=sys.stderr)
    with open(target, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
