"""Rotary position embedding: the tables of cos and sin for a spec, scaling included."""

from __future__ import annotations

import math

import torch

from twostroke.model.spec import RopeSpec


def rope_tables(
    rope: RopeSpec, max_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [max_len, dim / 2] in fp32."""
    frequencies = inverse_frequencies(rope, max_len).to(device)
    angles = torch.outer(torch.arange(max_len, device=device, dtype=torch.float32), frequencies)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, max_len: int) -> torch.Tensor:
    """One angle per position and channel pair.

    "dynamic" stretches the base once the context outgrows the original one. Cached keys keep the
    angle they were stored with, so the base may not change while a sequence grows: it is the one
    that a sequence of `max_len` tokens would have.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and max_len > rope.original_context:
        stretch = rope.factor * max_len / rope.original_context - (rope.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    base = 1.0 / theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "factors":
        return base / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return base


def _llama3(rope: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are slowed by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    rotations = rope.original_context / wavelength
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(rope: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """As llama3, but the blend runs over channels, between two numbers of rotations."""

    def channel(rotations: float) -> float:
        span = math.log(rope.original_context / (rotations * 2 * math.pi))
        return rope.dim * span / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)
