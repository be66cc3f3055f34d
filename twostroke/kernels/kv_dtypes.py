"""KV caches with 8-bit dtypes: quantisation of keys and values, storing and loading.

    fp8     e4m3 (clamped to ±448) or e5m2 (clamped to ±57344), without a scale
    int8    each head of a token has its own scale in fp32:
                absmax   = the largest magnitude in the head
                scale    = absmax / 127
                element  = round(x · 127 / absmax)
            `kv/block_layout.py` defines where the scales lie in a block

Attention always sees the stored numbers: the keys and values of a chunk are rounded in place when
they are stored. So the result depends neither on the sizes of the chunks of a prompt nor on prefix
cache hits. Kernels that read int8 may compute the dot product with the int8 elements first and
multiply the result by the scale.

In shapes, K is the number of KV heads and D the head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.kv.block_layout import SCALE_BYTES, scales_offset

INT8_MAX = 127.0
MIN_ABSMAX = 1e-30  # avoids a division by zero for a head of zeros
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def is_8_bit(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


def scales_of(cache: Tensor) -> Tensor:
    """Return a view of the scales, [blocks, block_size, K]. `cache`: the int8 keys or values of a
    layer, [blocks, block_size, K, D], as a view of the pool that also contains the scales."""
    blocks, size, heads, dim = cache.shape
    start = cache.storage_offset() + scales_offset(size, heads, dim)
    shape = (blocks, size, heads, SCALE_BYTES)
    strides = (cache.stride(0), SCALE_BYTES, size * SCALE_BYTES, 1)
    return cache.as_strided(shape, strides, start).view(torch.float32).squeeze(-1)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise keys or values, [.., D]; return int8 elements, [.., D], and scales, [..]."""
    x_fp32 = x.float()
    absmax = x_fp32.abs().amax(-1)
    inverse_scale = INT8_MAX / absmax.clamp_min(MIN_ABSMAX)
    elements = (x_fp32 * inverse_scale.unsqueeze(-1)).round().to(torch.int8)
    return elements, absmax / INT8_MAX


def rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a float dtype. For fp8, first clamp to the dtype's range."""
    if dtype in FP8_MAX:
        x = x.float().clamp(-FP8_MAX[dtype], FP8_MAX[dtype])
    return x.to(dtype)


def store(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Store the keys or values of n tokens, [n, K, D], in n slots. A slot is
    block · block_size + offset in the block."""
    block_and_offset = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype == torch.int8:
        cache[block_and_offset], scales_of(cache)[block_and_offset] = quantize_int8(x)
    else:
        _indexable(cache)[block_and_offset] = _indexable(rounded_to(x, cache.dtype))


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what `load` would return, in the dtype of `x`, after `store` into a cache with
    `dtype`: `x` with the rounding error of the cache."""
    if dtype == torch.int8:
        elements, scales = quantize_int8(x)
        return (elements * scales.unsqueeze(-1)).to(x.dtype)
    return rounded_to(x, dtype).to(x.dtype)


def load(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Load blocks as [*blocks.shape, block_size, K, D] in `dtype`. `blocks`: any shape."""
    if cache.dtype == torch.int8:
        return (cache[blocks] * scales_of(cache)[blocks].unsqueeze(-1)).to(dtype)
    return _indexable(cache)[blocks].view(cache.dtype).to(dtype)


def _indexable(x: Tensor) -> Tensor:
    """View fp8 as bytes, since torch has few operations on fp8."""
    return x.view(torch.uint8) if x.dtype in FP8_MAX else x
