"""Stateless random numbers: a function of (seed, position, token id).

This module computes two keys from seed and position. `gumbel` of `kernels/reference_sampling.py`
computes the noise of each token id from the keys. A request gets the same numbers in every batch
and step, also after preemption. The functions use 32-bit integers only, so that every backend
computes the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """Mix the bits of a 32-bit integer by a bijection."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def stream_key(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit keys for all draws at one position of one request."""
    low, high = seed & MASK, (seed >> 32) & MASK
    first = mix(mix(mix(position ^ 0x9E3779B9) ^ low) + high)
    return first, mix(first ^ 0x85EBCA6B ^ high)


def stream_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the stream keys of many requests and positions."""
    low, high = seeds.astype(np.uint32), (seeds >> np.uint64(32)).astype(np.uint32)
    first = _mix_each(positions.astype(np.uint32) ^ np.uint32(0x9E3779B9))
    first ^= low
    first = _mix_each(first)
    first += high
    first = _mix_each(first)
    return first, _mix_each(first ^ np.uint32(0x85EBCA6B) ^ high)


def _mix_each(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Apply `mix` in place; uint32 arithmetic wraps around."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
