"""The memory behind the block numbers: one pool a KV group, reserved once.

    group    [ block 0: null, zeros │ block 1 │ … ]
    block    [ layer 0: keys, values │ layer 1: keys, values │ … ]        one contiguous piece
    latent   [ layer 0: latents, rope keys │ layer 1: … │ … ]             the keys; a part is values

So a block of a group can be read, written or sent as one. Without torch: `host_pool.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from twostroke.kv.host_pool import zero_pages
from twostroke.model.spec import ModelSpec


class KVPool:
    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_blocks`: of each KV group, the null block not counted."""
        self.block_size = block_size
        self.groups: list[torch.Tensor] = []
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, blocks in zip(spec.kv_groups(), num_blocks, strict=True):
            each, *heads = group.block_shape
            shape = (blocks + 1, len(group.layers), each, block_size, *heads)
            data = _zeros(shape, dtype, device)
            self.groups.append(data)
            for place, index in enumerate(group.layers):
                keys = data[:, place, 0]
                latent = keys[..., : group.latent_dim]
                layers[index] = keys, latent if group.latent_dim else data[:, place, 1]
        # Keys and values of each layer, [blocks, block_size, K, D] each; of a latent layer the
        # latents with their rope keys, and the latents alone: the same memory.
        self.layers = [layers[index] for index in range(spec.num_layers)]
        self.num_bytes = sum(data.numel() * data.element_size() for data in self.groups)

    def block(self, group: int, number: int) -> torch.Tensor:
        """A block of a group, all its layers: [layers, 2 (latent: 1), block_size, K, D]."""
        return self.groups[group][number]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = zero_pages(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
