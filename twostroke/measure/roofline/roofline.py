"""Lower bounds on the time of prefill and decode, from a model's shape and a machine's rates.

    prefill   FLOPs of the prompt / matmul rate, or bytes to read / bandwidth
    decode    bytes of a step (weights once, the KV of every stream) / bandwidth, or FLOPs / rate

A floor is the shortest time that the rates allow. An estimate is the floor divided by the
efficiency of good kernels. Measured figures come from a running server.
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
    "floor": "the shortest time at the machine's rates: the larger of FLOPs / matmul rate and "
    "bytes / bandwidth, plus the communication between devices",
    "estimate": "the floor divided by the efficiency of good kernels on a data sheet's rates; on a "
    "measured machine, the floor",
    "FLOPs a byte": "arithmetic intensity; below the ridge a step is memory-bound, above it "
    "compute-bound",
    "measured": "FLOPs and bytes of a running server's steps with one phase only, over their time",
}
FILE = "file"  # weights as stored in a GGUF file (`stored` of `Roofline`)
MEMORY_SHARE = 0.9  # for weights and KV: the default of --gpu-memory-utilization


@dataclass(frozen=True)
class RooflineSettings:
    """The lengths, the batch and the formats of a roofline."""

    prompt: int = 1024
    context: int = 1024  # positions that a decode slot attends to
    batch: int = 1
    tensor_parallel: int = 1
    weights: str = "fp16"
    kv: str = "fp16"
    decode_weights: str | None = None  # format of decode's own weights, if it differs


@dataclass(frozen=True)
class Floor:
    """The FLOPs and bytes of one step, and the shortest time for them."""

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
    """A model on a machine.

    `spec` is None if only the number of parameters is known. `stored`: the bytes of each weight,
    which replace the format `settings.weights`.
    """

    def __init__(
        self,
        spec: ModelSpec | None,
        hardware: Hardware,
        settings: RooflineSettings,
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
        """FLOPs a byte above which a step is compute-bound."""
        return self.rate / self.bandwidth

    @property
    def kv_bytes_per_token(self) -> float:
        return self.cost.kv_bytes_per_token

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights in memory, of both formats if there are two."""
        decode_bytes = 0.0 if self.in_decode is self else self.in_decode.weight_bytes
        return self.parameters * self.width + decode_bytes

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
        """Return the floor of a decode step of `batch` streams at the context of the settings."""
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
        """Return a floor. `sent`: tokens and samples that the ranks exchange."""
        if self.hardware.measured:
            efficiency = 1.0  # measured rates are rates of kernels
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
        """Return the seconds for the ring reduction and gathering of 16-bit activations."""
        ranks = self.settings.tensor_parallel
        if ranks == 1 or self.spec is None or not self.hardware.link:
            return 0.0
        sent = ring_bytes(self.spec, ranks, 2, tokens, samples) * (ranks - 1) / ranks
        return sent / self.hardware.link

    @property
    def kv_tokens(self) -> float | None:
        """KV cache tokens that fit in memory with the weights; None if their size is not known."""
        room = (
            MEMORY_SHARE * self.hardware.memory * self.settings.tensor_parallel - self.weight_bytes
        )
        if not self.kv_bytes_per_token:
            return None
        return max(0.0, room / self.kv_bytes_per_token)

    @property
    def compute_bound_batch(self) -> float:
        """The number of streams above which decode is compute-bound; inf if the reads of the KV
        cache keep decode memory-bound."""
        if self.in_decode is not self:
            return self.in_decode.compute_bound_batch
        per_stream = self.decode(1).flops / self.rate
        kv = (self.settings.context + 1) * self.kv_bytes_per_token / self.bandwidth
        weights = self.cost.weight_bytes(1) / self.bandwidth
        return math.inf if per_stream <= kv else weights / (per_stream - kv)

    @property
    def kv_bound_batch(self) -> float:
        """The number of streams whose KV cache is as large as the weights. Above this number,
        doubling the batch raises the throughput by less than a third."""
        each = (self.settings.context + 1) * self.kv_bytes_per_token
        return self.in_decode.cost.weight_bytes(1) / each if each else math.inf

    def notes(self) -> list[str]:
        """Return notes on how this roofline differs from the rules of thumb, with figures."""
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
                "Only the size is known, so attention and the KV cache are not counted; name a "
                "model to count them."
            )
            return found
        found += [
            "This roofline counts no matmul for the embedding and the output head only for the "
            "sampled token, and adds attention over the prompt and decode's reads of the KV cache.",
            f"A token's {self._cached()} × {KV_BYTES[settings.kv]:g} bytes = "
            f"{self.kv_bytes_per_token / 1e6:.3f} MB.",
        ]
        if self.spec.has_latents:
            found.append(
                "Prefill counts the keys and values of all heads, expanded from the latents; "
                "decode attends to the latents, with more FLOPs and fewer bytes for each position."
            )
        if self.spec.has_experts:
            found.append(
                "Experts: FLOPs count the k of n experts of each token; bytes count the expected "
                "number of different experts in a step, n (1 − (1 − k/n)^tokens), for independent "
                "and uniform choices. With uneven choices a step reads fewer experts."
            )
        if settings.weights == FILE:
            found.append(
                f"Weights have the formats of the file, {8 * width:.2f} bits each on average."
            )
        if settings.decode_weights is not None:
            found.append(
                f"Prefill reads {settings.weights} weights and decode {settings.decode_weights} "
                "weights; both are in memory."
            )
        if {settings.weights, settings.decode_weights} & {"int4", "fp4"}:
            found.append("4-bit weights count 4.5 bits each, with a 16-bit scale for 32 weights.")
        if not self.hardware.measured:
            found.append(
                "Rates come from the data sheet, dense and at full clock; estimates divide by "
                f"{PREFILL_EFFICIENCY:.0%} (prefill) and {DECODE_EFFICIENCY:.0%} (decode), the "
                "efficiency of good kernels."
            )
        return found

    def experts_in_use(self, tokens: int) -> tuple[float, float]:
        """Return the expected number of experts that a step reads in a layer, and the number of
        experts of a layer: means over the layers with experts."""
        layers = [] if self.spec is None else [layer.mlp for layer in self.spec.layers]
        found = [mlp for mlp in layers if isinstance(mlp, ExpertsSpec)]
        used = sum(mlp.experts_in_use(tokens) for mlp in found)
        count = max(1, len(found))
        return used / count, sum(mlp.num_experts for mlp in found) / count

    def _cached(self) -> str:
        """Return a text with the cached numbers of a token."""
        assert self.spec is not None
        count = self.spec.kv_elements_per_token
        if not self.spec.has_latents:
            return f"keys and values: 2 × {count // 2:,} numbers"
        return f"latents and rope keys: {count:,} numbers"

    @property
    def expanded_kv_bytes_per_token(self) -> float:
        """KV bytes of a token if layers cached keys and values instead of latents."""
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
    """The total work and time of a running server's steps with one phase only."""

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


def roofline_json(
    model: str, roofline: Roofline, measured: Sequence[MeasuredPhase]
) -> dict[str, Any]:
    return (
        {"model": model}
        | roofline.as_json()
        | {
            "measured": [one.as_json() for one in measured],
            "definitions": DEFINITIONS,
            "environment": environment(),
        }
    )


def measured_phases(steps: list[dict[str, Any]]) -> list[MeasuredPhase]:
    """Return the figures of each phase from step records (`/records`), of steps with one phase
    only."""
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
