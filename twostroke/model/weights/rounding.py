"""Floats → blocks of 4 or 8 bits (Q4_1, Q8_0) with an importance for the error of each column.

`quantization` on a CPU with `calibration` uses this rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import Bytes, Floats

BLOCK = 32
ELEMENTS_AT_ONCE = 1 << 16  # processed at a time, so that they fit into a core's cache
# Shares of the distance between a block's minimum and maximum that its 16 steps cover.
SPANS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
CLIPPINGS = (1.0, 0.98, 0.95, 0.92, 0.88)  # 8 bits: shares of a block's largest number
SMALLEST = np.float32(1e-30)


def rounded_blocks(type: BlockType, x: Floats, importance: Floats) -> Bytes:
    """Round [rows, columns] → [rows, bytes]. `importance`, [columns], weights the squared errors.

    Raise `ValueError` on NaN and infinity.
    """
    if not np.isfinite(x).all():
        raise ValueError("NaN or infinity")
    counts = importance.reshape(-1, BLOCK)
    rows = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    make = _q4_1 if type == BlockType.Q4_1 else _q8_0
    parts = (x[at : at + rows].reshape(-1, *counts.shape) for at in range(0, len(x), rows))
    return np.concatenate([make(part, counts) for part in parts]).reshape(len(x), -1)


def _q4_1(x: Floats, counts: Floats) -> Bytes:
    """Round to Q4_1. For each span scale and minimum are fitted to the codes, then the codes to
    both; the span with the smallest error is taken."""
    lowest = np.minimum(_per_block(x, np.min), 0)
    highest = np.maximum(_per_block(x, np.max), 0)
    total = _per_block(counts)
    best: list[Any] = []
    mean = _per_block(x * counts) / total
    for span in SPANS:
        scale = (highest - lowest) * np.float32(span / 15)
        codes = _nearest(x - (highest + lowest) / 2 + np.float32(7.5) * scale, scale, 0, 15)
        middle = _per_block(codes * counts) / total
        apart = (codes - middle) * counts
        slope = _per_block(apart * x) / np.maximum(_per_block(apart * codes), SMALLEST)
        scale = np.where(slope > 0, slope, scale).astype("<f2")
        minimum = (mean - scale.astype(np.float32) * middle).astype("<f2")
        unit, base = scale.astype(np.float32), minimum.astype(np.float32)
        codes = _nearest(x - base, unit, 0, 15)
        error = _per_block(counts * (codes * unit + base - x) ** 2)
        best = _better(best, [error, scale, minimum, codes])
    _, scale, minimum, codes = best
    low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
    return np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), low | high << 4], axis=-1)


def _q8_0(x: Floats, counts: Floats) -> Bytes:
    largest = _per_block(np.abs(x), np.max)
    best: list[Any] = []
    for clipping in CLIPPINGS:
        scale = (largest * np.float32(clipping / 127)).astype("<f2")
        unit = scale.astype(np.float32)
        codes = _nearest(x, unit, -127, 127)
        best = _better(best, [_per_block(counts * (codes * unit - x) ** 2), scale, codes])
    _, scale, codes = best
    return np.concatenate([scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=-1)


def _per_block(x: Floats, reduce: Callable[..., Any] = np.sum) -> Floats:
    result: Floats = reduce(x, axis=-1, keepdims=True)
    return result


def _nearest(x: Floats, scale: Floats, first: int, last: int) -> Floats:
    return np.clip(np.rint(x / np.maximum(scale, SMALLEST)), first, last)


def _better(best: list[Any], tried: list[Any]) -> list[Any]:
    """Return the better of two roundings for each block. The error is the first element."""
    if not best:
        return tried
    better = tried[0] < best[0]
    for old, new in zip(best, tried, strict=True):
        np.copyto(old, new, where=better)
    return best
