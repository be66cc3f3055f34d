"""The choice of the weight formats for the torch backends: each matrix has a format here, except
the matrices that are stored in the model's dtype."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from twostroke.errors import ConfigError
from twostroke.model.describe.spec import ExpertsSpec, ModelSpec
from twostroke.model.formats.w8a8_weights import (
    W8Format,
    linear_groups,
    require_unquantised,
    w8_formats,
)
from twostroke.model.weights import WeightSource
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.packed_blocks import BLOCK_FORMATS
from twostroke.model.weights.packed_format import PackedFormat
from twostroke.model.weights.safetensors import SafetensorsWeights

log = logging.getLogger(__name__)

# Group sizes for --quantization int4. The first size that divides the number of columns is used.
INT4_GROUP_SIZES = (128, 64, 32)

Format = W8Format | PackedFormat


def weight_formats(
    spec: ModelSpec,
    source: WeightSource,
    quantization: str | None,
    keep_gguf_blocks: bool = False,
) -> dict[str, Format]:
    """Return the formats of all quantised weights: weights that are quantised in their file and
    stay so, and weights that `quantization` quantises.

    `keep_gguf_blocks`: the quantised blocks of a GGUF file stay quantised, too.
    """
    formats: dict[str, Format] = {**w8_formats(spec, source, quantization)}
    return formats | packed_formats(spec, source, quantization, keep_gguf_blocks)


def weight_bytes(spec: ModelSpec, itemsize: int, formats: Mapping[str, Format]) -> dict[str, float]:
    """Return the size of each weight in the torch backends. `itemsize`: of the model's dtype."""
    return {
        name: formats[name].num_bytes(shape) if name in formats else itemsize * math.prod(shape)
        for name, shape in spec.weight_shapes().items()
    }


def packed_formats(
    spec: ModelSpec,
    source: WeightSource,
    quantization: str | None,
    keep_gguf_blocks: bool = False,
) -> dict[str, PackedFormat]:
    """Return the formats of the weights with 4 or 8 bits and a scale for each group of a row.
    (`w8_formats` returns the W8A8 formats.)

    Either all matrices of a linear group have such a format, or none of them. The embedding, the
    head, the routers and the experts never have such a format.
    """
    to_int4 = quantization == "int4"
    if to_int4 and any(isinstance(layer.mlp, ExpertsSpec) for layer in spec.layers):
        raise ConfigError(
            "quantization is 'int4', which does not support experts yet; leave quantization out"
        )
    shapes = spec.weight_shapes()
    formats: dict[str, PackedFormat] = {}
    for names in linear_groups(spec):
        in_file = [_format_in_file(source, name, keep_gguf_blocks) for name in names]
        packed = [each for each in in_file if each is not None]
        if len(packed) == len(names):
            formats |= dict(zip(names, packed, strict=True))
        elif to_int4:
            require_unquantised(source, names, "int4")
            num_columns = shapes[names[0]][1]
            group = next((size for size in INT4_GROUP_SIZES if num_columns % size == 0), None)
            if group is not None:  # None: the matrices stay in the model's dtype
                formats |= dict.fromkeys(names, PackedFormat(bits=4, group=group))
    return formats


def _format_in_file(source: WeightSource, name: str, keep_gguf_blocks: bool) -> PackedFormat | None:
    """Return the packed format that a matrix has in its file; None if the matrix is not packed."""
    if isinstance(source, SafetensorsWeights):
        return source.packed_format(name)
    if keep_gguf_blocks and isinstance(source, GGUFWeights):
        return BLOCK_FORMATS.get(source.stored_type(name))
    return None
