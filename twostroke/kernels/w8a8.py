"""Weights and activations of 8 bits (W8A8), in fp8 (e4m3) or int8.

    weight       [out, in], a scale for each row, or for each `in / groups` numbers of a row
    activations  [T, in], a scale for each token, computed when they are quantised

A stored value times its scale is the number that it represents. e4m3 has three mantissa bits, a
largest value of 448 and no infinity; larger values are clamped to 448. For int8, values are rounded
to the nearest integer (half to even) and clamped to ±127; weights of a checkpoint may contain −128.
The int32 sums of int8 products are exact for rows of up to `MAX_INT8_COLUMNS`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.kernels.split_k import arrival_counters

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {E4M3: 448.0, INT8: 127.0}
SMALLEST_SCALE = 1e-12  # of a row of zeros
# The search for a row's scale clips the row at each of these fractions of its absmax.
CLIPPINGS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.8, 0.74)
ELEMENTS_AT_ONCE = 1 << 24  # elements of a matrix that are converted to fp32 at a time
MAX_INT8_COLUMNS = ((1 << 31) - 1) // (127 * 128)  # of a row whose dot product fits in int32


class W8Weight(NamedTuple):
    values: Tensor  # [out, in] e4m3 or int8, contiguous
    scale: Tensor  # [out, groups] fp32; a group is `in / groups` numbers of a row
    arrived: Tensor  # see `split_k.py`

    @property
    def is_grouped(self) -> bool:
        return self.scale.shape[1] > 1

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + self.scale.numel() * self.scale.element_size()

    def to_meta(self) -> W8Weight:
        return W8Weight(*(part.to("meta") for part in self))


class QuantizedActivations(NamedTuple):
    """Quantised activations, and the dtype of products with them."""

    values: Tensor  # [T, in] e4m3 or int8, contiguous
    scale: Tensor  # [T] fp32
    dtype: torch.dtype


def w8_weight(values: Tensor, scale: Tensor) -> W8Weight:
    return W8Weight(values, scale, arrival_counters(values))


def quantised(
    x: Tensor, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise each row. Return the values and the scale of each row, [rows].

    Without `importance`, the largest number of a row becomes the largest value of `dtype`. With
    `importance`, [in], the weight of each column's squared error, each row gets the scale among
    those of `CLIPPINGS` with the smallest weighted error.
    """
    max_value = LARGEST[dtype]
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = (x.abs().amax(-1).float() / max_value).clamp_min_(SMALLEST_SCALE)
    rows = max(1, ELEMENTS_AT_ONCE // x.shape[-1])
    chunks = zip(*(torch.split(whole, rows) for whole in (x, values, scale)), strict=True)
    for x_rows, value_rows, row_scales in chunks:
        if importance is not None:
            row_scales.copy_(_best_scale(x_rows.float(), row_scales, dtype, importance))
        value_rows.copy_(_rounded(x_rows.float(), row_scales, dtype))
    return values, scale


def _best_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, importance: Tensor) -> Tensor:
    tried = [scale * clipping for clipping in CLIPPINGS]
    errors = [
        (_rounded(x, s, dtype).float() * s.unsqueeze(-1) - x).square_() @ importance for s in tried
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(tried).gather(0, best).squeeze(0)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = (x / scale.unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return scaled.round_() if dtype == INT8 else scaled.to(dtype)


def dequantised(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise. `scale`: [rows, groups]."""
    if scale.shape[1] == 1:
        return values.to(torch.float32).mul_(scale).to(dtype)
    grouped = torch.unflatten(values.to(torch.float32), 1, (scale.shape[1], -1))
    return grouped.mul_(scale.unsqueeze(-1)).flatten(1).to(dtype)
