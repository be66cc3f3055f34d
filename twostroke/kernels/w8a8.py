"""Weights and activations of 8 bits (W8A8), in fp8 (e4m3) or int8, and what they stand for.

    weight       [out, in], a scale for each row, or for each `in / groups` numbers of a row
    activations  [T, in], a scale for each token, found when they are quantised

A number is its value times its scale. e4m3 has three bits of mantissa and reaches 448; it has no
infinity, and what is larger than 448 is cut there. int8 is whole, to the nearest, even of two, and
reaches 127 (a file's weights may have −128); a product's sum is exact, as int32 holds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.kernels.split_k import arrival_counters

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {E4M3: 448.0, INT8: 127.0}
SMALLEST_SCALE = 1e-12  # of a row of zeros
# Of a row's largest number: what the scale's search leaves out, where errors differ in weight.
CLIPPINGS = (1.0, 0.97, 0.94, 0.9, 0.86, 0.8, 0.74)
AT_ONCE = 1 << 24  # numbers that are there in fp32 while a matrix is quantised
LONGEST_INT8 = ((1 << 31) - 1) // (127 * 128)  # numbers of a row whose sum int32 holds


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
    """Quantise each row, so that its largest number becomes the largest of the type, and return the
    rows' scales too, [rows]. `importance`, [in]: the weight of each column's squared error; then
    several scales that clip more or less of the largest number are tried, and each row takes the
    scale with the smallest error."""
    max_value = LARGEST[dtype]
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = (x.abs().amax(-1).float() / max_value).clamp_min_(SMALLEST_SCALE)
    rows = max(1, AT_ONCE // x.shape[-1])
    for part, to, unit in zip(*(torch.split(y, rows) for y in (x, values, scale)), strict=True):
        if importance is not None:
            unit.copy_(_best_scale(part.float(), unit, dtype, importance))
        to.copy_(_rounded(part.float(), unit, dtype))
    return values, scale


def _best_scale(x: Tensor, scale: Tensor, dtype: torch.dtype, importance: Tensor) -> Tensor:
    tried = [scale * clipping for clipping in CLIPPINGS]
    errors = [
        (_rounded(x, one, dtype).float() * one.unsqueeze(-1) - x).square_() @ importance
        for one in tried
    ]
    best = torch.stack(errors).argmin(0, keepdim=True)
    return torch.stack(tried).gather(0, best).squeeze(0)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    wide = (x / scale.unsqueeze(-1)).clamp_(-LARGEST[dtype], LARGEST[dtype])
    return wide.round_() if dtype == INT8 else wide.to(dtype)


def dequantised(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise. `scale`: [rows, groups]."""
    if scale.shape[1] == 1:
        return values.to(torch.float32).mul_(scale).to(dtype)
    grouped = torch.unflatten(values.to(torch.float32), 1, (scale.shape[1], -1))
    return grouped.mul_(scale.unsqueeze(-1)).flatten(1).to(dtype)
