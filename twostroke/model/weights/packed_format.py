"""Matrices of 4 or 8 bits a number, as files and backends have them; `kernels/packed.py` says what
the numbers stand for. No torch here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SMALLEST_GROUP = 16  # that kernels have


class PackedFormat(NamedTuple):
    bits: int
    group: int  # numbers of a row that share a scale
    zeros: bool = False  # each group has its own
    offsets: bool = False

    @property
    def needs_fp8(self) -> bool:
        return False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """With scales and offsets in fp16."""
        rows, columns = shape
        of_a_group = 2 * (1 + self.offsets) + self.zeros
        return rows * (columns * self.bits // 8 + columns // self.group * of_a_group)


class StoredCodes(NamedTuple):
    """A matrix, or a part of it, out of its file."""

    bits: int
    codes: npt.NDArray[np.uint8]  # [out, in], one a byte
    scales: npt.NDArray[np.float32]  # [out, groups]
    zeros: npt.NDArray[np.uint8] | None = None  # [out, groups]; None: the middle of the codes
    offsets: npt.NDArray[np.float32] | None = None  # [out, groups]
