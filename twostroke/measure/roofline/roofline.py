"""Floors of both phases from a model's shape and a machine's rates, by arithmetic one can follow.

    prefill   FLOPs of the prompt / rate of products, or the bytes it must read / bandwidth
    decode    bytes of a step (weights once, every stream's keys and values) / bandwidth, or FLOPs

A floor is what no implementation can be faster than on that data sheet. An estimate is a floor
divided by an efficiency that well-made kernels reach. Measured is what a running server reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twostroke.measure.load.result import environment
from twostroke.measure.roofline.hardware import DECODE_EFFICIENCY, PREFILL_EFFICIENCY, Hardware
from twostroke.model.describe.cost import CostModel, cost_model, ring_bytes
from twostroke.model.describe.spec import ExpertsSpec, ModelSpec

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625, "fp4": 0.5625}
KV_BYTES = {"fp32": 4.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
DEFINITIONS = {
    "floor": "the least time for the work at the machine's rates: the larger of FLOPs / rate of "
    "products and bytes / bandwidth, plus what passes between devices",
    "estimate": "the floor divided by what well-made kernels reach of a data sheet; where the "
    "machine was measured, the floor",
    "FLOPs a byte": "arithmetic intensity; below the ridge memory decides, above it products",
    "measured": "what a running server's steps of one phase alone did, over their time",
}
FILE = "file"  # weights as a GGUF file has them: `Roofline`'s `stored`
RESERVED = 0.9  # of the memory, for weights and KV: --gpu-memory-utilization's default


@dataclass(frozen=True)
class Settings:
    prompt: int = 1024
    context: int = 1024  # positions a decoding stream has behind it
    batch: int = 1
    tensor_parallel: int = 1
    weights: str = "fp16"
    kv: str = "fp16"
    decode_weights: str | None = None  # what decode reads, beside `weights`, if that is another


@dataclass(frozen=True)
class Floor:
    """One piece of work: what it needs and the least time for it, in seconds."""

    name: str
    flops: float
    num_bytes: float
    compute_s: float
    memory_s: float
    comm_s: float
    efficiency: float

    @property
    def floor_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.comm_s

    @property
    def estimate_s(self) -> float:
        return max(self.compute_s, self.memory_s) / self.efficiency + self.comm_s

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.num_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "flops": self.flops,
            "bytes": self.num_bytes,
            "intensity_flops_per_byte": self.intensity,
            "compute_ms": 1e3 * self.compute_s,
            "memory_ms": 1e3 * self.memory_s,
            "communication_ms": 1e3 * self.comm_s,
            "floor_ms": 1e3 * self.floor_s,
            "estimate_ms": 1e3 * self.estimate_s,
            "efficiency": self.efficiency,
            "bound": self.bound,
        }


class Roofline:
    """A model on a machine. `spec` None: only the number of parameters is known. `stored`: bytes
    of each weight, in the place of what `settings.weights` says."""

    def __init__(
        self,
        spec: ModelSpec | None,
        hardware: Hardware,
        settings: Settings,
        parameters: float = 0.0,
        stored: Mapping[str, float] | None = None,
    ) -> None:
        self.spec, self.hardware, self.settings = spec, hardware, settings
        self.in_decode = self
        if settings.decode_weights is not None:
            own = replace(settings, weights=settings.decode_weights, decode_weights=None)
            self.in_decode = Roofline(spec, hardware, own, parameters)
        self.width = WEIGHT_BYTES.get(settings.weights, 2.0)  # bytes of a parameter
        if spec is None:
            self.parameters = self.active_parameters = parameters
            self.cost = CostModel(2 * parameters, 0.0, 0.0, parameters * self.width, 0.0, 0.0)
            return
        self.parameters = float(spec.num_parameters())
        self.active_parameters = float(spec.num_active_parameters())
        if stored is None:
            shapes = spec.weight_shapes()
            stored = {name: math.prod(shape) * self.width for name, shape in shapes.items()}
        else:
            self.width = sum(stored.values()) / self.parameters
        self.cost = cost_model(spec, stored, KV_BYTES[settings.kv])

    @property
    def rate(self) -> float:
        return self.hardware.rate(self.settings.weights) * self.settings.tensor_parallel

    @property
    def bandwidth(self) -> float:
        return self.hardware.bandwidth * self.settings.tensor_parallel

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on products, not memory, decide."""
        return self.rate / self.bandwidth

    @property
    def kv_bytes_per_token(self) -> float:
        return self.cost.kv_bytes_per_token

    @property
    def weight_bytes(self) -> float:
        """In memory, where both formats are if there are two."""
        more = 0.0 if self.in_decode is self else self.in_decode.weight_bytes
        return self.parameters * self.width + more

    def prefill(self, prompt: int | None = None) -> Floor:
        tokens = prompt or self.settings.prompt
        attended = tokens * (tokens + 1) / 2
        flops = (
            tokens * self.cost.flops_per_token
            + self.cost.flops_per_sample
            + attended * self.cost.flops_per_kv_token
        )
        moved = self.cost.weight_bytes(1, tokens) + tokens * self.kv_bytes_per_token
        return self._floor(f"prefill {tokens:,}", flops, moved, (tokens, 1), PREFILL_EFFICIENCY)

    def decode(self, batch: int | None = None) -> Floor:
        """One step of `batch` streams, each with a context behind it."""
        if self.in_decode is not self:
            return self.in_decode.decode(batch)
        streams, context = batch or self.settings.batch, self.settings.context
        flops = streams * (
            self.cost.flops_per_token
            + self.cost.flops_per_sample
            + context * self.cost.flops_per_kv_token
            + context * self.cost.more_flops_per_decode_kv_token
        )
        moved = self.cost.weight_bytes(1, streams)
        moved += streams * (context + 1) * self.kv_bytes_per_token
        name, sent = f"decode, batch {streams}", (streams, streams)
        return self._floor(name, flops, moved, sent, DECODE_EFFICIENCY)

    def _floor(
        self, name: str, flops: float, moved: float, sent: tuple[int, int], efficiency: float
    ) -> Floor:
        """`sent`: tokens and samples, which the ranks tell each other of."""
        if self.hardware.measured:
            efficiency = 1.0  # the rates are what kernels reach here
        return Floor(
            name,
            flops,
            moved,
            flops / self.rate,
            moved / self.bandwidth,
            self.comm_s(*sent),
            efficiency,
        )

    def comm_s(self, tokens: int, samples: int) -> float:
        """Of 16-bit activations, summed and gathered by a ring."""
        ranks = self.settings.tensor_parallel
        if ranks == 1 or self.spec is None or not self.hardware.link:
            return 0.0
        sent = ring_bytes(self.spec, ranks, 2, tokens, samples) * (ranks - 1) / ranks
        return sent / self.hardware.link

    @property
    def kv_tokens(self) -> float | None:
        """Tokens that fit beside the weights; None where a token's size is not known."""
        room = RESERVED * self.hardware.memory * self.settings.tensor_parallel - self.weight_bytes
        if not self.kv_bytes_per_token:
            return None
        return max(0.0, room / self.kv_bytes_per_token)

    @property
    def compute_bound_batch(self) -> float:
        """Streams from which on a decode step is bound by products; inf if attention's reading
        keeps it bound by memory for ever."""
        if self.in_decode is not self:
            return self.in_decode.compute_bound_batch
        per_stream = self.decode(1).flops / self.rate
        kv = (self.settings.context + 1) * self.kv_bytes_per_token / self.bandwidth
        weights = self.cost.weight_bytes(1) / self.bandwidth
        return math.inf if per_stream <= kv else weights / (per_stream - kv)

    @property
    def kv_bound_batch(self) -> float:
        """Streams whose keys and values are as many bytes as the weights: beyond it a larger batch
        gains less than half of what it adds."""
        each = (self.settings.context + 1) * self.kv_bytes_per_token
        return self.in_decode.cost.weight_bytes(1) / each if each else math.inf

    def notes(self) -> list[str]:
        """Where this differs from the rules of thumb, in figures."""
        settings, width = self.settings, self.width
        thumb = 2 * self.active_parameters * settings.prompt / self.rate
        own = self.in_decode.width
        read = self.active_parameters * own / self.bandwidth
        active = "" if self.active_parameters == self.parameters else "active "
        found = [
            f"Rule of thumb: prefill 2 × {self.active_parameters / 1e9:.2f}e9 {active}parameters × "
            f"{settings.prompt:,} tokens / {rate_words(self.rate)} = {1e3 * thumb:.1f} ms; "
            f"decode {own:.3g} bytes × {active}parameters / {self.bandwidth / 1e9:,.0f} GB/s = "
            f"{1e3 * read:.2f} ms."
        ]
        if self.spec is None:
            found.append(
                "Only the size is known: attention, keys and values are not counted; name a model "
                "for them."
            )
            return found
        found += [
            "Ours counts the embedding as no product, the output head for the sampled token alone, "
            "and adds attention over the prompt and the keys and values that decode reads.",
            f"A token's {self._cached()} × {KV_BYTES[settings.kv]:g} bytes = "
            f"{self.kv_bytes_per_token / 1e6:.3f} MB.",
        ]
        if self.spec.has_latents:
            found.append(
                "Prefill counts keys and values of all heads, expanded from the latents; decode "
                "attends in the latents' space, with more FLOPs a position and fewer bytes."
            )
        if self.spec.has_experts:
            found.append(
                "Experts: FLOPs are of those that a token goes through, k of n; bytes of those "
                "that a step's tokens are expected to choose, n (1 − (1 − k/n)^tokens), if all are "
                "equally likely and tokens choose on their own. Where some are chosen more often "
                "than others a step reads fewer."
            )
        if settings.weights == FILE:
            found.append(f"Weights are as the file has them, {8 * width:.2f} bits each on average.")
        if settings.decode_weights is not None:
            found.append(
                f"Prefill reads {settings.weights} weights and decode {settings.decode_weights} "
                "ones; both are in memory."
            )
        if {settings.weights, settings.decode_weights} & {"int4", "fp4"}:
            found.append("4-bit weights count 4.5 bits each: a 16-bit scale for 32 of them.")
        if not self.hardware.measured:
            found.append(
                "Rates are the data sheet's, dense and at full clock; estimates divide by "
                f"{PREFILL_EFFICIENCY:.0%} (prefill) and {DECODE_EFFICIENCY:.0%} (decode), which "
                "good kernels reach."
            )
        return found

    def experts_in_use(self, tokens: int) -> tuple[float, float]:
        """How many a step of so many tokens is expected to read in a layer, and of how many: the
        mean over layers that have experts."""
        layers = [] if self.spec is None else [layer.mlp for layer in self.spec.layers]
        found = [mlp for mlp in layers if isinstance(mlp, ExpertsSpec)]
        used = sum(mlp.experts_in_use(tokens) for mlp in found)
        count = max(1, len(found))
        return used / count, sum(mlp.num_experts for mlp in found) / count

    def _cached(self) -> str:
        """What of a token is in the cache, and how much."""
        assert self.spec is not None
        count = self.spec.kv_elements_per_token
        if not self.spec.has_latents:
            return f"keys and values: 2 × {count // 2:,} numbers"
        return f"latents and rope keys: {count:,} numbers"

    @property
    def expanded_kv_bytes_per_token(self) -> float:
        """What a token would take if no layer cached latents."""
        if self.spec is None:
            return self.kv_bytes_per_token
        return self.spec.expanded_kv_elements_per_token * KV_BYTES[self.settings.kv]

    def as_json(self) -> dict[str, Any]:
        floors = {"prefill": self.prefill().as_json(), "decode": self.decode().as_json()}
        return {
            "schema_version": 1,
            "hardware": {
                "name": self.hardware.name,
                "flops_per_s": self.rate,
                "bytes_per_s": self.bandwidth,
                "memory_bytes": self.hardware.memory,
                "measured": self.hardware.measured,
            },
            "settings": self.settings.__dict__,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "experts_in_use": {
                "prefill": self.experts_in_use(self.settings.prompt)[0],
                "decode": self.experts_in_use(self.settings.batch)[0],
            },
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "expanded_kv_bytes_per_token": self.expanded_kv_bytes_per_token,
            "kv_tokens": self.kv_tokens,
            "ridge_flops_per_byte": self.ridge,
            "compute_bound_batch": _finite(self.compute_bound_batch),
            "kv_bound_batch": _finite(self.kv_bound_batch),
            "floors": floors,
            "notes": self.notes(),
        }


@dataclass(frozen=True)
class MeasuredPhase:
    """What a running server's steps of one phase did: work and time, summed."""

    name: str
    flops: float
    num_bytes: float
    seconds: float
    steps: int

    @property
    def intensity(self) -> float:
        return self.flops / self.num_bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "phase": self.name,
            "steps": self.steps,
            "intensity_flops_per_byte": self.intensity,
            "flops_per_s": self.flops_per_s,
            "bytes_per_s": self.num_bytes / self.seconds,
        }


def roofline_json(model: str, found: Roofline, measured: Sequence[MeasuredPhase]) -> dict[str, Any]:
    return (
        {"model": model}
        | found.as_json()
        | {
            "measured": [one.as_json() for one in measured],
            "definitions": DEFINITIONS,
            "environment": environment(),
        }
    )


def measured_phases(steps: list[dict[str, Any]]) -> list[MeasuredPhase]:
    """From step records (`/records`): steps that had one phase only, so that nothing is
    attributed."""
    found = []
    for phase, other in (("prefill", "decode"), ("decode", "prefill")):
        pure = [
            s for s in steps if s[phase]["tokens"] and not s[other]["tokens"] and s["device_s"] > 0
        ]
        if pure:
            found.append(
                MeasuredPhase(
                    phase,
                    sum(step[phase]["flops"] for step in pure),
                    sum(step[phase]["num_bytes"] for step in pure),
                    sum(step["device_s"] for step in pure),
                    len(pure),
                )
            )
    return found


def rate_words(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.0f} GFLOP/s"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
