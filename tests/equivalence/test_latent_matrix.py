"""The matrix again, on models with latent attention: all layers, or a mix with plain heads and a
window (three KV groups). Prefill expands latents and decode does not, so that the same text is
computed in two forms here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.equivalence.harness import Loud, Written, assert_same, make_core, run, small_spec
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble
from twostroke.kernels.reference import Kernels
from twostroke.model.decoder import Decoder
from twostroke.model.spec import LatentSpec, ModelSpec, RopeSpec
from twostroke.sched.step import SchedulerConfig

LATENT = LatentSpec(kv_lora_rank=24, q_lora_rank=20, value_dim=12, norm_eps=1e-6)
PROMPTS = [[(7 * n * n + 3 * n + start) % 512 for n in range(start)] for start in (5, 40, 90, 200)]
MIXES = ("latent", "mixed")


def latent_spec(name: str = "latent", **different: object) -> ModelSpec:
    """`mixed`: a latent layer with a query latent, one of plain heads with a window, and a latent
    layer without."""
    spec = small_spec(windows=(None, 24, None))
    plain = spec.layers[1]
    latent = replace(plain.attention, num_kv_heads=4, head_dim=18, window=None, latent=LATENT)
    latent = replace(latent, rope=RopeSpec(1e4, 8), **{"scale": 18**-0.5} | different)
    direct = replace(latent, latent=replace(LATENT, q_lora_rank=0, value_dim=20))
    parts = [latent] * 3 if name == "latent" else [latent, plain.attention, direct]
    return replace(spec, layers=tuple(replace(plain, attention=part) for part in parts))


@cache
def decoder(name: str, **different: object) -> Decoder:
    spec = latent_spec(name, **different)
    return Decoder(spec, Loud(spec), torch.float32, torch.device("cpu"), 1024, Kernels())


@cache
def alone(name: str) -> list[Written]:
    """The definition: each prompt by itself, prefilled in one piece."""
    core = make_core(decoder(name))
    return [run(core, [prompt], 30)[0] for prompt in PROMPTS]


def test_a_model_may_mix_kinds_of_caches() -> None:
    groups = latent_spec("mixed").kv_groups()
    assert [(group.layers, group.latent_dim, group.window) for group in groups] == [
        ((0, 2), 24, None),
        ((1,), 0, 24),
    ]


@pytest.mark.parametrize("size", [7, 32])
@pytest.mark.parametrize("name", MIXES)
def test_chunked_and_mixed_steps_give_the_same_tokens(name: str, size: int) -> None:
    core = make_core(decoder(name), max_num_batched_tokens=size, max_num_seqs=4)
    got = run(core, PROMPTS, 30)
    steps = core.records.steps
    assert any(step.prefill.tokens and step.decode.tokens for step in steps)
    assert max(one.num_chunks for one in got) > 5
    assert_same(alone(name), got)


@pytest.mark.parametrize("name", MIXES)
def test_a_prefix_hit_gives_the_same_tokens(name: str) -> None:
    core = make_core(decoder(name), prefix_caching=True)
    run(core, PROMPTS, 30)
    got = run(core, PROMPTS, 30)
    assert got[-1].num_cached == 192
    assert_same(alone(name), got)


@pytest.mark.parametrize("name", MIXES)
def test_preempted_and_resumed_gives_the_same_tokens(name: str) -> None:
    settings = {"num_blocks": 26, "max_num_batched_tokens": 64, "lookahead": 0}
    core = make_core(decoder(name), prefix_caching=True, **settings)
    got = run(core, PROMPTS, 30)
    assert sum(one.num_preempted for one in got) > 0
    assert_same(alone(name), got)


def test_batched_with_others_gives_the_same_tokens() -> None:
    others = [[n + 5, 300 + n, 17 * n + 40] * (1 + n % 5) for n in range(12)]
    core = make_core(decoder("mixed"), in_flight=2, max_num_seqs=16)
    got = run(core, [*PROMPTS, *others], 30)
    assert max(step.decode.rows for step in core.records.steps) == 16
    assert_same(alone("mixed"), got[: len(PROMPTS)])


def test_steps_in_recorded_pieces_give_the_same_tokens() -> None:
    limits = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_model_len=1024,
        block_size=16,
        groups=group_limits(latent_spec("mixed"), [64, 64]),
        prefix_caching=False,
    )
    core = assemble(decoder("mixed"), limits, torch.float32, 2, graph_sizes=(1, 2, 4))
    assert_same(alone("mixed"), run(core, PROMPTS, 30))


def test_another_scale_makes_the_comparison_fail() -> None:
    """Negative control."""
    core = make_core(decoder("latent", scale=0.99 * 18**-0.5))
    got = [run(core, [prompt], 30)[0] for prompt in PROMPTS]
    with pytest.raises(AssertionError, match=r"differs at step|moved by"):
        assert_same(alone("latent"), got)
