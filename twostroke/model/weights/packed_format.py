"""Matrices with 4 or 8 bits per number, in files and in backends. `kernels/packed.py` defines their
values. This module does not import torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SMALLEST_GROUP = 16  # of the kernels


class PackedFormat(NamedTuple):
    bits: int
    group: int  # numbers of a row that share a scale
    zeros: bool = False  # each group has a zero point
    offsets: bool = False

    @property
    def needs_fp8(self) -> bool:
        return False

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a matrix, with scales and offsets in fp16."""
        rows, columns = shape
        of_a_group = 2 * (1 + self.offsets) + self.zeros
        return rows * (columns * self.bits // 8 + columns // self.group * of_a_group)


class StoredCodes(NamedTuple):
    """The codes of a matrix or of a part of it, read from its file."""

    bits: int
    codes: npt.NDArray[np.uint8]  # [out, in], a code per byte
    scales: npt.NDArray[np.float32]  # [out, groups]
    zeros: npt.NDArray[np.uint8] | None = None  # [out, groups]; None: the middle of the codes
    offsets: npt.NDArray[np.float32] | None = None  # [out, groups]
