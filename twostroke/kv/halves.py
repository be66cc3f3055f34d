"""`HalfPool`: the memory behind the block numbers for the native kernels, without torch."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import numpy.typing as npt

from twostroke.model.spec import ModelSpec


class HalfPool:
    """Keys and values of every layer in half precision, as bits. Block 0 is null: zeros."""

    def __init__(self, spec: ModelSpec, num_blocks: int, block_size: int) -> None:
        # The kernels keep an order of their own inside a block: [K, block_size, D].
        shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        pages = zero_pages(2 * math.prod(shape))
        self.data: npt.NDArray[np.uint16] = np.frombuffer(pages, np.uint16).reshape(shape)


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
