"""KV caches of 8-bit types: the stored form of keys and values, and their values when read.

    fp8     e4m3 (to 448) or e5m2 (to 57344), cut where the type ends; no scale
    int8    x · 127 / largest, rounded; `largest` is that of a head of a token, and largest / 127 in
            fp32 is its scale: see `kv/block_layout.py` for where it lies

Attention always sees the stored values: the keys and values of a chunk are rounded in place when
they are stored, so that the result does not depend on how a prompt was cut into chunks, or on
prefix cache hits. Kernels that read int8 may multiply by the scale after the product with the
elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kv.block_layout import SCALE_BYTES, scales_offset

INT8_LARGEST = 127.0
TINY = 1e-30  # the smallest divisor, of a head of zeros
FP8_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def is_8_bit(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def scales_of(cache: Tensor) -> Tensor:
    """Return the scales, [blocks, block_size, K], of a layer's int8 keys or values, [blocks,
    block_size, K, D], which are a view of a pool."""
    blocks, size, heads, dim = cache.shape
    start = cache.storage_offset() + scales_offset(size, heads, dim)
    shape = (blocks, size, heads, SCALE_BYTES)
    strides = (cache.stride(0), SCALE_BYTES, size * SCALE_BYTES, 1)
    return cache.as_strided(shape, strides, start).view(torch.float32).squeeze(-1)


def int8_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to elements, [.., D], and scales, [..]."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    inverse = INT8_LARGEST / largest.clamp_min(TINY)
    return (wide * inverse.unsqueeze(-1)).round().to(torch.int8), largest / INT8_LARGEST


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a float type; fp8 is cut at its largest number."""
    if dtype in FP8_LARGEST:
        x = x.float().clamp(-FP8_LARGEST[dtype], FP8_LARGEST[dtype])
    return x.to(dtype)


def store(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Store [n, K, D] in slots (block · block_size + offset)."""
    at = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype == torch.int8:
        cache[at], scales_of(cache)[at] = int8_of(x)
    else:
        _indexable(cache)[at] = _indexable(rounded_to(x, cache.dtype))


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [.., D] as it is read again from a cache of this type."""
    if dtype == torch.int8:
        elements, scale = int8_of(x)
        return (elements * scale.unsqueeze(-1)).to(x.dtype)
    return rounded_to(x, dtype).to(x.dtype)


def load(cache: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Load the blocks `at`, of any shape, as [*at.shape, block_size, K, D]."""
    if cache.dtype == torch.int8:
        return (cache[at] * scales_of(cache)[at].unsqueeze(-1)).to(dtype)
    return _indexable(cache)[at].view(cache.dtype).to(dtype)


def _indexable(x: Tensor) -> Tensor:
    """View fp8 as bytes, since torch has few operations on fp8."""
    return x.view(torch.uint8) if x.dtype in FP8_LARGEST else x
