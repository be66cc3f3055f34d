"""Weights and activations in fp8 (e4m3), and what they stand for.

    weight       [out, in], a scale for each row, or for each `in / groups` numbers of a row
    activations  [T, in], a scale for each token, found when they are quantised

A number is its e4m3 value times its scale. e4m3 has three bits of mantissa and reaches 448; it has
no infinity, and what is larger than 448 is cut there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-12  # of a row of zeros
AT_ONCE = 1 << 24  # numbers that are there in fp32 while a matrix is quantised
ARRIVALS_COLUMNS = 32  # of a product, that share a counter


class Fp8Weight(NamedTuple):
    values: Tensor  # [out, in] e4m3, contiguous
    scale: Tensor  # [out, groups] fp32; a group is `in / groups` numbers of a row
    arrived: Tensor  # int32, zero between launches: where the splits of a product meet

    @property
    def is_grouped(self) -> bool:
        return self.scale.shape[1] > 1

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + self.scale.numel() * self.scale.element_size()

    def to_meta(self) -> Fp8Weight:
        return Fp8Weight(*(part.to("meta") for part in self))


class Fp8Rows(NamedTuple):
    """Activations, and the dtype that a product with them has."""

    values: Tensor  # [T, in] e4m3, contiguous
    scale: Tensor  # [T] fp32
    dtype: torch.dtype


def fp8_weight(values: Tensor, scale: Tensor) -> Fp8Weight:
    counters = -(-len(values) // ARRIVALS_COLUMNS)
    arrived = torch.zeros(counters, dtype=torch.int32, device=values.device)
    return Fp8Weight(values, scale, arrived)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 values of each row, the largest of which is 448, and the rows' scales, [rows]."""
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = (x.abs().amax(-1).float() / LARGEST).clamp_min_(SMALLEST_SCALE)
    rows = max(1, AT_ONCE // x.shape[-1])
    for part, to, unit in zip(*(torch.split(y, rows) for y in (x, values, scale)), strict=True):
        to.copy_((part.float() / unit.unsqueeze(-1)).clamp_(-LARGEST, LARGEST))
    return values, scale


def dequantised(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`scale`: [rows, groups]."""
    if scale.shape[1] == 1:
        return values.to(torch.float32).mul_(scale).to(dtype)
    grouped = torch.unflatten(values.to(torch.float32), 1, (scale.shape[1], -1))
    return grouped.mul_(scale.unsqueeze(-1)).flatten(1).to(dtype)
