"""Arithmetic for the sizes of grids and tiles. Triton's functions take microseconds a launch."""

from __future__ import annotations


def ceil_div(amount: int, size: int) -> int:
    return -(-amount // size)


def power_of_two(minimum: int) -> int:
    """Return the smallest power of two ≥ `minimum`."""
    return 1 << (minimum - 1).bit_length()
