"""Floats rounded to blocks of 4 or 8 bits (Q4_1, Q8_0) where the columns' errors differ in weight:
what `quantization` makes on a CPU with `calibration`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import Bytes, Floats

BLOCK = 32
AT_ONCE = 1 << 16  # numbers, so that a core's cache has them all the time
# Of the distance between a block's least and largest number: what its 16 steps reach over.
SPANS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
CLIPPINGS = (1.0, 0.98, 0.95, 0.92, 0.88)  # of 8 bits: of a block's largest number
SMALLEST = np.float32(1e-30)


def rounded_blocks(type: BlockType, x: Floats, importance: Floats) -> Bytes:
    """[rows, columns] → [rows, bytes]. `importance`, [columns]: what a squared error counts.
    Raises `ValueError` on NaN and infinity."""
    if not np.isfinite(x).all():
        raise ValueError("NaN or infinity")
    counts = importance.reshape(-1, BLOCK)
    rows = max(1, AT_ONCE // x.shape[1])
    make = _q4_1 if type == BlockType.Q4_1 else _q8_0
    parts = (x[at : at + rows].reshape(-1, *counts.shape) for at in range(0, len(x), rows))
    return np.concatenate([make(part, counts) for part in parts]).reshape(len(x), -1)


def _q4_1(x: Floats, counts: Floats) -> Bytes:
    """Of some spans the one with the least error, after scale and minimum were fitted to its codes
    and the codes to those."""
    least, most = np.minimum(_each(x, np.min), 0), np.maximum(_each(x, np.max), 0)
    total = _each(counts)
    found: list[Any] = []
    mean = _each(x * counts) / total
    for span in SPANS:
        scale = (most - least) * np.float32(span / 15)
        codes = _nearest(x - (most + least) / 2 + np.float32(7.5) * scale, scale, 0, 15)
        middle = _each(codes * counts) / total
        apart = (codes - middle) * counts
        slope = _each(apart * x) / np.maximum(_each(apart * codes), SMALLEST)
        scale = np.where(slope > 0, slope, scale).astype("<f2")
        minimum = (mean - scale.astype(np.float32) * middle).astype("<f2")
        unit, base = scale.astype(np.float32), minimum.astype(np.float32)
        codes = _nearest(x - base, unit, 0, 15)
        error = _each(counts * (codes * unit + base - x) ** 2)
        found = _better(found, [error, scale, minimum, codes])
    _, scale, minimum, codes = found
    low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
    return np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), low | high << 4], axis=-1)


def _q8_0(x: Floats, counts: Floats) -> Bytes:
    largest = _each(np.abs(x), np.max)
    found: list[Any] = []
    for clipping in CLIPPINGS:
        scale = (largest * np.float32(clipping / 127)).astype("<f2")
        unit = scale.astype(np.float32)
        codes = _nearest(x, unit, -127, 127)
        found = _better(found, [_each(counts * (codes * unit - x) ** 2), scale, codes])
    _, scale, codes = found
    return np.concatenate([scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=-1)


def _each(x: Floats, of: Callable[..., Any] = np.sum) -> Floats:
    """Of a block."""
    found: Floats = of(x, axis=-1, keepdims=True)
    return found


def _nearest(x: Floats, scale: Floats, first: int, last: int) -> Floats:
    return np.clip(np.rint(x / np.maximum(scale, SMALLEST)), first, last)


def _better(found: list[Any], tried: list[Any]) -> list[Any]:
    """Of each block the one whose error, which comes first, is smaller."""
    if not found:
        return tried
    better = tried[0] < found[0]
    for old, new in zip(found, tried, strict=True):
        np.copyto(old, new, where=better)
    return found
