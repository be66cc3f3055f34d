"""The matrix again, on models whose layers see a window shorter than their prompts: all layers
alike, or a mix of windows and full attention (two and three KV groups, two ropes, soft-caps)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.loud import Loud
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import ModelSpec, RopeSpec
from twostroke.model.torch.decoder import Decoder

WINDOW = 24
MIXES = {
    "window": (WINDOW,) * 3,
    "two groups": (WINDOW, None, WINDOW),
    "three groups": (WINDOW, 56, None),
}


def mixed_spec(name: str, wider: int = 0) -> ModelSpec:
    """Gemma's kind of model: norms before and after, q/k norm, soft-caps, another rope where all
    positions are visible. `wider`: what each window has more."""
    windows = [None if window is None else window + wider for window in MIXES[name]]
    spec = small_spec(windows=windows, qk_norm="head")
    if name == "window":
        return spec
    spec = small_spec(
        windows=windows,
        qk_norm="head",
        post_norm=True,
        activation="gelu_tanh",
        softcap=20.0,
        logit_softcap=30.0,
        embed_scale=8.0,
    )
    layers = [
        layer
        if layer.attention.window is not None
        else replace(layer, attention=replace(layer.attention, rope=RopeSpec(1e6, 16)))
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


@cache
def decoder(name: str, wider: int = 0) -> Decoder:
    spec, cpu = mixed_spec(name, wider), torch.device("cpu")
    return Decoder(spec, Loud(spec), torch.float32, cpu, 1024, Kernels())


PROMPTS = [[(7 * n * n + 3 * n + start) % 512 for n in range(start)] for start in (5, 40, 90, 200)]


@cache
def alone(name: str) -> list[Written]:
    core = make_core(decoder(name))
    return [run(core, [prompt], 40)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("size", [7, 32])
@pytest.mark.parametrize("name", MIXES)
def test_chunks_past_the_window_give_the_same_tokens(name: str, size: int) -> None:
    core = make_core(decoder(name), max_num_batched_tokens=size, max_num_seqs=4)
    assert_same(alone(name), run(core, PROMPTS, 40))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_cache_smaller_than_the_prompt_gives_the_same_tokens(in_flight: int) -> None:
    """Blocks that the window has passed are given to others and written over."""
    core = make_core(
        decoder("window"),
        in_flight,
        num_blocks=14,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        lookahead=0,
    )
    got = run(core, PROMPTS, 40)
    assert max(step.kv.used for step in core.records.steps) <= 14 * 4 < len(PROMPTS[-1])
    assert_same(alone("window"), got)


@pytest.mark.parametrize("name", MIXES)
def test_a_prefix_hit_behind_the_window_gives_the_same_tokens(name: str) -> None:
    core = make_core(decoder(name), prefix_caching=True, num_blocks=120, max_num_batched_tokens=64)
    run(core, PROMPTS, 40)
    got = run(core, PROMPTS, 40)
    assert got[-1].num_cached == 192
    assert_same(alone(name), got)


@pytest.mark.parametrize("name", MIXES)
def test_a_wider_window_makes_the_comparison_fail(name: str) -> None:
    """Negative control: one position more in sight."""
    core = make_core(decoder(name, 1))
    got = [run(core, [prompt], 40)[0] for prompt in PROMPTS]
    with pytest.raises(AssertionError, match=r"differs at step|moved by"):
        assert_same(alone(name), got)
