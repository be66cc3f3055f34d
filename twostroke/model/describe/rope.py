"""Tables of a rope: cos and sin of each position, and the factors of queries.

They are computed in numpy for every backend, so that all of them use exactly the same angles.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from twostroke.model.describe.spec import RopeSpec

Floats = npt.NDArray[np.float32]
POSITIONS_AT_ONCE = 1 << 16


def rope_tables(rope: RopeSpec, max_len: int) -> tuple[Floats, Floats]:
    """Return cos and sin, each [max_len, dim / 2] in fp32."""
    factor = np.float32(rope.attention_factor)
    frequencies = inverse_frequencies(rope, max_len)
    cos = np.empty((max_len, len(frequencies)), np.float32)
    sin = np.empty_like(cos)
    for first in range(0, max_len, POSITIONS_AT_ONCE):  # a part at a time: tables can be large
        part = slice(first, min(first + POSITIONS_AT_ONCE, max_len))
        angles = np.outer(np.arange(part.start, part.stop, dtype=np.float32), frequencies)
        np.multiply(np.cos(angles), factor, out=cos[part])
        np.multiply(np.sin(angles), factor, out=sin[part])
    return cos, sin


def query_scales(rope: RopeSpec, max_len: int) -> Floats | None:
    """Return the factor of the queries at each position, [max_len] in fp32; None: no factor."""
    if not rope.query_beta:
        return None
    spans = (1 + np.arange(max_len) // rope.query_span).astype(np.float32)
    return np.float32(1) + np.float32(rope.query_beta) * np.log(spans)


def inverse_frequencies(rope: RopeSpec, max_len: int) -> Floats:
    """Return the angle per position of each channel pair, computed in fp32.

    Beyond the original context, "dynamic" stretches the base and "longrope" uses another list of
    factors. Cached keys keep the angle they were stored with, so angles must not change while a
    sequence grows: every sequence has the angles of a sequence of `max_len` tokens.
    """
    if rope.kind == "identity":
        return np.zeros(rope.dim // 2, np.float32)
    theta = rope.theta
    if rope.kind == "dynamic" and max_len > rope.original_context:
        stretch = rope.factor * max_len / rope.original_context - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    base: Floats = np.float32(1) / np.power(np.float32(theta), exponents)
    if rope.kind == "linear":
        return base / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind in ("factors", "longrope"):
        is_short = rope.kind == "longrope" and max_len <= rope.original_context
        factors: Floats = np.array(
            rope.short_factors if is_short else rope.freq_factors, np.float32
        )
        return base / factors
    return base


def _llama3(rope: RopeSpec, base: Floats) -> Floats:
    """Divide low frequencies by the factor, keep high frequencies, and blend in between."""
    wavelength = np.float32(2 * math.pi) / base
    rotations = np.float32(rope.original_context) / wavelength
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend: Floats = ((rotations - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    slowed: Floats = (np.float32(1) - blend) * base / np.float32(rope.factor)
    return slowed + blend * base


def _yarn(rope: RopeSpec, base: Floats) -> Floats:
    """Like llama3, but blend by channel, between the channels of two numbers of rotations."""

    def channel(rotations: float) -> float:
        span = math.log(rope.original_context / (rotations * 2 * math.pi))
        return rope.dim * span / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    channels = np.arange(rope.dim // 2, dtype=np.float32)
    ramp = ((channels - np.float32(low)) / np.float32(high - low)).clip(0, 1)
    return base / np.float32(rope.factor) * ramp + base * (np.float32(1) - ramp)
