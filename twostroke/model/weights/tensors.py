"""Tensors of the weights that a source holds: for the decoders that run on torch."""

from __future__ import annotations

import math

import numpy as np
import torch

from twostroke.errors import ModelError
from twostroke.model.weights import WeightSource, all_finite, not_finite
from twostroke.model.weights.dummy import STD, TILE, DummyWeights, mean_of
from twostroke.model.weights.safetensors import SafetensorsWeights

# Rows are turned into the target type in parts, so that a large matrix never exists in float32.
ELEMENTS_PER_PART = 1 << 22
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_tensor(source: WeightSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a dense tensor of its own memory, every number of it finite."""
    if isinstance(source, DummyWeights):
        if source.device != "cpu":
            return _drawn_there(source, name, dtype)
        return _converted(source, name, dtype)
    if isinstance(source, SafetensorsWeights) and not source.is_changed(name):
        tensor, narrows = _copied(source, name, dtype)
    else:
        tensor, narrows = _converted(source, name, dtype), True
    if narrows and dtype != torch.float32 and not bool(tensor.isfinite().all()):
        raise ModelError(
            f"{source.label(name)} holds a number that {dtype} does not; set dtype to another."
        )
    return tensor


def _copied(source: SafetensorsWeights, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    """The second: whether the file's type has larger numbers than this one."""
    stored = source.stored(name)
    data = stored.data if stored.data.ctypes.data % 8 == 0 else stored.data.copy()
    there = torch.from_numpy(data).view(DTYPES[stored.type])
    if not all_finite(data, stored.type):
        raise not_finite(source, name)
    tensor = there.view(stored.shape).to(dtype, copy=True)  # it may be the mapped file itself
    return tensor, torch.finfo(dtype).max < torch.finfo(there.dtype).max


def _converted(source: WeightSource, name: str, dtype: torch.dtype) -> torch.Tensor:
    shape = source.shape(name) or (1,)  # what is not there `floats` refuses
    dense = torch.empty(shape, dtype=dtype)
    rows_per_part = max(1, ELEMENTS_PER_PART * shape[0] // math.prod(shape))
    for first in range(0, shape[0], rows_per_part):
        rows = slice(first, first + rows_per_part)
        values = source.floats(name, rows)
        if not all_finite(np.ascontiguousarray(values).view(np.uint8), "F32"):
            raise not_finite(source, name)
        dense[rows].copy_(torch.from_numpy(values))
    return dense


def _drawn_there(source: DummyWeights, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Made on the device, in its dtype, with a tile as the only other memory.

    Drawn in float32, so that a narrower dtype holds the same weights rounded.
    """
    weight = torch.empty(source.known_shape(name), dtype=dtype, device=source.device)
    flat = weight.view(-1)
    generator = torch.Generator(source.device)
    generator.manual_seed(source.seed_of(name))
    tile = torch.empty(min(TILE, flat.numel()), device=source.device)
    tile = tile.normal_(mean_of(name), STD, generator=generator).to(dtype)
    for first in range(0, flat.numel(), TILE):
        part = flat[first : first + TILE]
        part.copy_(tile[: part.numel()])
    return weight
