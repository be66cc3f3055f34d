"""`HostPool`: the memory behind the block numbers for the native kernels, without torch."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from twostroke.kv.layout import SCALE_BYTES
from twostroke.kv.transfer import HostBlocks
from twostroke.model.describe.spec import ModelSpec

if TYPE_CHECKING:
    from twostroke.kv.shared_memory import SharedPools

Cache = npt.NDArray[Any]  # uint16, the bits of fp16, or int8


class HostPool:
    """Keys and values in fp16, as bits: for each KV group [blocks, layers, 2, K, block_size, D], or
    [blocks, layers, 1, 1, block_size, D] of latents with their rope keys.

    In int8 a head of a block is [block_size, D] elements and then [block_size] scales in fp32: the
    array says [blocks, layers, 2, K, block_size, D + 4]. An element stands for itself times the
    scale of its head and token, as in `layout.py`.

    A block of a group is one contiguous piece. Block 0 of each is null: zeros.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: Sequence[int],
        block_size: int,
        shared: bool = False,
        int8: bool = False,
    ) -> None:
        """`num_blocks`: of each group, the null block not counted. `shared`: in memory that other
        processes can map, which the system does not back by large pages."""
        shapes = []
        for group, count in zip(spec.kv_groups(), num_blocks, strict=True):
            each, heads, channels = group.block_shape
            width = channels + (SCALE_BYTES if int8 else 0)
            shapes.append((count + 1, len(group.layers), each, heads, block_size, width))
        sizes = [(1 if int8 else 2) * math.prod(shape) for shape in shapes]
        self.block_size = block_size
        self.shared: SharedPools | None = None
        if shared:
            from twostroke.kv.shared_memory import SharedPools as Memory  # has a server's packages

            self.shared = Memory(sizes)
        memory = self.shared.pools if self.shared else [memoryview(zero_pages(n)) for n in sizes]
        element: npt.DTypeLike = np.int8 if int8 else np.uint16
        self.data: list[Cache] = [
            np.frombuffer(pages, element).reshape(shape)
            for pages, shape in zip(memory, shapes, strict=True)
        ]
        self._memory = memory

    def blocks(self) -> HostBlocks:
        """As they travel between engines."""
        block_bytes = [data[0].nbytes for data in self.data]
        kind = "int8" if self.data[0].dtype == np.int8 else "float16"
        return HostBlocks(self._memory, block_bytes, self.block_size, f"{kind}, heads first")


def zero_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, not garbage: attention multiplies masked values by zero, and 0 · NaN is NaN.

    The pages come from the system already zero, and each only when it is first used; writing them
    all at once would take seconds for gigabytes.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    # Not shared, as would be the default: of shared memory the system makes no large pages.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a sequence's blocks lie far apart: fewer, larger pages
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
