"""Which weights torch's backends keep in fp8 or int8, and what they take there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.model.describe.hf_w8a8 import W8Config
from twostroke.model.describe.spec import ExpertsSpec, LayerSpec, ModelSpec, projections
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import WeightSource
from twostroke.model.weights.safetensors import SafetensorsWeights

SCALE_BYTES = 4
TYPES = ("fp8", "int8")  # of --quantization
DENSE = (None, BlockType.F32, BlockType.F16, BlockType.BF16)


class W8Format(NamedTuple):
    type: str  # fp8 or int8
    scales_of_a_row: int = 1

    @property
    def needs_fp8(self) -> bool:
        """Of a GPU's matrix units."""
        return self.type == "fp8"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) + SCALE_BYTES * shape[0] * self.scales_of_a_row


def w8_matrices(
    spec: ModelSpec, source: WeightSource, quantization: str | None
) -> dict[str, W8Format]:
    """The weights that are kept in fp8 or int8, as their file has them or as `quantization` asks.
    Matrices that are one product are so together or not at all; embedding, head, routers and
    experts never. In a file that is in one of them, what is not is left."""
    found: dict[str, W8Format] = {}
    wanted = quantization if quantization in TYPES and not _is_quantized(source) else None
    if wanted and any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError(
            f"quantization is {wanted!r}, which does not quantise experts as yet; leave "
            "quantization out"
        )
    for names in products(spec):
        stored = [format for name in names if (format := _stored_format(source, name))]
        if len(stored) == len(names):
            found |= dict(zip(names, stored, strict=True))
        elif wanted:
            refuse_quantised(source, names, wanted)
            found |= dict.fromkeys(names, W8Format(wanted))
    return found


def is_weight_only(source: WeightSource) -> bool:
    """Whether the model was made for activations as they are."""
    quantized = _quantized(source)
    return quantized is not None and quantized.weight_only


def products(spec: ModelSpec) -> Iterator[Sequence[str]]:
    """The matrices that are multiplied with as one, of each layer."""
    for number, layer in enumerate(spec.layers):
        for names in _layer_products(layer):
            yield [f"layers.{number}.{name}" for name in names]


def _layer_products(layer: LayerSpec) -> Iterator[Sequence[str]]:
    latent, mlp = layer.attention.latent, layer.mlp
    yield projections(layer.attention)
    if latent is not None and latent.q_lora_rank:
        yield ("q_b",)
    yield ("o",)
    if isinstance(mlp, ExpertsSpec):
        if mlp.shared is not None:
            yield [f"shared.{name}" for name in mlp.shared.gate_up]
            yield ("shared.down",)
    else:
        yield mlp.gate_up
        yield ("down",)


def _quantized(source: WeightSource) -> W8Config | None:
    known = source.quantized if isinstance(source, SafetensorsWeights) else None
    return known if isinstance(known, W8Config) else None


def _is_quantized(source: WeightSource) -> bool:
    """By its maker, in any format that leaves some of its matrices in floats."""
    return isinstance(source, SafetensorsWeights) and source.quantized is not None


def _stored_format(source: WeightSource, name: str) -> W8Format | None:
    """None if the file does not have it so."""
    known = _quantized(source)
    if known is None or not isinstance(source, SafetensorsWeights):
        return None
    scales = source.w8_scales(name)
    return W8Format(known.type, scales) if scales else None


def refuse_quantised(source: WeightSource, names: Sequence[str], asked: str) -> None:
    for name in names:
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"quantization is {asked!r}, but {source.label(name)} is quantised already "
                f"({stored}); leave quantization out, or use the model's own weights"
            )
