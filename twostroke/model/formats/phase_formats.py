"""A precision a phase: weights that are kept twice, in a format for prefill and one for decode.

    a step with chunks        prefill's formats, for all of its tokens: what decodes beside a chunk
                              rides on weights that are read anyway
    a step that only decodes  decode's formats, in graphs or not

So a step reads every weight once. The phase is that of the step, never a number of rows; the
decoder has a list of layers for each (`Decoder._layers`, `_decode_layers`), and nobody else knows.
Embedding, head, norms and what neither phase quantises are there once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.formats.registry import Format, weight_formats
from twostroke.model.formats.w8a8_weights import DENSE, products
from twostroke.model.weights import WeightSource
from twostroke.model.weights.safetensors import SafetensorsWeights

Shapes = Mapping[str, tuple[int, ...]]


class PhaseFormats(NamedTuple):
    """Those of weights that are not kept in the model's dtype, as `weight_formats` gives them."""

    prefill: Mapping[str, Format]
    decode: Mapping[str, Format]

    def differ(self, name: str) -> bool:
        """Whether this weight is kept twice."""
        one, other = self.prefill.get(name), self.decode.get(name)
        return type(one) is not type(other) or one != other

    def all(self) -> Iterator[Format]:
        return chain(self.prefill.values(), self.decode.values())

    def own_bytes(self, shapes: Shapes, itemsize: int) -> tuple[int, int]:
        """Of the weights that are kept twice: prefill's and decode's."""
        names = [name for name in shapes if self.differ(name)]
        each = (
            sum(num_bytes(formats.get(name), shapes[name], itemsize) for name in names)
            for formats in self
        )
        return next(each), next(each)


def num_bytes(format: Format | None, shape: tuple[int, ...], itemsize: int) -> int:
    return itemsize * math.prod(shape) if format is None else format.num_bytes(shape)


def phase_formats(
    spec: ModelSpec, source: WeightSource, config: EngineConfig, blocks: bool = False
) -> PhaseFormats:
    """Raises `ConfigError` where the phases are to differ and cannot."""
    if not config.phases_differ:
        formats = weight_formats(spec, source, config.quantization, blocks=blocks)
        return PhaseFormats(formats, formats)
    asked = (config.prefill_quantization, config.decode_quantization)
    _check_source(spec, source, asked)
    prefill, decode = (
        weight_formats(spec, source, None if one == "none" else one, blocks=blocks) for one in asked
    )
    return PhaseFormats(prefill, decode)


def _check_source(
    spec: ModelSpec, source: WeightSource, asked: tuple[str | None, str | None]
) -> None:
    said = "prefill_quantization is {!r} and decode_quantization {!r}, ".format(*asked)
    do = "leave both out"
    if spec.has_experts:
        raise ConfigError(f"{said}which do not quantise experts as yet; {do}")
    known = source.quantized if isinstance(source, SafetensorsWeights) else None
    if known is not None:
        raise ConfigError(
            f"{said}which are made from unquantised weights, but this model is quantised already "
            f"({known.name}); {do}, or use the unquantised model"
        )
    for name in chain.from_iterable(products(spec)):
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"{said}which are made from unquantised weights, but {source.label(name)} is "
                f"quantised already ({stored}); {do}, or use the unquantised model"
            )
