"""A source's weights as tensors, for the decoders that run on torch."""

from __future__ import annotations

import math

import numpy as np
import torch

from twostroke.errors import ModelError
from twostroke.kernels.packed import Codes
from twostroke.model.describe.hf_w8a8 import W8Config
from twostroke.model.describe.tensor_parallel import WHOLE, Part
from twostroke.model.weights import ALL_ROWS, WeightSource, all_finite, not_finite_error
from twostroke.model.weights.dummy import STD, TILE, DummyWeights, mean_of
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.packed_blocks import BLOCK_FORMATS, read_blocks
from twostroke.model.weights.safetensors import SafetensorsWeights

# Rows are converted in parts, so that a large matrix never exists in float32.
ELEMENTS_PER_PART = 1 << 22
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
W8_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def read_tensor(
    source: WeightSource, name: str, dtype: torch.dtype, part: Part = WHOLE
) -> torch.Tensor:
    """Return a copy of a weight or of a part of it as a dense tensor, checked to be finite."""
    if isinstance(source, DummyWeights):
        if source.device != "cpu":
            return _draw_on_device(source, name, dtype, part)
        return _read_floats(source, name, dtype, part)
    if isinstance(source, SafetensorsWeights) and not source.is_changed(name):
        tensor, narrows = _read_stored(source, name, dtype, part)
    else:
        tensor, narrows = _read_floats(source, name, dtype, part), True
    if narrows and dtype != torch.float32 and not bool(tensor.isfinite().all()):
        raise ModelError(
            f"{source.label(name)} holds a number that {dtype} cannot represent; set another dtype."
        )
    return tensor


def read_w8(
    source: WeightSource, name: str, part: Part = WHOLE
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a matrix in fp8 or int8, or a part of it, and its scales, [rows, groups]; None if it
    is stored in another type."""
    if not isinstance(source, SafetensorsWeights) or not source.w8_scales(name):
        return None
    assert isinstance(source.quantized, W8Config)
    values, scales = source.w8(name, part)
    return torch.from_numpy(values).view(W8_DTYPES[source.quantized.type]), torch.from_numpy(scales)


def read_packed(source: WeightSource, name: str, part: Part = WHOLE) -> Codes | None:
    """Return the codes of a matrix in 4 or 8 bits, or of a part; None for another type."""
    if isinstance(source, SafetensorsWeights) and source.packed_format(name):
        found = source.codes(name, part)
    elif isinstance(source, GGUFWeights) and source.stored_type(name) in BLOCK_FORMATS:
        found = read_blocks(source, name, part)
    else:
        return None
    codes, scales = (np.ascontiguousarray(each) for each in (found.codes, found.scales))
    return Codes(
        found.bits,
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        None if found.zeros is None else torch.from_numpy(np.ascontiguousarray(found.zeros)),
        None if found.offsets is None else torch.from_numpy(found.offsets),
    )


def _read_stored(
    source: SafetensorsWeights, name: str, dtype: torch.dtype, part: Part
) -> tuple[torch.Tensor, bool]:
    """Return the tensor, and whether the file's type has larger numbers than `dtype`."""
    stored = source.stored(name)
    stored_dtype = DTYPES[stored.type]
    data = stored.data.reshape(*stored.shape, stored_dtype.itemsize)[part]
    shape, data = data.shape[:-1], np.ascontiguousarray(data).reshape(-1)
    data = data if data.ctypes.data % 8 == 0 else data.copy()
    if not all_finite(data, stored.type):
        raise not_finite_error(source, name)
    mapped = torch.from_numpy(data).view(stored_dtype).view(shape)
    tensor = mapped.to(dtype, copy=True)  # a copy, because it may be the mapped file
    return tensor, torch.finfo(dtype).max < torch.finfo(stored_dtype).max


def _read_floats(source: WeightSource, name: str, dtype: torch.dtype, part: Part) -> torch.Tensor:
    shape = source.shape(name) or (1,)  # `floats` refuses a missing weight
    first, end, own_shape = _extent(shape, part)
    dense = torch.empty(own_shape, dtype=dtype)
    rows_per_part = max(1, ELEMENTS_PER_PART * shape[0] // math.prod(shape))
    for at in range(first, end, rows_per_part):
        rows = slice(at, min(at + rows_per_part, end))
        values = np.ascontiguousarray(source.floats(name, rows)[(ALL_ROWS, *part[1:])])
        if not all_finite(values.view(np.uint8), "F32"):
            raise not_finite_error(source, name)
        dense[rows.start - first : rows.stop - first].copy_(torch.from_numpy(values))
    return dense


def _extent(shape: tuple[int, ...], part: Part) -> tuple[int, int, tuple[int, ...]]:
    """Return the first row of a part, the row after its last, and its shape."""
    ends = [one.indices(size)[:2] for one, size in zip(part, shape, strict=False)]
    own = tuple(end - first for first, end in ends)
    first, end = ends[0] if ends else (0, shape[0])
    return first, end, (*own, *shape[len(own) :])


def _draw_on_device(
    source: DummyWeights, name: str, dtype: torch.dtype, part: Part
) -> torch.Tensor:
    """Draw dummy weights on the device, in `dtype`. The only other memory is a tile.

    The tile is drawn in float32 and rounded to bf16, so that every dtype has the same weights.
    """
    shape = source.known_shape(name)
    first, end, own_shape = _extent(shape, part)
    weight = torch.empty(own_shape, dtype=dtype, device=source.device)
    generator = torch.Generator(source.device)
    generator.manual_seed(source.seed_of(name))
    tile = torch.empty(min(TILE, math.prod(shape)), device=source.device)
    tile = tile.normal_(mean_of(name), STD, generator=generator).bfloat16().to(dtype)
    width = math.prod(shape[1:])
    if len(part) > 1:  # some columns, row by row
        for n, row in enumerate(range(first, end)):
            columns = range(width)[part[1]]
            _repeat(tile, row * width + columns.start, weight[n])
    else:
        _repeat(tile, first * width, weight.view(-1))
    return weight


def _repeat(tile: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """Fill `out` from an endless repetition of the tile, beginning at `start`."""
    at, filled = start % len(tile), 0
    while filled < len(out):
        piece = tile[at : at + len(out) - filled]
        out[filled : filled + len(piece)].copy_(piece)
        at, filled = 0, filled + len(piece)
