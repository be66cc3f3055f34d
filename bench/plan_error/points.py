"""Measured closed loops of other servers, and the split into points to fit and points to test.

The file is aiconfigurator's silicon sample: mean TTFT and TPOT of TensorRT-LLM, SGLang and vLLM
servers with a fixed number of users.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.roofline.hardware import find_hardware
from twostroke.measure.roofline.roofline import Roofline, RooflineSettings
from twostroke.measure.roofline.shapes import find_spec
from twostroke.planner.learned import StepTerms

# Pairs of a model and a system that nothing is fitted to. Model and system of the first six occur
# in other pairs; the seventh is a model that occurs nowhere else.
TEST = {
    ("deepseek-v3", "b200"),
    ("gpt-oss-120b", "h200"),
    ("kimi-k2.5", "b300"),
    ("llama-3.1-70b", "h100"),
    ("llama-3.1-8b", "h200"),
    ("minimax-m2.5", "h200"),
    ("qwen3-235b-a22b", "h100"),
}
# Not used: two rows have equal settings, and TPOTs of 8 and 42 ms.
LEFT_OUT = {("qwen3-32b", "gb200")}
MODELS = {  # of the file → a shape in bench/shapes
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-32B": "qwen3-32b",
}
FIGURES = ("TTFT", "TPOT")
SHAPES = Path(__file__).parents[1] / "shapes"


@dataclass(frozen=True)
class Point:
    """A measured closed loop."""

    name: str
    model: str
    system: str
    backend: str
    precision: str
    prompt: int
    output: int
    users: int
    ranks: int
    ttft_s: float
    tpot_s: float
    varied: bool  # lengths vary; otherwise all requests are equal

    @property
    def pair(self) -> tuple[str, str]:
        return self.model, self.system

    @property
    def measured(self) -> tuple[float, float]:
        return self.ttft_s, self.tpot_s

    @property
    def family(self) -> str:
        return terms_of(self.model, self.system, self.precision, self.ranks).family


def read_points(path: str) -> list[Point]:
    """Return the aggregated points without data or pipeline parallelism, each once."""
    found: dict[tuple[Any, ...], Point] = {}
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            users = re.search(r"concurrency=(\d+)", row["silicon_data_source"])
            model = MODELS.get(row["model_path"])
            alone = all(float(row[name] or 1) <= 1 for name in ("pp_size", "attention_dp_size"))
            if row["mode"] != "agg" or model is None or users is None or not alone:
                continue
            point = Point(
                row["id"],
                model,
                row["system"].removesuffix("_sxm"),
                row["backend"],
                row["precision"] or "bf16",
                int(row["isl"]),
                int(row["osl"]),
                int(users[1]),
                _ranks(row),
                float(row["silicon_ttft_ms"]) / 1e3,
                float(row["silicon_tpot_ms"]) / 1e3,
                # The aiconfigurator authors' own runs (a path as source) have equal lengths.
                re.match(r"source_file=[^;]*/", row["silicon_data_source"]) is None,
            )
            if point.pair not in LEFT_OUT:
                found.setdefault(tuple(vars(replace(point, name="")).values()), point)
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is not aiconfigurator's silicon sample: {error!r}") from None
    return list(found.values())


def _ranks(row: dict[str, str]) -> int:
    """Return the number of GPUs. Where the experts of a layer are split in both ways (8 × 8), the
    table has the product, 64, although the rows' names and their equals in other files say 8."""
    ranks = int(row["tp_size"])
    tensor, expert = (int(float(row.get(f"moe_{way}_size") or 1)) for way in ("tp", "ep"))
    return tensor if tensor == expert > 1 and ranks == tensor * expert else ranks


@cache
def roofline_of(model: str, system: str, precision: str, ranks: int) -> Roofline:
    """Return the roofline, with the bytes of a checkpoint in this precision."""
    shape = SHAPES / f"{model}.json"
    spec = find_spec(str(shape) if shape.is_file() else model)
    weights = {"bf16": "fp16"}.get(precision, precision)
    if model.startswith("gpt-oss"):  # experts in MXFP4: matmuls in 16 bits, on Blackwell in 8 bits
        weights = "int4" if system.startswith("h") else "fp8"
    expert = {"fp16": 2.0, "fp8": 1.0}.get(weights, 0.5625)
    dense = expert
    if model.startswith("gpt-oss"):
        expert, dense = 0.53125, 2.0
    elif spec.has_experts and weights in ("fp4", "int4"):
        dense = 2.0  # attention and shared layers have 16 bits
    stored = {}
    for name, dims in spec.weight_shapes().items():
        size = expert if ".experts." in name else dense if name.startswith("layers.") else 2.0
        stored[name] = math.prod(dims) * size
    kv = "fp16" if precision == "bf16" or model.startswith("gpt-oss") else "fp8"
    settings = RooflineSettings(tensor_parallel=ranks, weights=weights, kv=kv)
    return Roofline(spec, find_hardware(system), settings, 0.0, stored)


@cache
def terms_of(model: str, system: str, precision: str, ranks: int) -> StepTerms:
    return StepTerms(roofline_of(model, system, precision, ranks))
