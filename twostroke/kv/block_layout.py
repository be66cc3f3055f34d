"""The byte layout of the keys or the values of a layer in a block, and of their scales.

    fp32, fp16, bf16, fp8   [ elements ]
    int8                    [ elements, −127 … 127 │ scales in fp32, [K, block_size] ]

An int8 value is the element times the scale of its head and token. The scales follow the elements,
so that a block of a group stays contiguous, and the place of the scales follows from the place of
the elements.
"""

from __future__ import annotations

from typing import Final

SCALE_BYTES: Final = 4
ALIGNMENT: Final = 16  # bytes of one thread's load; both parts are aligned to this


def scales_offset(block_size: int, num_heads: int, head_dim: int) -> int:
    """Return the bytes from the first int8 element of a layer's keys in a block to their scales."""
    return -(-block_size * num_heads * head_dim // ALIGNMENT) * ALIGNMENT


def side_bytes(
    block_size: int, num_heads: int, head_dim: int, itemsize: int, scaled: bool = False
) -> int:
    """Return the bytes of the keys (or values) of one layer in a block. `scaled`: int8 with
    scales."""
    if not scaled:
        return block_size * num_heads * head_dim * itemsize
    scales = -(-block_size * num_heads * SCALE_BYTES // ALIGNMENT) * ALIGNMENT
    return scales_offset(block_size, num_heads, head_dim) + scales
