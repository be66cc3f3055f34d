"""The matrix again, on a model with a sliding window shorter than its prompts."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.equivalence.harness import Loud, Written, assert_same, make_core, run, small_spec
from twostroke.kernels import reference
from twostroke.model.decoder import Decoder

WINDOW = 24
SPEC = small_spec(windows=(WINDOW,) * 3, qk_norm="head")


@cache
def decoder() -> Decoder:
    return Decoder(SPEC, Loud(SPEC), torch.float32, torch.device("cpu"), 1024, reference)


PROMPTS = [[(7 * n * n + 3 * n + start) % 512 for n in range(start)] for start in (5, 40, 90, 200)]


@pytest.fixture(scope="module")
def alone() -> list[Written]:
    core = make_core(decoder())
    return [run(core, [prompt], 40)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("size", [7, 32])
def test_chunks_past_the_window_give_the_same_tokens(size: int, alone: list[Written]) -> None:
    core = make_core(decoder(), max_num_batched_tokens=size, max_num_seqs=4)
    assert_same(alone, run(core, PROMPTS, 40))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_cache_smaller_than_the_prompt_gives_the_same_tokens(
    in_flight: int, alone: list[Written]
) -> None:
    """Blocks that the window has passed are given to others and written over."""
    core = make_core(
        decoder(),
        in_flight,
        num_blocks=14,
        block_size=4,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        lookahead=0,
    )
    got = run(core, PROMPTS, 40)
    assert max(step.kv.used for step in core.records.steps) <= 14 * 4 < len(PROMPTS[-1])
    assert_same(alone, got)


def test_a_prefix_hit_behind_the_window_gives_the_same_tokens(alone: list[Written]) -> None:
    core = make_core(decoder(), prefix_caching=True, num_blocks=60, max_num_batched_tokens=64)
    run(core, PROMPTS, 40)
    got = run(core, PROMPTS, 40)
    assert got[-1].num_cached == 192
    assert_same(alone, got)


def test_a_wider_window_makes_the_comparison_fail(alone: list[Written]) -> None:
    """Negative control: one position more in sight."""
    core = make_core(decoder())
    for layer in decoder()._layers:
        layer.window = WINDOW + 1
    try:
        got = [run(core, [prompt], 40)[0] for prompt in PROMPTS]
    finally:
        for layer in decoder()._layers:
            layer.window = WINDOW
    with pytest.raises(AssertionError, match=r"differs at step|moved by"):
        assert_same(alone, got)
