"""FLOPs and bytes of work, from the spec alone. This module does not import torch.

Floors, rooflines, the memory plan and the step-time model use these counts:

    linear      2 FLOPs per weight of the layers and token; the head only where it is sampled
    attention   4 FLOPs per query channel and visible position (QKᵀ and PV), layer by layer; latent
                attention has more channels in decode, and a chunk expands the latents before it
    bytes       the weights once per step, the keys and values read and written
    experts     FLOPs of the experts of a token, bytes of the experts that a step's tokens are
                expected to choose (`ExpertsSpec.experts_in_use`)

Every token counts in every layer, as is usual. Our decoders do a little less: in the last layer
they compute the part after keys and values for sampled tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.model.describe.spec import LATENT_EXPANDING, ExpertsSpec, ModelSpec
from twostroke.plan import PhaseWork

# A layer's matrix → the stage of the native decoder that multiplies by it.
STAGES = {
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "q_a": "qkv",
    "q_b": "qkv",
    "kv_a": "qkv",
    "kv_b": "qkv",
    "k_b": "qkv",
    "v_b": "qkv",
    "o": "output",
    "gate": "gate_up",
    "up": "gate_up",
    "down": "down",
    "router": "route",
}


class Work(NamedTuple):
    """FLOPs and bytes of a stage, or of one token in a stage."""

    flops: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: tuple[float, float]) -> Work:  # type: ignore[override]
        return Work(self.flops + other[0], self.num_bytes + other[1])


class ModelFigures(NamedTuple):
    """A model's size and step costs for a web page: numbers of `CostModel`, without latents and
    experts. All 0: unknown."""

    parameters: float = 0.0
    layers: int = 0
    heads: int = 0  # of the first layer
    flops_per_token: float = 0.0
    flops_per_sample: float = 0.0
    flops_per_kv_token: float = 0.0
    layer_weight_bytes: float = 0.0
    head_weight_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0


NO_FIGURES = ModelFigures()


@dataclass(frozen=True, slots=True)
class CostModel:
    flops_per_token: float
    flops_per_sample: float
    flops_per_kv_token: float  # in all layers: `PhaseWork` has the mean over them
    layer_weight_bytes: float
    head_weight_bytes: float
    kv_bytes_per_token: float
    # By stage, all layers, without experts: FLOPs per token, bytes per step.
    linears: Mapping[str, Work] = field(default_factory=dict)
    # Layers with latents: the extra FLOPs of decode for each attended position, and the FLOPs to
    # expand a position, which a chunk does for earlier positions.
    more_flops_per_decode_kv_token: float = 0.0
    expand_flops_per_kv_token: float = 0.0
    # By stage, for each mixture of experts: FLOPs per token, bytes of all experts.
    experts: Sequence[tuple[ExpertsSpec, str, Work]] = ()
    # For steps that only decode, if they read other bytes than steps with prefill.
    decode_only: CostModel | None = None

    def for_step(self, prefill_tokens: int) -> CostModel:
        """Return the costs of a step with this number of prefill tokens."""
        return self if prefill_tokens or self.decode_only is None else self.decode_only

    def prefill_flops(self, work: PhaseWork, samples: int) -> float:
        earlier = work.kv_reads - work.tokens
        return self._flops(work, samples) + earlier * self.expand_flops_per_kv_token

    def decode_flops(self, work: PhaseWork) -> float:
        more = work.kv_tokens * self.more_flops_per_decode_kv_token
        return self._flops(work, work.tokens) + more

    def _flops(self, work: PhaseWork, samples: int) -> float:
        return (
            work.tokens * self.flops_per_token
            + samples * self.flops_per_sample
            + work.kv_tokens * self.flops_per_kv_token
        )

    def kv_bytes(self, work: PhaseWork) -> float:
        return (work.kv_reads + work.tokens) * self.kv_bytes_per_token

    def weight_bytes(self, samples: int, tokens: float = math.inf) -> float:
        """Return the bytes of weights that a step with `tokens` tokens reads."""
        unused = 0.0
        for spec, _, work in self.experts:
            unused += work.num_bytes * _unused(spec, tokens)
        head = self.head_weight_bytes if samples else 0.0
        return self.layer_weight_bytes - unused + head

    def stages(self, prefill: PhaseWork, decode: PhaseWork, samples: int) -> dict[str, Work]:
        """Return the work of each stage of a step, where it is known."""
        tokens, read = prefill.tokens + decode.tokens, prefill.kv_reads + decode.kv_reads
        found = {
            stage: Work(tokens * one.flops, one.num_bytes) for stage, one in self.linears.items()
        }
        for spec, stage, one in self.experts:
            used = 1 - _unused(spec, tokens)
            done = Work(tokens * one.flops, one.num_bytes * used)
            found[stage] = found.get(stage, Work()) + done
        attended = (prefill.kv_tokens + decode.kv_tokens) * self.flops_per_kv_token
        attended += decode.kv_tokens * self.more_flops_per_decode_kv_token
        attended += (prefill.kv_reads - prefill.tokens) * self.expand_flops_per_kv_token
        found["attend"] = Work(attended, read * self.kv_bytes_per_token)
        if samples:
            found["head"] = Work(samples * self.flops_per_sample, self.head_weight_bytes)
        return found


def cost_model(spec: ModelSpec, weight_bytes: Mapping[str, float], kv_itemsize: float) -> CostModel:
    """Return the costs of a model. `weight_bytes`: canonical name → stored bytes of the matrix."""
    shapes = spec.weight_shapes()
    matrices = [
        name for name, shape in shapes.items() if len(shape) == 2 and name.startswith("layers.")
    ]
    head = "embed" if spec.tie_embeddings else "head"
    linears: dict[str, Work] = {}
    experts: dict[tuple[int, str], Work] = {}
    for name in matrices:
        stage = STAGES[name.rpartition(".")[2]]
        one = Work(2.0 * math.prod(shapes[name]), weight_bytes[name])
        if ".experts." in name:
            number = int(name.split(".")[1])
            mlp = spec.layers[number].mlp
            assert isinstance(mlp, ExpertsSpec)
            share = mlp.routing.experts_per_token / mlp.num_experts
            one = Work(one.flops * share, one.num_bytes)
            experts[number, stage] = experts.get((number, stage), Work()) + one
        else:
            linears[stage] = linears.get(stage, Work()) + one
    mixtures = [(spec.layers[n].mlp, stage, work) for (n, stage), work in experts.items()]
    works = [*linears.values(), *experts.values()]
    attentions = [layer.attention for layer in spec.layers]
    channels = sum(attention.prefill_channels for attention in attentions)
    expanding = [name for name in matrices if name.rpartition(".")[2] in LATENT_EXPANDING]
    return CostModel(
        flops_per_token=sum(work.flops for work in works),
        flops_per_sample=2.0 * math.prod(shapes[head]),
        flops_per_kv_token=2.0 * channels,
        layer_weight_bytes=float(sum(weight_bytes[name] for name in matrices)),
        head_weight_bytes=float(weight_bytes[head]),
        kv_bytes_per_token=spec.kv_elements_per_token * kv_itemsize,
        linears=linears,
        more_flops_per_decode_kv_token=2.0
        * (sum(attention.decode_channels for attention in attentions) - channels),
        expand_flops_per_kv_token=2.0 * sum(math.prod(shapes[name]) for name in expanding),
        experts=tuple(mixtures),  # type: ignore[arg-type]
    )


def model_figures(spec: ModelSpec, cost: CostModel) -> ModelFigures:
    return ModelFigures(
        parameters=float(spec.num_parameters()),
        layers=spec.num_layers,
        heads=spec.layers[0].attention.num_heads,
        flops_per_token=cost.flops_per_token,
        flops_per_sample=cost.flops_per_sample,
        flops_per_kv_token=cost.flops_per_kv_token,
        layer_weight_bytes=cost.layer_weight_bytes,
        head_weight_bytes=cost.head_weight_bytes,
        kv_bytes_per_token=cost.kv_bytes_per_token,
    )


def ring_bytes(
    spec: ModelSpec, ranks: int, itemsize: int, tokens: int, samples: int, last: int | None = None
) -> int:
    """Return the `Comm.ring_bytes` of a step on `ranks` ranks: each sends (ranks - 1) / ranks of
    it.

    `last`: tokens that the last layer computes beyond keys and values; by default all.
    """
    last = tokens if last is None else last
    rows = tokens * (1 + 2 * (spec.num_layers - 1)) + 2 * last  # the embedding, then o and down
    norms = sum(layer.attention.qk_norm == "full" for layer in spec.layers)
    summed = rows * spec.hidden_size * itemsize + 2 * norms * tokens * 4
    gathered = samples * -(-spec.vocab_size // ranks) * itemsize
    return 2 * summed + gathered + samples * 4


def _unused(spec: ExpertsSpec, tokens: float) -> float:
    """Return the share of the experts that no token of a step is expected to choose."""
    return 1 - spec.experts_in_use(tokens) / spec.num_experts


def dense_weight_bytes(spec: ModelSpec, itemsize: int) -> dict[str, float]:
    """Return the bytes of each weight, for weights that all have one type."""
    return {name: itemsize * math.prod(shape) for name, shape in spec.weight_shapes().items()}
