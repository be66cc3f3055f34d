"""Sizes of grids and tiles, in plain Python: Triton's own take microseconds, at every launch."""

from __future__ import annotations


def ceil_div(amount: int, size: int) -> int:
    return -(-amount // size)


def power_of_two(minimum: int) -> int:
    """Return the smallest power of two that is not below `minimum`."""
    return 1 << (minimum - 1).bit_length()
