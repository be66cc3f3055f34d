"""The tensors behind the block numbers: one pool, reserved once. Without torch: `host_pool.py`."""

from __future__ import annotations

import math

import torch

from twostroke.kv.host_pool import zero_pages
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

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._data[index, 0], self._data[index, 1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = zero_pages(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
