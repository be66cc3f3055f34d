"""A weight format for each phase: weights that are stored twice, for prefill and for decode.

    a step with chunks        prefill's formats for all tokens, because the chunks read these
                              weights anyway
    a step that only decodes  decode's formats, with or without CUDA graphs

So a step reads every weight once. The format depends on the step, not on its number of rows. Only
the decoder distinguishes the phases: it has a list of layers for each (`Decoder._layers`,
`_decode_layers`). Embedding, head, norms and weights that neither phase quantises exist once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.formats.w8a8_weights import DENSE, linear_groups
from twostroke.model.formats.weight_formats import Format, weight_formats
from twostroke.model.weights import WeightSource
from twostroke.model.weights.safetensors import SafetensorsWeights

Shapes = Mapping[str, tuple[int, ...]]


class PhaseFormats(NamedTuple):
    """The formats of weights that are not stored in the model's dtype, from `weight_formats`."""

    prefill: Mapping[str, Format]
    decode: Mapping[str, Format]

    def differ(self, name: str) -> bool:
        """Return whether this weight is stored twice."""
        one, other = self.prefill.get(name), self.decode.get(name)
        return type(one) is not type(other) or one != other

    def all(self) -> Iterator[Format]:
        return chain(self.prefill.values(), self.decode.values())

    def own_bytes(self, shapes: Shapes, itemsize: int) -> tuple[int, int]:
        """Return the bytes of the weights that are stored twice: prefill's and decode's."""
        names = [name for name in shapes if self.differ(name)]
        each = (
            sum(num_bytes(formats.get(name), shapes[name], itemsize) for name in names)
            for formats in self
        )
        return next(each), next(each)


def num_bytes(format: Format | None, shape: tuple[int, ...], itemsize: int) -> int:
    return itemsize * math.prod(shape) if format is None else format.num_bytes(shape)


def phase_formats(
    spec: ModelSpec, source: WeightSource, config: EngineConfig, keep_gguf_blocks: bool = False
) -> PhaseFormats:
    """Return the formats of both phases. Raise `ConfigError` for an unsupported combination."""
    if not config.phases_differ:
        formats = weight_formats(spec, source, config.quantization, keep_gguf_blocks)
        return PhaseFormats(formats, formats)
    wanted = (config.prefill_quantization, config.decode_quantization)
    _check_source(spec, source, wanted)
    prefill, decode = (
        weight_formats(spec, source, None if one == "none" else one, keep_gguf_blocks)
        for one in wanted
    )
    return PhaseFormats(prefill, decode)


def _check_source(
    spec: ModelSpec, source: WeightSource, wanted: tuple[str | None, str | None]
) -> None:
    setting = "prefill_quantization is {!r} and decode_quantization {!r}, ".format(*wanted)
    do = "leave both out"
    if spec.has_experts:
        raise ConfigError(f"{setting}which do not support experts yet; {do}")
    known = source.quantized if isinstance(source, SafetensorsWeights) else None
    if known is not None:
        raise ConfigError(
            f"{setting}which are made from unquantised weights, but this model is quantised "
            f"already ({known.name}); {do}, or use the unquantised model"
        )
    for name in chain.from_iterable(linear_groups(spec)):
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"{setting}which are made from unquantised weights, but {source.label(name)} is "
                f"quantised already ({stored}); {do}, or use the unquantised model"
            )
