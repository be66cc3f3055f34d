"""Which weights torch's backends keep in fp8, and what they take there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.model.block_types import BlockType
from twostroke.model.hf_fp8 import Fp8Config
from twostroke.model.spec import ExpertsSpec, LayerSpec, ModelSpec, projections
from twostroke.model.weights import WeightSource
from twostroke.model.weights.safetensors import SafetensorsWeights

SCALE_BYTES = 4
DENSE = (None, BlockType.F32, BlockType.F16, BlockType.BF16)


class Fp8Format(NamedTuple):
    scales_of_a_row: int

    @property
    def needs_fp8(self) -> bool:
        """Of a GPU's matrix units."""
        return True

    @property
    def is_untried(self) -> bool:
        """No GPU has run it as yet."""
        return False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) + SCALE_BYTES * shape[0] * self.scales_of_a_row


def fp8_matrices(spec: ModelSpec, source: WeightSource, quantization: str | None) -> dict[str, int]:
    """The weights that are kept in fp8, as their file has them or as `quantization` asks, with the
    scales that a row of each has. Matrices that are one product are so together or not at all;
    embedding, head, routers and experts never. In a file that is in fp8, what is not is left."""
    found: dict[str, int] = {}
    wanted = quantization == "fp8" and _quantized(source) is None
    if wanted and any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError(
            "quantization is 'fp8', which does not quantise experts as yet; leave quantization out"
        )
    for names in products(spec):
        stored = [_stored_scales(source, name) for name in names]
        if all(stored):
            found |= dict(zip(names, stored, strict=True))
        elif wanted:
            refuse_quantised(source, names, "fp8")
            found |= dict.fromkeys(names, 1)
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


def _quantized(source: WeightSource) -> Fp8Config | None:
    known = source.quantized if isinstance(source, SafetensorsWeights) else None
    return known if isinstance(known, Fp8Config) else None


def _stored_scales(source: WeightSource, name: str) -> int:
    """0 if the file does not have it in fp8."""
    return source.fp8_scales(name) if isinstance(source, SafetensorsWeights) else 0


def refuse_quantised(source: WeightSource, names: Sequence[str], asked: str) -> None:
    for name in names:
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"quantization is {asked!r}, but {source.label(name)} is quantised already "
                f"({stored}); leave quantization out, or use the model's own weights"
            )
