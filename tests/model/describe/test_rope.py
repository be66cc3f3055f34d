"""Angles: one definition for every backend, as near to the exact ones as single precision gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import (
    apply_rotary_pos_emb,
    get_llama_4_attn_scale,
)

from twostroke.kernels.records import KVView, Rope
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.rope import inverse_frequencies, query_scales, rope_tables
from twostroke.model.describe.spec import AttentionSpec, LatentSpec, RopeSpec

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


# Scales of queries

SCALED = RopeSpec(1e4, 8, query_beta=0.1, query_span=16)


def test_scales_of_queries_are_those_of_transformers() -> None:
    """From 1 up to ten times the span, and far beyond, as Ministral 3 has it."""
    found = query_scales(SCALED, 160)
    assert found is not None
    assert found.dtype == np.float32
    assert (found[:16] == 1).all()
    assert (np.flatnonzero(np.diff(found)) == np.arange(15, 159, 16)).all()
    assert found[16] == pytest.approx(1 + 0.1 * np.log(2))
    for rope in (SCALED, RopeSpec(1e6, 128, query_beta=0.1, query_span=16384)):
        found, positions = query_scales(rope, 1 << 18), torch.arange(1 << 18)[None]
        theirs = get_llama_4_attn_scale(positions, rope.query_beta, rope.query_span)
        assert found is not None
        np.testing.assert_allclose(found, theirs.flatten().numpy(), atol=0, rtol=2e-7)


def test_without_scales_there_is_no_table() -> None:
    assert query_scales(RopeSpec(1e4, 8), 160) is None


def test_no_layer_with_latents_has_scales_of_queries() -> None:
    latent = LatentSpec(kv_lora_rank=16, q_lora_rank=0, value_dim=8)
    AttentionSpec(4, 4, 16, RopeSpec(1e4, 8), 0.25, latent=latent)
    with pytest.raises(AssertionError):
        AttentionSpec(4, 4, 16, SCALED, 0.25, latent=latent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_scaled_after_rope_and_keys_are_not(dtype: torch.dtype) -> None:
    """As transformers does it, on both sides of the span."""
    torch.manual_seed(0)
    heads, kv, dim, positions = 4, 2, 8, torch.tensor([0, 15, 16, 31, 32, 159])
    cos, sin = (torch.from_numpy(table) for table in rope_tables(SCALED, 160))
    scales = query_scales(SCALED, 160)
    assert scales is not None
    qkv = torch.randn(6, (heads + 2 * kv) * dim).to(dtype)
    by_head = qkv.view(1, 6, -1, dim).transpose(1, 2)
    angles = [torch.cat([table[positions]] * 2, dim=-1)[None].to(dtype) for table in (cos, sin)]
    q, k = apply_rotary_pos_emb(by_head[:, :heads], by_head[:, heads : heads + kv], *angles)
    q = q * get_llama_4_attn_scale(positions[None], 0.1, 16).to(dtype)
    cache = torch.zeros(2, 2, 4, kv, dim, dtype=dtype)
    rope = Rope(cos, sin, query_scales=torch.from_numpy(scales))
    view = KVView(*cache.unbind(1), tables=torch.empty(0), slots=torch.arange(6))
    made = Kernels().rope_store(qkv, rope, positions, view)
    bound = 1e-6 if dtype == torch.float32 else 0.05  # transformers rounds each product
    expected = torch.cat([q, k], dim=1)[0].transpose(0, 1)
    torch.testing.assert_close(made[:, : heads + kv], expected, atol=bound, rtol=0)
    torch.testing.assert_close(cache[:, 0].flatten(0, 1)[:6], made[:, heads : heads + kv])
