"""FLOPs and bytes of work, from the spec alone: every token in every layer. No torch here.

Floors, rooflines, the memory plan and the step-time model all count with this file:

    linear      2 FLOPs per weight of the layers and token; the head only where it is sampled
    attention   4 FLOPs per query channel and visible position (QKᵀ and PV), layer by layer
    bytes       the weights once a step, the keys and values read, those written

This is how everyone counts. Our decoders do a little less: what comes after the keys and values of
the last layer they do for the tokens that are sampled alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from twostroke.model.spec import ModelSpec
from twostroke.plan import PhaseWork


@dataclass(frozen=True, slots=True)
class CostModel:
    flops_per_token: float
    flops_per_sample: float
    flops_per_kv_token: float  # in all layers: `PhaseWork` has the mean over them
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


def cost_model(spec: ModelSpec, weight_bytes: Mapping[str, float], kv_itemsize: float) -> CostModel:
    """`weight_bytes`: of each matrix as it is stored, by canonical name."""
    shapes = spec.weight_shapes()
    matrices = [
        name for name, shape in shapes.items() if len(shape) == 2 and name.startswith("layers.")
    ]
    head = "embed" if spec.tie_embeddings else "head"
    return CostModel(
        flops_per_token=2.0 * sum(math.prod(shapes[name]) for name in matrices),
        flops_per_sample=2.0 * math.prod(shapes[head]),
        flops_per_kv_token=4.0 * sum(layer.attention.q_size for layer in spec.layers),
        layer_weight_bytes=float(sum(weight_bytes[name] for name in matrices)),
        head_weight_bytes=float(weight_bytes[head]),
        kv_bytes_per_token=spec.kv_elements_per_token * kv_itemsize,
    )


def dense_weight_bytes(spec: ModelSpec, itemsize: int) -> dict[str, float]:
    """Of a model whose weights are all kept in one type."""
    return {name: itemsize * math.prod(shape) for name, shape in spec.weight_shapes().items()}
