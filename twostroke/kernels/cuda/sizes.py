"""Sizes of grids and tiles, in plain Python: Triton's own take microseconds, at every launch."""

from __future__ import annotations


def ceil_div(amount: int, size: int) -> int:
    return -(-amount // size)


def power_of_two(least: int) -> int:
    """The smallest that is not below."""
    return 1 << (least - 1).bit_length()
