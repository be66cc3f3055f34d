"""The tensors behind the block numbers: one pool, reserved once."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

from twostroke.model.spec import ModelSpec


class KVPool:
    """Keys and values of every layer, [blocks, block_size, K, D] each. Block 0 is null: zeros."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        self._data = _zeros(shape, dtype, device)
        self.block_size = block_size
        self.num_bytes = self._data.numel() * self._data.element_size()

    def halves(self) -> npt.NDArray[np.uint16]:
        """All of it as bits, [layers, 2, blocks, block_size, K, D], for kernels outside torch; they
        may keep another order inside a block."""
        return self._data.view(torch.uint16).numpy()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._data[index, 0], self._data[index, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: attention multiplies masked values by zero, and 0 · NaN is NaN.

    On a CPU the pages come from the system already zero, and each only when it is first used;
    `torch.zeros` would write all of them at once, which takes seconds for gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a sequence's blocks lie far apart: fewer, larger pages
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
