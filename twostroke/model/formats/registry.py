"""The formats that torch's backends keep a model's matrices in, where that is not its dtype."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from twostroke.errors import ConfigError
from twostroke.model.describe.spec import ExpertsSpec, ModelSpec
from twostroke.model.formats.w8a8_weights import W8Format, products, refuse_quantised, w8_matrices
from twostroke.model.weights import WeightSource
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.packed_blocks import BLOCK_FORMATS
from twostroke.model.weights.packed_format import PackedFormat
from twostroke.model.weights.safetensors import SafetensorsWeights

log = logging.getLogger(__name__)

INT4_GROUPS = (128, 64, 32)  # of --quantization int4: the first that divides a matrix's columns

Format = W8Format | PackedFormat


def weight_formats(
    spec: ModelSpec, source: WeightSource, quantization: str | None, blocks: bool = False
) -> dict[str, Format]:
    """Of the weights that are kept as their file has them or as `quantization` asks. `blocks`:
    those of a GGUF file stay packed, too."""
    found: dict[str, Format] = {**w8_matrices(spec, source, quantization)}
    return found | packed_matrices(spec, source, quantization, blocks)


def weight_bytes(spec: ModelSpec, itemsize: int, formats: Mapping[str, Format]) -> dict[str, float]:
    """Of each weight, as torch's backends keep them."""
    return {
        name: formats[name].num_bytes(shape) if name in formats else itemsize * math.prod(shape)
        for name, shape in spec.weight_shapes().items()
    }


def packed_matrices(
    spec: ModelSpec, source: WeightSource, quantization: str | None, blocks: bool = False
) -> dict[str, PackedFormat]:
    """The weights that are kept in 4 or 8 bits. Matrices that are one product are so together or
    not at all; embedding, head, routers and experts never."""
    wanted = quantization == "int4"
    if wanted and any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError(
            "quantization is 'int4', which does not quantise experts as yet; leave quantization out"
        )
    shapes = spec.weight_shapes()
    found: dict[str, PackedFormat] = {}
    for names in products(spec):
        stored = [stored_format(source, name, blocks) for name in names]
        known = [format for format in stored if format is not None]
        if len(known) == len(names):
            found |= dict(zip(names, known, strict=True))
        elif wanted:
            refuse_quantised(source, names, "int4")
            columns = shapes[names[0]][1]
            group = next((size for size in INT4_GROUPS if columns % size == 0), None)
            if group is not None:
                found |= dict.fromkeys(names, PackedFormat(4, group))
    return found


def stored_format(source: WeightSource, name: str, blocks: bool) -> PackedFormat | None:
    """What a matrix is packed in from its file; None if it is not."""
    if isinstance(source, SafetensorsWeights):
        return source.packed_format(name)
    if blocks and isinstance(source, GGUFWeights):
        return BLOCK_FORMATS.get(source.stored_type(name))
    return None
