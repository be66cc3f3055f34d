"""`QuantizedLinears`: builds the linear layers of matrices that are not stored in the model's
dtype. No other module chooses a class by the format of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from twostroke.errors import ConfigError
from twostroke.kernels import packed
from twostroke.kernels.packed import Codes, PackedWeight, packed_weight
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import W8Weight, quantised, w8_weight
from twostroke.model.describe.tensor_parallel import Part
from twostroke.model.formats.linear import PackedLinear, ScalableLinear, StackedLinear, W8Linear
from twostroke.model.formats.w8a8_weights import W8Format, is_weight_only
from twostroke.model.formats.weight_formats import Format
from twostroke.model.weights import WeightSource
from twostroke.model.weights.packed_format import SMALLEST_GROUP, PackedFormat
from twostroke.model.weights.tensors import W8_DTYPES, read_packed, read_w8


class QuantizedLinears:
    def __init__(
        self,
        formats: Mapping[str, Format],
        source: WeightSource,
        shapes: Mapping[str, tuple[int, ...]],
        kernels: Kernels,
        device: torch.device,
        part: Callable[[str], Part],
        read: Callable[[str], torch.Tensor],
        importance: Mapping[str, torch.Tensor],
    ) -> None:
        """`shapes`: the shapes of this rank's parts. `part`: returns this rank's part of a weight.
        `read`: reads that part unquantised. `importance`: of a weight's inputs, by name of the
        weight; without it, all inputs count the same."""
        self._formats: Mapping[str, Any] = formats
        self._source, self._shapes, self._kernels = source, shapes, kernels
        self._device, self._part, self._read = device, part, read
        self._importance = importance

    def product(self, names: list[str], bias: torch.Tensor | None) -> ScalableLinear | None:
        """Return the linear layer of matrices one below another; None if they are stored in the
        model's dtype."""
        format = self._formats.get(names[0])
        return None if format is None else MAKERS[type(format)](self, names, bias)

    def w8(self, names: list[str], bias: torch.Tensor | None) -> ScalableLinear:
        weight_only = is_weight_only(self._source)
        return W8Linear(self._w8_weight(names), bias, self._kernels, weight_only)

    def packed(self, names: list[str], bias: torch.Tensor | None) -> ScalableLinear:
        if len({self._formats[name] for name in names}) == 1:
            return PackedLinear(self._packed_weight(names), bias, self._kernels)
        rows = [self._shapes[name][0] for name in names]
        biases = [None] * len(names) if bias is None else torch.split(bias, rows)
        parts = [
            PackedLinear(self._packed_weight([name]), own, self._kernels)
            for name, own in zip(names, biases, strict=True)
        ]
        return StackedLinear(parts, self._kernels)

    def _w8_weight(self, names: list[str]) -> W8Weight:
        """Build the weight of several matrices one below another. Each matrix is in memory in
        another type only while it is quantised."""
        rows = [self._shapes[name][0] for name in names]
        inner = self._shapes[names[0]][1]
        dtype = W8_DTYPES[self._formats[names[0]].type]
        values = torch.empty(sum(rows), inner, dtype=dtype, device=self._device)
        groups = max(self._formats[name].scales_per_row for name in names)
        scales = []
        for name, place in zip(names, torch.split(values, rows), strict=True):
            found = read_w8(self._source, name, self._part(name))
            if found is None:
                weight, importance = self._read(name), self._importance.get(name)
                found = quantised(weight.to(self._device), dtype, importance)
            place.copy_(found[0])
            scale = found[1].to(self._device).view(len(place), -1)
            scales.append(scale.repeat_interleave(groups // scale.shape[1], dim=1))
        return w8_weight(values, torch.cat(scales))

    def _packed_weight(self, names: list[str]) -> PackedWeight:
        """Build the weight of several matrices in one format, one below another. Each matrix is in
        memory unpacked only while it is packed."""
        parts = [packed.pack(self._codes(name)) for name in names]
        if len(parts) == 1:
            return parts[0]
        bits = parts[0].bits
        middle = 1 << (bits - 1)
        zeros = None
        if any(part.zero is not None for part in parts):
            filled = (torch.full(p.scale.shape, middle, dtype=torch.uint8) for p in parts)
            zeros = torch.cat(
                [
                    other.to(self._device) if part.zero is None else part.zero
                    for part, other in zip(parts, filled, strict=True)
                ]
            )
        # If the types of the parts differ, `cat` returns the wider type.
        scales = torch.cat([part.scale for part in parts])
        offsets = [part.offset for part in parts if part.offset is not None]
        codes = torch.cat([part.codes for part in parts])
        return packed_weight(bits, codes, scales, zeros, torch.cat(offsets) if offsets else None)

    def _codes(self, name: str) -> Codes:
        found = read_packed(self._source, name, self._part(name))
        if found is not None:
            return found.to(self._device)
        # A rank's part of a row may be shorter than the groups of the whole.
        group = math.gcd(self._formats[name].group, self._shapes[name][1])
        if group < SMALLEST_GROUP:
            raise ConfigError(
                f"quantization is 'int4', but each rank's part of {name!r} would have "
                f"{self._shapes[name][1]} columns, which groups of {SMALLEST_GROUP} do not "
                "divide; lower tensor_parallel_size"
            )
        weight, importance = self._read(name), self._importance.get(name)
        return packed.quantised(weight.to(self._device), group, importance)


MAKERS = {W8Format: QuantizedLinears.w8, PackedFormat: QuantizedLinears.packed}
