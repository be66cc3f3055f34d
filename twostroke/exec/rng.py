"""Random numbers without state: a function of (seed, position, token id).

The same request draws the same numbers whatever else is in the batch, in whichever step, after
any preemption. Everything is 32-bit integer arithmetic, so that every backend can do the same; the
noise made of it is `gumbel` of `sampling.py`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """A bijection of 32-bit integers that scatters its argument's bits."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def stream_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for all draws at one position of one request."""
    low, high = seed & MASK, (seed >> 32) & MASK
    first = mix(mix(mix(position ^ 0x9E3779B9) ^ low) + high)
    return first, mix(first ^ 0x85EBCA6B ^ high)


def stream_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """`stream_key` of many at once."""
    low, high = seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    first = _mix_each(positions.astype(np.uint32) ^ np.uint32(0x9E3779B9))
    first ^= low
    first = _mix_each(first)
    first += high
    first = _mix_each(first)
    return first, _mix_each(first ^ np.uint32(0x85EBCA6B) ^ high)


def _mix_each(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """In place; 32 bits overflow by themselves."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
