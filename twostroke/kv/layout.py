"""How many bytes the keys or the values of a layer take in a block, and where their scales are.

    fp32, fp16, bf16, fp8   [ elements ]
    int8                    [ elements, −127 … 127 │ scales in fp32, [K, block_size] ]

An int8 element stands for itself times the scale of its head and token. The scales lie behind the
elements, so that a block of a group stays one contiguous piece that can be read, written or sent,
and where the elements are says where their scales are.
"""

from __future__ import annotations

from typing import Final

SCALE_BYTES: Final = 4
ALIGNMENT: Final = 16  # bytes that a load of one thread takes: both parts begin at multiples of it


def scales_offset(block_size: int, num_heads: int, head_dim: int) -> int:
    """Bytes from the first int8 element of a layer's keys in a block to their scales."""
    return -(-block_size * num_heads * head_dim // ALIGNMENT) * ALIGNMENT


def side_bytes(
    block_size: int, num_heads: int, head_dim: int, itemsize: int, scaled: bool = False
) -> int:
    """Of the keys, or of the values, of one layer in a block. `scaled`: they are int8."""
    if not scaled:
        return block_size * num_heads * head_dim * itemsize
    scales = -(-block_size * num_heads * SCALE_BYTES // ALIGNMENT) * ALIGNMENT
    return scales_offset(block_size, num_heads, head_dim) + scales
