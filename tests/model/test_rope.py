"""Angles: one definition for every backend, as near to the exact ones as single precision gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.model.rope import inverse_frequencies, rope_tables
from twostroke.model.spec import RopeSpec

MAX_LEN = 4096
ROPES = {
    "none": RopeSpec(1e5, 64),
    "linear": RopeSpec(1e4, 96, kind="linear", factor=2.0),
    "dynamic": RopeSpec(1e4, 96, kind="dynamic", factor=2.0, original_context=2048),
    "llama3": RopeSpec(
        5e5,
        128,
        kind="llama3",
        factor=32.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "yarn": RopeSpec(
        1e6, 128, kind="yarn", factor=4.0, original_context=32768, attention_factor=1.1386
    ),
    "factors": RopeSpec(1e4, 96, kind="factors", freq_factors=tuple(1 + n / 9 for n in range(48))),
}


@pytest.mark.parametrize("name", ROPES)
def test_tables_are_what_torch_makes_of_the_same_frequencies(name: str) -> None:
    rope = ROPES[name]
    frequencies = torch.from_numpy(inverse_frequencies(rope, MAX_LEN))
    angles = torch.outer(torch.arange(MAX_LEN, dtype=torch.float32), frequencies)
    expected = [angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor]
    for one, other in zip(rope_tables(rope, MAX_LEN), expected, strict=True):
        assert one.dtype == np.float32
        assert one.shape == (MAX_LEN, rope.dim // 2)
        np.testing.assert_allclose(one, other.numpy(), atol=4e-7, rtol=0)


def test_longrope_has_the_factors_of_the_greatest_length() -> None:
    rope = RopeSpec(1e4, 4, "longrope", 4.0, 32, freq_factors=(2.0, 8.0), short_factors=(1.0, 2.0))
    plain = inverse_frequencies(RopeSpec(1e4, 4), 32)
    assert (plain / inverse_frequencies(rope, 32)).tolist() == [1.0, 2.0]
    assert (plain / inverse_frequencies(rope, 33)).tolist() == [2.0, 8.0]


@pytest.mark.parametrize("name", ["none", "linear"])
def test_frequencies_are_the_powers_of_theta(name: str) -> None:
    rope = ROPES[name]
    exact = rope.theta ** -(np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    exact /= rope.factor if name == "linear" else 1.0
    found = inverse_frequencies(rope, MAX_LEN)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_scaling_slows_long_wavelengths_and_leaves_short_ones() -> None:
    for name in ("llama3", "yarn"):
        rope = ROPES[name]
        plain = inverse_frequencies(RopeSpec(rope.theta, rope.dim), MAX_LEN)
        ratio = plain / inverse_frequencies(rope, MAX_LEN)
        assert ratio[0] == 1.0
        assert ratio[-1] == pytest.approx(rope.factor, rel=1e-6)
        assert (np.diff(ratio) >= -1e-5).all()
