"""GGUF blocks whose integers come from a table (IQ4, MXFP4), from a grid (the other IQ types) or
are −1, 0 and 1 (TQ). Numpy only.

Each function takes (n, bytes of a block) and returns (n, elements of a block). A grid
(`iq_grids.py`) is a list of groups of 8 or 4 neighbours. A block has the index of a grid entry for
each group, the signs (or the direction of a shift) of its values, and a scale for 32 or 16 values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.iq_grids import grid_of

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Ints8 = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.integer]

IQ4_TABLE = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
# fp4: a sign bit, two exponent bits and a fraction bit; doubled, so that the values are integers.
E2M1_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
# Seven signs are stored: the eighth makes the number of negative ones even.
EIGHT_SIGNS = np.array([seven | seven.bit_count() % 2 << 7 for seven in range(128)], np.uint8)


def iq4_nl(blocks: Bytes) -> tuple[Floats, Ints8]:
    """scale f16 · 16 bytes of nibbles. Return the scales and the table values in groups."""
    return _fp16(blocks[:, :2]).astype(np.float32), IQ4_TABLE[_nibbles(blocks[:, 2:])]


def iq4_xs(blocks: Bytes) -> tuple[Floats, Ints8]:
    """f16 scale of the scales · 2 bytes of upper bit pairs and 4 bytes of low nibbles of the scales
    · 128 bytes of nibbles. The eight 6-bit scales are centred on 32."""
    upper = _words(blocks[:, 2:4]) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = _low_and_high(blocks[:, 4:8])
    scales = _fp16(blocks[:, :2]) * ((low | (upper & 3) << 4) - np.float32(32))
    return scales.astype(np.float32), IQ4_TABLE[_nibbles(blocks[:, 8:])]


def _mxfp4(blocks: Bytes) -> Floats:
    """One byte of exponent · 16 bytes of nibbles. The scale is 2^(exponent − 128)."""
    exponent = blocks[:, :1].astype(np.uint32)
    subnormal = np.uint32(0x200000) << np.minimum(exponent, 1)
    bits = np.where(exponent < 2, subnormal, (exponent - 1) << 23).astype(np.uint32)
    with np.errstate(over="ignore"):  # loading refuses infinite weights
        return bits.view(np.float32) * E2M1_TABLE[_nibbles(blocks[:, 1:])].reshape(-1, 32)


def _tq1_0(blocks: Bytes) -> Floats:
    """48 and 4 bytes, each of which is a fraction of 256 written in base 3 · scale f16.

    The values are the first digits of 32 bytes, then their second digits, and so on; the same for
    the next 16 bytes, and for the last four.
    """
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    shifted = [
        (part[:, None, :] * (3 ** np.arange(digits, dtype=np.uint8))[:, None]).reshape(
            len(blocks), -1
        )
        for part, digits in parts
    ]
    q = (np.concatenate(shifted, axis=1).astype(np.uint16) * np.uint16(3) >> 8) - np.float32(1)
    return _fp16(blocks[:, 52:54]) * q


def _tq2_0(blocks: Bytes) -> Floats:
    """64 bytes of bit pairs, as in Q2_K · scale f16."""
    pair = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    q = (blocks[:, :64].reshape(-1, 2, 1, 32) >> pair) & np.uint8(3)
    return _fp16(blocks[:, 64:66]) * (q.reshape(-1, 256) - np.float32(1))


def _iq2_xxs(blocks: Bytes) -> Floats:
    """f16 scale of the scales · for each 32 values four entries of 8 bits, then 32 bits: four times
    seven signs, and a scale on top."""
    parts = blocks[:, 2:].reshape(-1, 8, 8)
    entries, word = parts[:, :, :4], _uint32(parts[:, :, 4:])
    q = _entries(BlockType.IQ2_XXS, entries) * _signs(EIGHT_SIGNS[_sevens(word)])
    return _scaled(_iq2_scales(blocks, word >> 28), q)


def _iq2_xs(blocks: Bytes) -> Floats:
    """f16 scale of the scales · 32 times an entry of 9 bits under seven signs · 16 nibbles of
    scales, one for each 16 values."""
    words = _words(blocks[:, 2:66])
    q = _entries(BlockType.IQ2_XS, words & 511) * _signs(EIGHT_SIGNS[words >> 9])
    return _scaled(_iq2_scales(blocks, _low_and_high(blocks[:, 66:])), q)


def _iq2_s(blocks: Bytes) -> Floats:
    """f16 scale of the scales · 32 entries' low bytes · their signs, a byte each · their upper bit
    pairs · 16 nibbles of scales, one for each 16 values."""
    upper = blocks[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8)
    entries = blocks[:, 2:34] | (upper.reshape(-1, 32) & np.uint16(3)) << 8
    q = _entries(BlockType.IQ2_S, entries) * _signs(blocks[:, 34:66])
    return _scaled(_iq2_scales(blocks, _low_and_high(blocks[:, 74:])), q)


def _iq3_xxs(blocks: Bytes) -> Floats:
    """f16 scale of the scales · 64 entries of 4 values · for each 32 values 32 bits: four times
    seven signs, and a scale on top."""
    word = _uint32(blocks[:, 66:].reshape(-1, 8, 4))
    q = _entries(BlockType.IQ3_XXS, blocks[:, 2:66]) * _signs(EIGHT_SIGNS[_sevens(word)])
    scales = _fp16(blocks[:, :2]) * (np.float32(0.5) + (word >> 28)) * np.float32(0.5)
    return _scaled(scales.astype(np.float32), q)


def _iq3_s(blocks: Bytes) -> Floats:
    """f16 scale of the scales · 64 entries' low bytes · their ninth bits · a byte of signs for each
    8 values · 8 nibbles of scales."""
    ninth = np.unpackbits(_contiguous(blocks[:, 66:74]), axis=1, bitorder="little")
    entries = blocks[:, 2:66] | ninth.astype(np.uint16) << 8
    q = _entries(BlockType.IQ3_S, entries) * _signs(blocks[:, 74:106])
    return _scaled(_fp16(blocks[:, :2]) * (1 + 2 * _low_and_high(blocks[:, 106:])), q)


def _iq1_s(blocks: Bytes) -> Floats:
    """f16 scale of the scales · 32 entries' low bytes · for each 32 values 16 bits: four times
    three upper bits, a scale of three bits, and a bit that shifts the values down instead of up."""
    words = _words(blocks[:, 34:])
    upper = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)
    entries = blocks[:, 2:34] | (upper.reshape(-1, 32) & np.uint16(7)) << 8
    q = _entries(BlockType.IQ1_S, entries).reshape(-1, 8, 32) + _eighth(words >> 15)[:, :, None]
    return _scaled(_fp16(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1), q)


def _iq1_m(blocks: Bytes) -> Floats:
    """32 entries' low bytes · a nibble for each: three upper bits, and a bit that shifts its 8
    values down instead of up · four times 16 bits: four scales of three bits, each for 16 values,
    and on top a nibble of their f16 scale."""
    words = _words(blocks[:, 48:])
    bits = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)
    scale = bits.view(np.float16).astype(np.float32)[:, None]
    threes = (words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)).reshape(-1, 16) & 7
    nibbles = _low_and_high(blocks[:, 32:48])
    entries = blocks[:, :32] | (nibbles & np.uint16(7)) << 8
    q = _entries(BlockType.IQ1_M, entries).reshape(-1, 32, 8) + _eighth(nibbles >> 3)[:, :, None]
    return _scaled(scale * (2 * threes + 1), q)


def _contiguous(part: Bytes) -> Bytes:
    """Copy columns of blocks, so that they can be viewed as wider types."""
    return np.ascontiguousarray(part)


def _fp16(part: Bytes) -> Floats:
    return _contiguous(part).view("<f2").astype(np.float32)


def _words(part: Bytes) -> Words:
    return _contiguous(part).view("<u2")


def _uint32(part: Bytes) -> npt.NDArray[np.uint32]:
    """Return each four bytes as one number."""
    return _contiguous(part).view("<u4")[:, :, 0]


def _low_and_high(packed: Bytes) -> Bytes:
    """Return the two nibbles of each byte, the low nibble first."""
    return np.stack([packed & 0xF, packed >> 4], axis=2).reshape(len(packed), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """Return 32 values for each 16 bytes: the low nibbles, then the high nibbles."""
    runs = packed.reshape(len(packed), -1, 16)
    return np.concatenate([runs & 0xF, runs >> 4], axis=2)


def _sevens(word: npt.NDArray[np.uint32]) -> Whole:
    """Return the four groups of seven bits of each number."""
    return (word[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127


def _entries(block_type: BlockType, numbers: Whole) -> Ints8:
    """Return the grid's values in groups of 8."""
    grid = grid_of(block_type)
    assert grid is not None
    return grid[numbers].reshape(len(numbers), -1, 8)


def _signs(bits: Bytes) -> Ints8:
    """Return 8 signs for each byte: −1 where the bit is set, else 1."""
    ones = np.unpackbits(_contiguous(bits), axis=-1, bitorder="little").view(np.int8)
    return (1 - 2 * ones).reshape(len(bits), -1, 8)


def _eighth(down: Whole) -> Floats:
    return np.where(down == 0, np.float32(0.125), np.float32(-0.125))


def _iq2_scales(blocks: Bytes, nibbles: Whole) -> Floats:
    halves = np.float32(0.5) + nibbles.astype(np.float32)
    return _fp16(blocks[:, :2]) * halves * np.float32(0.25)


def _scaled(scales: npt.NDArray[np.floating], q: Ints8 | Floats) -> Floats:
    """Multiply equal parts of each block by their scales."""
    n, parts = scales.shape
    scales = scales.astype(np.float32, copy=False)[:, :, None]
    return (scales * q.reshape(n, parts, -1)).reshape(n, -1)


UNPACK: dict[BlockType, Callable[[Bytes], Floats]] = {
    BlockType.MXFP4: _mxfp4,
    BlockType.IQ3_S: _iq3_s,
    BlockType.IQ3_XXS: _iq3_xxs,
    BlockType.IQ2_XXS: _iq2_xxs,
    BlockType.IQ2_XS: _iq2_xs,
    BlockType.IQ2_S: _iq2_s,
    BlockType.IQ1_S: _iq1_s,
    BlockType.IQ1_M: _iq1_m,
    BlockType.TQ1_0: _tq1_0,
    BlockType.TQ2_0: _tq2_0,
}
