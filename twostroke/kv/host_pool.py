"""`HostPool`: the memory behind the block numbers for the native kernels, without torch."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.kv.transfer import KVTransfer, SharedPools
from twostroke.model.spec import ModelSpec

Cache = npt.NDArray[np.uint16]


class HostPool:
    """Keys and values in fp16, as bits: for each KV group [blocks, layers, 2, K, block_size, D], or
    [blocks, layers, 1, 1, block_size, D] of latents with their rope keys.

    A block of a group is one contiguous piece. Block 0 of each is null: zeros.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: Sequence[int], block_size: int, shared: bool = False
    ) -> None:
        """`num_blocks`: of each group, the null block not counted. `shared`: in memory that other
        processes can map, which the system does not back by large pages."""
        shapes = []
        for group, count in zip(spec.kv_groups(), num_blocks, strict=True):
            each, heads, channels = group.block_shape
            shapes.append((count + 1, len(group.layers), each, heads, block_size, channels))
        sizes = [2 * math.prod(shape) for shape in shapes]
        self.block_size = block_size
        self.shared = SharedPools(sizes) if shared else None
        memory = self.shared.pools if self.shared else [memoryview(zero_pages(n)) for n in sizes]
        self.data: list[Cache] = [
            np.frombuffer(pages, np.uint16).reshape(shape)
            for pages, shape in zip(memory, shapes, strict=True)
        ]
        self._memory = memory

    def transfer(self, checked: bool = False) -> KVTransfer:
        """This pool's end of transfers. `checked`: with checksums."""
        block_bytes = [data[0].nbytes for data in self.data]
        return KVTransfer(self._memory, block_bytes, self.block_size, self.shared, checked)


def zero_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, not garbage: attention multiplies masked values by zero, and 0 · NaN is NaN.

    The pages come from the system already zero, and each only when it is first used; writing them
    all at once would take seconds for gigabytes.
    """
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a sequence's blocks lie far apart: fewer, larger pages
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
