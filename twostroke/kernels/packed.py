"""Quantised weights with codes of 4 or 8 bits, in groups that share a scale.

    value      scale · (code − zero), or scale · code + offset; codes are unsigned integers
    zero       a value for each group; or, if `zero` is None, 8 (4 bits) or 128 (8 bits)
    4 bits     a little-endian word of 16 bits has four codes, the lowest nibble first. A block of
               128 codes is 32 words: word w has the codes w, 32 + w, 64 + w and 96 + w
    8 bits     one byte for each code

In neighbouring words the same nibble has neighbouring codes, which share a scale. Blocks are
smaller if 128 does not divide the row length, or if groups and blocks do not divide each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from twostroke.kernels.split_k import arrival_counters

ELEMENTS_AT_ONCE = 1 << 23  # elements of a matrix that are converted to fp32 at a time
# The search for a group's scale clips the group at each of these fractions of its absmax.
CLIPPINGS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.74)
SMALLEST_SCALE = 2.0**-24  # of fp16


class PackedWeight(NamedTuple):
    bits: int
    codes: Tensor  # [out, in · bits / 8] uint8, contiguous
    scale: Tensor  # [out, groups]; fp16, or fp32 if fp16 is too inexact (`fits_fp16`)
    zero: Tensor | None  # [out, groups] uint8
    offset: Tensor | None  # [out, groups], in the dtype of the scale
    arrived: Tensor  # see `split_k.py`

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    @property
    def block(self) -> int:
        """Codes of a block of a 4-bit weight."""
        return block_size(self.shape[1], self.group)

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scale, self.zero, self.offset)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: str | torch.device) -> PackedWeight:
        zero = None if self.zero is None else self.zero.to(device)
        offset = None if self.offset is None else self.offset.to(device)
        codes, scale, arrived = (p.to(device) for p in (self.codes, self.scale, self.arrived))
        return PackedWeight(self.bits, codes, scale, zero, offset, arrived)

    def with_scaled_rows(self, factors: Tensor) -> PackedWeight:
        """Return the weight with each row multiplied by its factor. Scales may become fp32."""
        scale, offset = (
            None if part is None else part.float() * factors.unsqueeze(1)
            for part in (self.scale, self.offset)
        )
        assert scale is not None
        if fits_fp16(scale) and (offset is None or fits_fp16(offset)):
            scale = scale.to(self.scale.dtype)
            offset = None if offset is None else offset.to(self.scale.dtype)
        return self._replace(scale=scale, offset=offset)


class Codes(NamedTuple):
    """A quantised matrix before packing: one uint8 for each code."""

    bits: int
    codes: Tensor  # [out, in] uint8
    scale: Tensor  # [out, groups] fp32
    zero: Tensor | None = None  # [out, groups] uint8
    offset: Tensor | None = None  # [out, groups] fp32

    def to(self, device: str | torch.device) -> Codes:
        zero = None if self.zero is None else self.zero.to(device)
        offset = None if self.offset is None else self.offset.to(device)
        return Codes(self.bits, self.codes.to(device), self.scale.to(device), zero, offset)


def packed_weight(
    bits: int, codes: Tensor, scale: Tensor, zero: Tensor | None, offset: Tensor | None
) -> PackedWeight:
    """Build the weight from packed codes."""
    return PackedWeight(bits, codes, scale, zero, offset, arrival_counters(codes))


def pack(matrix: Codes) -> PackedWeight:
    codes = matrix.codes.contiguous()
    if matrix.bits == 4:
        inner = codes.shape[1]
        codes = packed_codes(codes, block_size(inner, inner // matrix.scale.shape[1]))
    scale, offset = matrix.scale, matrix.offset
    if fits_fp16(scale) and (offset is None or fits_fp16(offset)):
        scale, offset = scale.half(), None if offset is None else offset.half()
    return packed_weight(matrix.bits, codes, scale.contiguous(), matrix.zero, offset)


def block_size(inner: int, group: int) -> int:
    """Return the largest block size for rows of `inner` codes for which each quarter of a block is
    in one group."""
    for size in (128, 64, 32, 16, 8):
        if (
            inner % size == 0
            and group % (size // 4) == 0
            and max(size, group) % min(size, group) == 0
        ):
            return size
    return 4


def packed_codes(codes: Tensor, block: int) -> Tensor:
    a, b, c, d = codes.view(len(codes), -1, 4, block // 4).unbind(2)
    return torch.stack([a | b << 4, c | d << 4], dim=-1).flatten(1)


def unpacked_codes(weight: PackedWeight) -> Tensor:
    if weight.bits == 8:
        return weight.codes
    low, high = weight.codes.view(len(weight.codes), -1, weight.block // 4, 2).unbind(-1)
    return torch.stack([low & 15, low >> 4, high & 15, high >> 4], dim=2).flatten(1)


def fits_fp16(numbers: Tensor) -> bool:
    """Return True if rounding to fp16 changes no number by more than 2^-11 of its row's absmax."""
    largest = numbers.abs().amax(1, keepdim=True)
    if not bool((largest <= torch.finfo(torch.float16).max).all()):
        return False
    return bool(((numbers.half().float() - numbers).abs() <= largest * 2.0**-11).all())


def dequantised(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantised matrix."""
    codes = torch.unflatten(unpacked_codes(weight), 1, (weight.scale.shape[1], -1)).float()
    scale = weight.scale.float().unsqueeze(-1)
    if weight.offset is not None:
        values = codes.mul_(scale).add_(weight.offset.float().unsqueeze(-1))
    elif weight.zero is not None:
        values = codes.sub_(weight.zero.float().unsqueeze(-1)).mul_(scale)
    else:
        values = codes.sub_(1 << (weight.bits - 1)).mul_(scale)
    return values.flatten(1).to(dtype)


def quantised(x: Tensor, group: int, importance: Tensor | None = None) -> Codes:
    """Quantise a matrix to 4 bits, with one scale for each group: the scale with the smallest
    squared error among those that map the group's absmax, times a fraction of `CLIPPINGS`, to −8
    or to 7. `importance`, [in]: the weight of each column's error."""
    rows = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    error_weights = None if importance is None else importance.view(1, -1, group)
    parts = [_quantised(part, group, error_weights) for part in torch.split(x, rows)]
    codes, scales = zip(*parts, strict=True)
    return Codes(4, torch.cat(codes), torch.cat(scales))


def _quantised(x: Tensor, group: int, error_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    x_fp32 = torch.unflatten(x.float(), 1, (-1, group))
    absmax, at = x_fp32.abs().max(2, keepdim=True)
    largest = x_fp32.gather(2, at)
    best = scale = None
    for end, clipping in ((end, clipping) for end in (-8.0, 7.0) for clipping in CLIPPINGS):
        tried = ((largest if end < 0 else absmax) * (clipping / end)).half().float()
        tried = torch.where(tried == 0, SMALLEST_SCALE, tried)
        error = (_rounded(x_fp32, tried) * tried - x_fp32).square_()
        if error_weights is not None:
            error *= error_weights
        error = error.sum(2, keepdim=True)
        if best is None or scale is None:
            best, scale = error, tried
        else:
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
    assert scale is not None
    codes = (_rounded(x_fp32, scale) + 8).to(torch.uint8)
    return codes.flatten(1), scale.squeeze(2)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round_().clamp_(-8, 7)
