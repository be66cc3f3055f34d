"""The weights that the torch backends store in fp8 or int8, and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.model.describe.hf_w8a8 import W8Config
from twostroke.model.describe.spec import ExpertsSpec, LayerSpec, ModelSpec, input_projections
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import WeightSource
from twostroke.model.weights.safetensors import SafetensorsWeights

SCALE_BYTES = 4
TYPES = ("fp8", "int8")  # values of --quantization
DENSE = (None, BlockType.F32, BlockType.F16, BlockType.BF16)


class W8Format(NamedTuple):
    type: str  # fp8 or int8
    scales_per_row: int = 1

    @property
    def needs_fp8(self) -> bool:
        """Return whether the GPU's matrix units must support fp8."""
        return self.type == "fp8"

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) + SCALE_BYTES * shape[0] * self.scales_per_row


def w8_formats(
    spec: ModelSpec, source: WeightSource, quantization: str | None
) -> dict[str, W8Format]:
    """Return the formats of the weights in fp8 or int8, from their file or from `quantization`.

    Either all matrices of a linear group have such a format, or none of them. Embedding, head,
    routers and experts never have such a format. `quantization` has no effect on a quantised
    safetensors checkpoint.
    """
    found: dict[str, W8Format] = {}
    wanted = quantization if quantization in TYPES and not _is_quantized(source) else None
    if wanted and any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError(
            f"quantization is {wanted!r}, which does not support experts yet; leave "
            "quantization out"
        )
    for names in linear_groups(spec):
        stored = [format for name in names if (format := _stored_format(source, name))]
        if len(stored) == len(names):
            found |= dict(zip(names, stored, strict=True))
        elif wanted:
            require_unquantised(source, names, wanted)
            found |= dict.fromkeys(names, W8Format(wanted))
    return found


def is_weight_only(source: WeightSource) -> bool:
    """Return whether the checkpoint is for unquantised activations."""
    quantized = _quantized(source)
    return quantized is not None and quantized.weight_only


def linear_groups(spec: ModelSpec) -> Iterator[Sequence[str]]:
    """Yield the groups of matrices that are multiplied in one matmul, layer by layer."""
    for number, layer in enumerate(spec.layers):
        for names in _linear_groups_of_layer(layer):
            yield [f"layers.{number}.{name}" for name in names]


def _linear_groups_of_layer(layer: LayerSpec) -> Iterator[Sequence[str]]:
    latent, mlp = layer.attention.latent, layer.mlp
    yield input_projections(layer.attention)
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
    """Return whether the checkpoint is quantised, in any format."""
    return isinstance(source, SafetensorsWeights) and source.quantized is not None


def _stored_format(source: WeightSource, name: str) -> W8Format | None:
    """Return the format of a matrix in its file; None if it is not in fp8 or int8."""
    known = _quantized(source)
    if known is None or not isinstance(source, SafetensorsWeights):
        return None
    scales = source.w8_scales(name)
    return W8Format(known.type, scales) if scales else None


def require_unquantised(source: WeightSource, names: Sequence[str], wanted: str) -> None:
    """Raise `ConfigError` if one of these matrices is quantised in its file already."""
    for name in names:
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"quantization is {wanted!r}, but {source.label(name)} is quantised already "
                f"({stored}); leave quantization out, or use the model's own weights"
            )
