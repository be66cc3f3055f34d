"""GGUF blocks → codes, scales and offsets of groups, with the same values.

A block's integers become codes of 4 bits, or of 8 bits if they have more than 4. The centre of a
centred block moves to the middle of the codes. The two scales of a K-quant's sub-block are
multiplied into one scale.
"""

from __future__ import annotations

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.describe.tensor_parallel import WHOLE, Part
from twostroke.model.gguf.block_types import LAYOUTS, BlockType
from twostroke.model.gguf.dequant import grouped
from twostroke.model.weights import ALL_ROWS, not_finite_error
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.packed_format import PackedFormat, StoredCodes

MAX_BYTES_AT_ONCE = 1 << 22  # bytes of a file that are unpacked at a time

BLOCK_FORMATS = {
    BlockType.Q4_0: PackedFormat(4, 32),
    BlockType.Q4_1: PackedFormat(4, 32, offsets=True),
    BlockType.Q4_K: PackedFormat(4, 32, offsets=True),
    BlockType.Q5_0: PackedFormat(8, 32),
    BlockType.Q5_1: PackedFormat(8, 32, offsets=True),
    BlockType.Q5_K: PackedFormat(8, 32, offsets=True),
    BlockType.Q6_K: PackedFormat(8, 16),
    BlockType.Q8_0: PackedFormat(8, 32),
    BlockType.IQ4_NL: PackedFormat(8, 32),
    BlockType.IQ4_XS: PackedFormat(8, 32),
}


def read_blocks(source: GGUFWeights, name: str, part: Part = WHOLE) -> StoredCodes:
    """Return the codes of a matrix or of a part of it."""
    rows, columns = (*part, ALL_ROWS, ALL_ROWS)[:2]
    matrix = source.packed(name, rows)
    layout, format = LAYOUTS[matrix.type], BLOCK_FORMATS[matrix.type]
    first, end, _ = columns.indices(matrix.shape[1])
    if first % layout.elements or end % layout.elements:
        raise ModelError(
            f"{source.label(name)} has blocks of {layout.elements} columns ({matrix.type}), which "
            "the ranks would cut. Lower tensor_parallel_size."
        )
    unit = layout.num_bytes
    stored = matrix.rows[:, first // layout.elements * unit : end // layout.elements * unit]
    shape, groups = (len(stored), end - first), (end - first) // format.group
    codes = np.empty(shape, np.uint8)
    scale = np.empty((shape[0], groups), np.float32)
    offset = np.empty_like(scale) if format.offsets else None
    at_once = max(1, MAX_BYTES_AT_ONCE // max(1, stored.shape[1]))
    for at in range(0, shape[0], at_once):
        own = slice(at, at + at_once)
        with np.errstate(invalid="ignore"):
            found = grouped(np.ascontiguousarray(stored[own]), matrix.type)
        moved = np.uint8((1 << (format.bits - 1)) - found.centre if found.offsets is None else 0)
        codes[own] = (found.q + moved).reshape(-1, shape[1])
        scale[own] = found.scales.reshape(-1, groups)
        if offset is not None and found.offsets is not None:
            offset[own] = found.offsets.reshape(-1, groups)
    if not np.isfinite(scale).all() or not (offset is None or np.isfinite(offset).all()):
        raise not_finite_error(source, name)
    return StoredCodes(format.bits, codes, scale, offsets=offset)
