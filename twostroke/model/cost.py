"""FLOPs and bytes of work, from the spec alone: every token in every layer. No torch here.

Floors, rooflines, the memory plan and the step-time model all count with this file:

    linear      2 FLOPs per weight of the layers and token; the head only where it is sampled
    attention   4 FLOPs per query channel and visible position (QKᵀ and PV)
    bytes       the weights once a step, the keys and values read, those written

This is how everyone counts. Our decoders do a little less: what comes after the keys and values of
the last layer they do for the tokens that are sampled alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.model.spec import ModelSpec
from twostroke.plan import PhaseWork


@dataclass(frozen=True, slots=True)
class CostModel:
    flops_per_token: float
    flops_per_sample: float
    flops_per_kv_token: float
    layer_weight_bytes: float
    head_weight_bytes: float
    kv_bytes_per_token: float

    def flops(self, work: PhaseWork, samples: int) -> float:
        return (
            work.tokens * self.flops_per_token
            + samples * self.flops_per_sample
            + work.kv_tokens * self.flops_per_kv_token
        )

    def kv_bytes(self, work: PhaseWork) -> float:
        return (work.kv_reads + work.tokens) * self.kv_bytes_per_token

    def weight_bytes(self, samples: int) -> float:
        return self.layer_weight_bytes + (self.head_weight_bytes if samples else 0.0)


def cost_model(spec: ModelSpec, weight_bytes_each: float, kv_bytes_each: float) -> CostModel:
    """`*_each`: bytes per weight as stored, bytes per element of the KV cache."""
    shapes = spec.weight_shapes()
    head = math.prod(shapes["embed"])
    matrices = [s for name, s in shapes.items() if len(s) == 2 and name.startswith("layers.")]
    layers = sum(math.prod(shape) for shape in matrices)
    return CostModel(
        flops_per_token=2.0 * layers,
        flops_per_sample=2.0 * head,
        flops_per_kv_token=4.0 * spec.q_size * spec.num_layers,
        layer_weight_bytes=layers * weight_bytes_each,
        head_weight_bytes=head * weight_bytes_each,
        kv_bytes_per_token=spec.kv_elements_per_token * kv_bytes_each,
    )
