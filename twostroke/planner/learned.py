"""Step times from a data sheet, with efficiencies that were learned from measured servers.

A step's time is a sum of terms. Most terms are the time that the data sheet's rates allow for a
part of the work; their coefficients say how many times longer real servers take. The other terms
are counts, and their coefficients are seconds. `learned.json` has the coefficients and their
error; `bench/plan_error` fits both.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from twostroke.measure.roofline.roofline import Roofline
from twostroke.plan import PhaseWork
from twostroke.planner.steptimes import StepModel

TABLE = Path(__file__).with_name("learned.json")
TERMS = (
    "linear",  # FLOPs of the dense matrices
    "experts",  # FLOPs of the experts
    "attention",  # FLOPs of attention, in 16 bits
    "weights",  # bytes of the dense matrices and the head
    "expert_weights",  # bytes of the experts that a step's tokens choose
    "kv",  # bytes of keys and values
    "network",  # bytes between devices
    "hop",  # seconds of a reduction between devices
    "layer",  # seconds of a layer of a step
    "expert_layer",  # seconds of a layer with experts
    "prefill_layer",  # seconds of a layer of a step with prefill
    "step",  # seconds of a step
)


class StepTerms:
    """The terms of a step's time, for a model on a number of devices."""

    def __init__(self, roofline: Roofline) -> None:
        spec, cost = roofline.spec, roofline.cost
        self._cost, self._comm_s = cost, roofline.comm_s
        self._bandwidth, self._rate = roofline.bandwidth, roofline.rate
        ranks = roofline.settings.tensor_parallel
        self._fp16_rate = roofline.hardware.rate("fp16") * ranks
        layers = 0 if spec is None else spec.num_layers
        mixtures = [one for one, stage, _ in cost.experts if stage == "down"]
        self._latencies = (2.0 * layers * (ranks > 1), float(layers), float(len(mixtures)))
        self._expert_flops = sum(work.flops for _, _, work in cost.experts)
        self._expert_bytes = sum(work.num_bytes for _, _, work in cost.experts)
        self._mixture = mixtures[0] if mixtures else None  # equal in all layers, as in known models
        latents = spec is not None and spec.has_latents
        self.family = "latents" if latents else "experts" if mixtures else "dense"

    def of(self, prefill: PhaseWork, decode: PhaseWork) -> tuple[float, ...]:
        cost = self._cost
        tokens, samples = prefill.tokens + decode.tokens, decode.tokens + prefill.rows
        linear = tokens * (cost.flops_per_token - self._expert_flops)
        linear += samples * cost.flops_per_sample
        attended = (prefill.kv_tokens + decode.kv_tokens) * cost.flops_per_kv_token
        attended += decode.kv_tokens * cost.more_flops_per_decode_kv_token
        attended += (prefill.kv_reads - prefill.tokens) * cost.expand_flops_per_kv_token
        used = 0.0
        if self._mixture is not None:
            share = self._mixture.experts_in_use(tokens) / self._mixture.num_experts
            used = share * self._expert_bytes
        dense = cost.layer_weight_bytes - self._expert_bytes
        dense += cost.head_weight_bytes if samples else 0.0
        moved = cost.kv_bytes(prefill) + cost.kv_bytes(decode)
        hops, layers, expert_layers = self._latencies
        return (
            linear / self._rate,
            tokens * self._expert_flops / self._rate,
            attended / self._fp16_rate,
            dense / self._bandwidth,
            used / self._bandwidth,
            moved / self._bandwidth,
            self._comm_s(tokens, samples),
            hops,
            layers,
            expert_layers,
            layers if prefill.tokens else 0.0,
            1.0,
        )


class LearnedSteps:
    """Step times with learned coefficients of the model's family."""

    def __init__(self, roofline: Roofline, coefficients: dict[str, float]) -> None:
        self._terms = StepTerms(roofline)
        self._decode_terms = self._terms  # steps that only decode may read other weights
        if roofline.in_decode is not roofline:
            self._decode_terms = StepTerms(roofline.in_decode)
        self._coefficients = tuple(coefficients[name] for name in TERMS)

    def seconds(self, prefill: PhaseWork, decode: PhaseWork) -> float:
        terms = (self._terms if prefill.tokens else self._decode_terms).of(prefill, decode)
        return sum(one * value for one, value in zip(terms, self._coefficients, strict=True))


@cache
def learned_table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def learned_model(roofline: Roofline, table: dict[str, Any] | None = None) -> StepModel:
    """Return step times of a data sheet's hardware. `table` replaces the package's table."""
    table = learned_table() if table is None else table
    hardware = roofline.hardware
    family = StepTerms(roofline).family
    coefficients = table["coefficients"].get(family) or table["coefficients"][""]
    known = hardware.name.lower() in table["systems"]
    where = "" if known else " (not this one)"
    systems = ", ".join(table["systems"]).upper()
    source = (
        f"data sheet of {hardware.name}; efficiencies from {table['points']:,} measurements on "
        f"{systems}{where}"
    )
    return StepModel(
        LearnedSteps(roofline, coefficients),
        source,
        drift=table["error"] if known else max(table["error"], table["error_elsewhere"]),
        step_error=0.0,
        host_s=0.0,  # part of the learned time of a step
        start_s=coefficients["request"],
    )
