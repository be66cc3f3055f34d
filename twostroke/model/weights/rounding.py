"""Rounds weights to blocks of 4 or 8 bits (Q4_1, Q8_0), with a weight for the error of each column.

`quantization` on a CPU uses this rounding if a calibration text has given the importance of each
column: the mean square of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from twostroke.model.gguf.block_types import BlockType
from twostroke.model.weights import Bytes, Floats

BLOCK = 32
# Weights rounded in one numpy call: few enough for a core's cache.
ELEMENTS_AT_ONCE = 1 << 16
# The search for a 4-bit scale tries these multiples of the range of a block's weights. The codes
# divide the range into 15 steps.
SPANS = (1.06, 1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
# The search for an 8-bit scale clips the weights at these shares of a block's largest weight.
CLIPPINGS = (1.0, 0.98, 0.95, 0.92, 0.88)
MIN_DIVISOR = np.float32(1e-30)  # avoids a division by zero


def rounded_blocks(type: BlockType, x: Floats, importance: Floats) -> Bytes:
    """Round a matrix [rows, columns] to blocks, [rows, bytes].

    `importance`, [columns]: factors of the squared errors. Raise `ValueError` on NaN and infinity.
    """
    if not np.isfinite(x).all():
        raise ValueError("NaN or infinity")
    weights = importance.reshape(-1, BLOCK)
    rows = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    round_part = _round_q4_1 if type == BlockType.Q4_1 else _round_q8_0
    parts = (x[at : at + rows].reshape(-1, *weights.shape) for at in range(0, len(x), rows))
    return np.concatenate([round_part(part, weights) for part in parts]).reshape(len(x), -1)


def _round_q4_1(x: Floats, weights: Floats) -> Bytes:
    """Round to Q4_1 with the span that has the smallest error in each block.

    For each span: choose codes with the scale of the span, fit scale and minimum to these codes by
    least squares, then choose the codes again with the fitted scale and minimum.
    """
    lowest = np.minimum(_per_block(x, np.min), 0)
    highest = np.maximum(_per_block(x, np.max), 0)
    total = _per_block(weights)
    best: list[Any] = []
    mean_x = _per_block(x * weights) / total
    for span in SPANS:
        scale = (highest - lowest) * np.float32(span / 15)
        codes = _nearest(x - (highest + lowest) / 2 + np.float32(7.5) * scale, scale, 0, 15)
        mean_code = _per_block(codes * weights) / total
        deviations = (codes - mean_code) * weights
        slope = _per_block(deviations * x) / np.maximum(_per_block(deviations * codes), MIN_DIVISOR)
        stored_scale = np.where(slope > 0, slope, scale).astype("<f2")
        scale = stored_scale.astype(np.float32)
        stored_minimum = (mean_x - scale * mean_code).astype("<f2")
        minimum = stored_minimum.astype(np.float32)
        codes = _nearest(x - minimum, scale, 0, 15)
        error = _per_block(weights * (codes * scale + minimum - x) ** 2)
        best = _merge_better(best, [error, stored_scale, stored_minimum, codes])
    _, scale, minimum, codes = best
    low, high = np.split(codes.astype(np.uint8), 2, axis=-1)
    return np.concatenate([scale.view(np.uint8), minimum.view(np.uint8), low | high << 4], axis=-1)


def _round_q8_0(x: Floats, weights: Floats) -> Bytes:
    """Round to Q8_0 with the clipping that has the smallest error in each block."""
    largest = _per_block(np.abs(x), np.max)
    best: list[Any] = []
    for clipping in CLIPPINGS:
        stored_scale = (largest * np.float32(clipping / 127)).astype("<f2")
        scale = stored_scale.astype(np.float32)
        codes = _nearest(x, scale, -127, 127)
        error = _per_block(weights * (codes * scale - x) ** 2)
        best = _merge_better(best, [error, stored_scale, codes])
    _, scale, codes = best
    return np.concatenate([scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=-1)


def _per_block(x: Floats, reduce: Callable[..., Any] = np.sum) -> Floats:
    result: Floats = reduce(x, axis=-1, keepdims=True)
    return result


def _nearest(x: Floats, scale: Floats, first: int, last: int) -> Floats:
    return np.clip(np.rint(x / np.maximum(scale, MIN_DIVISOR)), first, last)


def _merge_better(best: list[Any], tried: list[Any]) -> list[Any]:
    """Copy the blocks of `tried` that have a smaller error into `best`, and return `best`. In both
    lists the first array is the error of each block."""
    if not best:
        return tried
    is_better = tried[0] < best[0]
    for old, new in zip(best, tried, strict=True):
        np.copyto(old, new, where=is_better)
    return best
