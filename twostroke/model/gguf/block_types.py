"""GGUF block types: how many values a block holds, and how many bytes it takes."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class BlockType(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    Q8_0 = "Q8_0"
    Q2_K = "Q2_K"
    Q3_K = "Q3_K"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    IQ4_NL = "IQ4_NL"
    IQ4_XS = "IQ4_XS"
    MXFP4 = "MXFP4"
    IQ3_S = "IQ3_S"
    IQ3_XXS = "IQ3_XXS"
    IQ2_XXS = "IQ2_XXS"
    IQ2_XS = "IQ2_XS"
    IQ2_S = "IQ2_S"
    IQ1_S = "IQ1_S"
    IQ1_M = "IQ1_M"
    TQ1_0 = "TQ1_0"
    TQ2_0 = "TQ2_0"


class BlockLayout(NamedTuple):
    elements: int
    num_bytes: int


LAYOUTS: dict[BlockType, BlockLayout] = {
    BlockType.F32: BlockLayout(1, 4),
    BlockType.F16: BlockLayout(1, 2),
    BlockType.BF16: BlockLayout(1, 2),
    BlockType.Q4_0: BlockLayout(32, 18),
    BlockType.Q4_1: BlockLayout(32, 20),
    BlockType.Q5_0: BlockLayout(32, 22),
    BlockType.Q5_1: BlockLayout(32, 24),
    BlockType.Q8_0: BlockLayout(32, 34),
    BlockType.Q2_K: BlockLayout(256, 84),
    BlockType.Q3_K: BlockLayout(256, 110),
    BlockType.Q4_K: BlockLayout(256, 144),
    BlockType.Q5_K: BlockLayout(256, 176),
    BlockType.Q6_K: BlockLayout(256, 210),
    BlockType.IQ4_NL: BlockLayout(32, 18),
    BlockType.IQ4_XS: BlockLayout(256, 136),
    BlockType.MXFP4: BlockLayout(32, 17),
    BlockType.IQ3_S: BlockLayout(256, 110),
    BlockType.IQ3_XXS: BlockLayout(256, 98),
    BlockType.IQ2_XXS: BlockLayout(256, 66),
    BlockType.IQ2_XS: BlockLayout(256, 74),
    BlockType.IQ2_S: BlockLayout(256, 82),
    BlockType.IQ1_S: BlockLayout(256, 50),
    BlockType.IQ1_M: BlockLayout(256, 56),
    BlockType.TQ1_0: BlockLayout(256, 54),
    BlockType.TQ2_0: BlockLayout(256, 66),
}


def num_bytes(block_type: BlockType, num_elements: int) -> int:
    """Bytes of `num_elements` values, which must fill whole blocks."""
    layout = LAYOUTS[block_type]
    if num_elements % layout.elements:
        raise ValueError(f"{num_elements} elements do not fill blocks of {layout.elements}")
    return num_elements // layout.elements * layout.num_bytes
