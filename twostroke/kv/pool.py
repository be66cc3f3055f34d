"""`KVPool`: the KV memory on a torch device, one pool per KV group, allocated once.

    group    [ block 0: null, zeros │ block 1 │ … ]
    block    [ layer 0: keys, values │ layer 1: keys, values │ … ]        contiguous
    latent   [ layer 0: latents, rope keys │ layer 1: … │ … ]             both are the keys; the
                                                                          latents are the values
    int8     [ layer 0: keys, scales, values, scales │ … ]                see `block_layout.py`

A block of a group is read, written or sent as one piece. `host_pool.py` is the pool without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from twostroke.kv.block_layout import side_bytes
from twostroke.kv.host_pool import zero_pages
from twostroke.kv.transfer import KVTransfer
from twostroke.kv.transports import TransportConfig
from twostroke.model.describe.spec import ModelSpec

if TYPE_CHECKING:
    from twostroke.kv.device_memory import DeviceBlocks
    from twostroke.kv.shared_memory import SharedPools


class KVPool:
    """The pools of all KV groups."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool = False,
    ) -> None:
        """`num_blocks`: blocks of each KV group, without the null block. `shared`: other processes
        can fetch blocks."""
        self.block_size = block_size
        self.groups: list[torch.Tensor] = []
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        shapes: list[tuple[int, ...]] = []
        for group, blocks in zip(spec.kv_groups(), num_blocks, strict=True):
            each, heads, channels = group.block_shape
            inner: tuple[int, ...] = (block_size, heads, channels)
            if dtype == torch.int8:  # bytes, including scales
                inner = (side_bytes(block_size, heads, channels, 1, scaled=True),)
            shapes.append((blocks + 1, len(group.layers), each, *inner))
        on_cpu = device.type == "cpu"
        sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
        # GPU memory is shared by its IPC handle; shared host memory has the table of offers.
        self.shared: SharedPools | None = None
        if shared:
            # Imported here, because the module needs packages of the server.
            from twostroke.kv.shared_memory import SharedPools as Memory

            self.shared = Memory(sizes if on_cpu else ())
        for n, group in enumerate(spec.kv_groups()):
            if not on_cpu:
                data = torch.zeros(shapes[n], dtype=dtype, device=device)
            else:
                pages = self.shared.pools[n] if self.shared else zero_pages(sizes[n])
                data = torch.frombuffer(pages, dtype=dtype).view(shapes[n])
            parts = data
            if dtype == torch.int8:
                numbers = (block_size, *group.block_shape[1:])
                parts = torch.unflatten(data[..., : math.prod(numbers)], -1, numbers)
            self.groups.append(data)
            for place, index in enumerate(group.layers):
                keys = parts[:, place, 0]
                latent = keys[..., : group.latent_dim]
                layers[index] = keys, latent if group.latent_dim else parts[:, place, 1]
        # Keys and values of each layer, [blocks, block_size, K, D] each. For a latent layer: the
        # latents with rope keys, and the latents alone, in the same memory.
        self.layers = [layers[index] for index in range(spec.num_layers)]
        self.num_bytes = sum(data.numel() * data.element_size() for data in self.groups)

    def block(self, group: int, number: int) -> torch.Tensor:
        """Return a block of a group with all layers: [layers, 2 (latent: 1), block_size, K, D], or
        in int8 [layers, 2, bytes]."""
        return self.groups[group][number]

    def transfer(self, config: TransportConfig) -> KVTransfer:
        """Return the transfer endpoint of this pool."""
        from twostroke.kv.device_memory import device_transfer

        return device_transfer(self.blocks(), self.shared, config)

    def blocks(self) -> DeviceBlocks:
        """Return the blocks as bytes, for transfers and tiers."""
        from twostroke.kv.device_memory import DeviceBlocks

        return DeviceBlocks(self.groups, self.block_size)
