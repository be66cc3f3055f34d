"""GGUF blocks → float32 values. Numpy only.

A tensor is a run of blocks. A quantised block holds 32 or 256 neighbours of a row as small integers
`q` with scales and, for some types, offsets. Its values are `scale · q`, `scale · (q − centre)`,
`scale · q + offset` or `scale · q − offset`. `dequant_iq.py` has the types whose integers come from
a table or a grid.

The package `gguf` has the same conversion (`gguf.quants`), and the tests compare every type with it
to the bit. This module exists for three reasons: the core does not depend on `gguf`; `grouped`
returns integers and scales for the packed formats, which `gguf.quants` does not; and this module
takes half the time for K-quants, and a third for IQ types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from twostroke.model.gguf import dequant_iq
from twostroke.model.gguf.block_types import LAYOUTS, BlockType, num_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# The temporaries of a slice take a few times 4 bytes per element and should fit into the cache.
ELEMENTS_PER_SLICE = 1 << 18


def dequantize(raw: Bytes | memoryview, block_type: BlockType, shape: tuple[int, ...]) -> Floats:
    """Return the values of a tensor, or of some of its rows, from their bytes."""
    layout = LAYOUTS[block_type]
    raw = np.frombuffer(raw, np.uint8)
    if raw.size != num_bytes(block_type, math.prod(shape)):
        raise ValueError(f"{raw.size} bytes are not {shape} values of {block_type}")
    blocks = raw.reshape(-1, layout.num_bytes)
    values = np.empty((len(blocks), layout.elements), np.float32)
    unpack = _UNPACK[block_type]
    blocks_per_slice = max(1, ELEMENTS_PER_SLICE // layout.elements)
    for first in range(0, len(blocks), blocks_per_slice):
        part = slice(first, first + blocks_per_slice)
        with np.errstate(invalid="ignore"):  # loading refuses an infinite scale
            values[part] = unpack(blocks[part])
    return values.reshape(shape)


class Grouped(NamedTuple):
    """Blocks as groups of neighbours that share a scale.

    A value is scale · (q − centre), or scale · q + offset.
    """

    q: Bytes  # (n, groups, numbers of a group)
    scales: Floats  # (n, groups)
    centre: int = 0
    offsets: Floats | None = None  # (n, groups)


def grouped(raw: Bytes, block_type: BlockType) -> Grouped:
    """Return the integers and scales of whole blocks, for the types in `GROUPED`."""
    return GROUPED[block_type](raw.reshape(-1, LAYOUTS[block_type].num_bytes))


def _values(groups: Grouped) -> Floats:
    scales = groups.scales[:, :, None]
    if groups.offsets is None:
        values = scales * (groups.q - np.float32(groups.centre))
    else:
        values = scales * groups.q + groups.offsets[:, :, None]
    return values.reshape(len(values), -1)


def _then_values(unpack: Callable[[Bytes], Grouped]) -> Callable[[Bytes], Floats]:
    return lambda blocks: _values(unpack(blocks))


# Each function below takes (n, bytes of a block) and returns (n, elements of a block) or `Grouped`.


def _f32(blocks: Bytes) -> Floats:
    return _contiguous(blocks).view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return _contiguous(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    """Shift bfloat16 into the upper 16 bits of a float32."""
    return (_contiguous(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Grouped:
    """scale f16 · 16 bytes of nibbles, centred on 8."""
    return Grouped(_low_then_high(blocks[:, 2:])[:, None], _f16(blocks[:, :2]), 8)


def _q4_1(blocks: Bytes) -> Grouped:
    """scale f16 · offset f16 · 16 bytes of nibbles."""
    q = _low_then_high(blocks[:, 4:])[:, None]
    return Grouped(q, _f16(blocks[:, :2]), offsets=_f16(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Grouped:
    """scale f16 · 32 fifth bits · 16 bytes of nibbles, centred on 16."""
    q = _low_then_high(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Grouped(q[:, None], _f16(blocks[:, :2]), 16)


def _q5_1(blocks: Bytes) -> Grouped:
    """scale f16 · offset f16 · 32 fifth bits · 16 bytes of nibbles."""
    q = _low_then_high(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Grouped(q[:, None], _f16(blocks[:, :2]), offsets=_f16(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Grouped:
    """scale f16 · 32 signed bytes."""
    return Grouped(blocks[:, None, 2:] ^ np.uint8(128), _f16(blocks[:, :2]), 128)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes of a scale (low) and an offset (high) · 64 bytes of bit pairs · f16 scale of the
    scales and of the offsets."""
    scales = (_f16(blocks[:, 80:82]) * (blocks[:, :16] & 0xF))[:, :, None]
    offsets = (_f16(blocks[:, 82:84]) * (blocks[:, :16] >> 4))[:, :, None]
    q = _bit_pairs(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return (scales * q - offsets).reshape(-1, 256)


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits · 64 bytes of bit pairs · 12 bytes of scales · f16 scale of those.

    Bit s of the third bits belongs to the values from 32 · s on. Values are centred on 4. The 16
    scales have 6 bits and are centred on 32: the first 8 bytes hold the low nibbles, the last 4 the
    upper bit pairs.
    """
    run = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    third = (blocks[:, :32].reshape(-1, 1, 32) >> run) & np.uint8(1)
    q = (_bit_pairs(blocks[:, 32:96]) | third << np.uint8(2)).reshape(-1, 16, 16) - np.float32(4)
    pair = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 4, 1)
    upper = ((blocks[:, 104:108].reshape(-1, 1, 4) >> pair) & 3).reshape(-1, 16)
    low = np.concatenate([blocks[:, 96:104] & 0xF, blocks[:, 96:104] >> 4], axis=1)
    scales = _f16(blocks[:, 108:110]) * ((low | (upper << 4)) - np.float32(32))
    return (scales[:, :, None] * q).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Grouped:
    """f16 scale of the scales and of the offsets · 12 bytes of both · 128 bytes of nibbles."""
    return _scale_sub_blocks(blocks, _sub_blocks(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Grouped:
    """Like Q4_K, with 32 bytes of fifth bits before the nibbles: bit s belongs to sub-block s."""
    sub_block = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = (blocks[:, 16:48].reshape(-1, 1, 32) >> sub_block) & np.uint8(1)
    return _scale_sub_blocks(blocks, _sub_blocks(blocks[:, 48:]) | fifth * np.uint8(16))


def _q6_k(blocks: Bytes) -> Grouped:
    """128 bytes of nibbles · 64 bytes of upper bit pairs · 16 signed scales · f16 scale of those.

    Each half of the block (128 values) is four quarters of 32. The low nibbles of 64 bytes are the
    first two quarters and the high nibbles the last two; bit pair j of 32 bytes belongs to
    quarter j.
    """
    n = len(blocks)
    low = blocks[:, :128].reshape(n, 2, 1, 64)
    nibbles = np.concatenate([low & 0xF, low >> 4], axis=2).reshape(n, 2, 4, 32)
    pair = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    upper = (blocks[:, 128:192].reshape(n, 2, 1, 32) >> pair) & 3
    q = (nibbles | (upper << 4)).reshape(n, 16, 16)
    return Grouped(q, _f16(blocks[:, 208:210]) * _contiguous(blocks[:, 192:208]).view(np.int8), 32)


def _contiguous(part: Bytes) -> Bytes:
    """Copy columns of blocks, so that they can be viewed as wider types."""
    return np.ascontiguousarray(part)


def _low_then_high(packed: Bytes) -> Bytes:
    """Return 32 values from 16 bytes: the low nibbles, then the high nibbles."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return 32 values of 0 or 16 from 4 bytes, lowest bit first."""
    return np.unpackbits(_contiguous(packed), axis=1, bitorder="little") * np.uint8(16)


def _sub_blocks(packed: Bytes) -> Bytes:
    """Return 8 sub-blocks of 32 from 128 bytes: 32 bytes hold one sub-block low, the next high."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 0xF, quarters >> 4], axis=2).reshape(-1, 8, 32)


def _bit_pairs(packed: Bytes) -> Bytes:
    """Return 8 runs of 32 from 64 bytes: 32 bytes hold four runs, the first in the lowest bits."""
    pair = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((packed.reshape(-1, 2, 1, 32) >> pair) & np.uint8(3)).reshape(-1, 8, 32)


def _scale_sub_blocks(blocks: Bytes, q: Bytes) -> Grouped:
    """Return Q4_K or Q5_K blocks with the integers `q`, (n, 8, 32).

    The 12 bytes hold 8 scales and 8 offsets of 6 bits. The first four of each are the low six bits
    of bytes 0–3 and 4–7. The last four have their low nibbles in bytes 8–11 (scales low, offsets
    high) and their upper two bits on top of bytes 0–3 and 4–7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, (third & 0xF) | (first >> 6 << 4)], axis=1)
    offset = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return Grouped(q, _f16(blocks[:, :2]) * scale, offsets=-(_f16(blocks[:, 2:4]) * offset))


def _iq4_nl(blocks: Bytes) -> Grouped:
    """Table values are signed bytes."""
    return _from_table(*dequant_iq.iq4_nl(blocks))


def _iq4_xs(blocks: Bytes) -> Grouped:
    return _from_table(*dequant_iq.iq4_xs(blocks))


def _from_table(scales: Floats, q: npt.NDArray[np.int8]) -> Grouped:
    return Grouped(q.view(np.uint8) ^ np.uint8(128), scales, 128)


GROUPED: dict[BlockType, Callable[[Bytes], Grouped]] = {
    BlockType.Q4_0: _q4_0,
    BlockType.Q4_1: _q4_1,
    BlockType.Q5_0: _q5_0,
    BlockType.Q5_1: _q5_1,
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: _q4_k,
    BlockType.Q5_K: _q5_k,
    BlockType.Q6_K: _q6_k,
    BlockType.IQ4_NL: _iq4_nl,
    BlockType.IQ4_XS: _iq4_xs,
}
_UNPACK: dict[BlockType, Callable[[Bytes], Floats]] = {
    BlockType.F32: _f32,
    BlockType.F16: _f16,
    BlockType.BF16: _bf16,
    BlockType.Q2_K: _q2_k,
    BlockType.Q3_K: _q3_k,
    **dequant_iq.UNPACK,
    **{name: _then_values(unpack) for name, unpack in GROUPED.items()},
}
