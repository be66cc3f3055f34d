"""The memory plan, by the numbers."""

from __future__ import annotations

import pytest

from tests.specs import changed, make_spec
from twostroke.config import GIB, EngineConfig
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.memory import host_memory_bytes, plan_memory
from twostroke.model.describe.spec import ModelSpec, RopeSpec

SPEC = make_spec(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    windows=(None,) * 30,
    rope=RopeSpec(1e5, 64),
    norm_eps=1e-5,
    max_context=8192,
    tie_embeddings=True,
)
TOKEN = 30 * 2 * 3 * 64 * 4  # bytes of keys and values in fp32


def plan(total: int = 64 * GIB, spec: ModelSpec = SPEC, gpu: bool = False, **settings: object):  # type: ignore[no-untyped-def]
    weight_bytes = 4 * spec.num_parameters()
    return plan_memory(EngineConfig(**settings), spec, weight_bytes, 4, 4, total, gpu)  # type: ignore[arg-type]


def test_on_a_cpu_the_pool_is_the_smaller_of_4_gib_and_a_quarter_of_the_memory() -> None:
    assert plan(64 * GIB).kv_bytes == 4 * GIB // (16 * TOKEN) * 16 * TOKEN
    assert plan(8 * GIB).kv_bytes == 2 * GIB // (16 * TOKEN) * 16 * TOKEN


def test_a_small_model_takes_no_more_than_it_can_fill() -> None:
    small = plan(max_num_seqs=2, max_model_len=100, max_num_batched_tokens=64)
    assert 2 * 100 <= small.group_blocks[0] * 16 <= 2 * 2 * (100 + 16)


def test_settings_decide_the_size_of_the_pool() -> None:
    assert plan(kv_cache_memory_bytes=100 * 16 * TOKEN).group_blocks == (99,)
    assert plan(num_gpu_blocks_override=7).group_blocks == (7,)


def test_a_context_is_shortened_to_the_cache_unless_the_user_insists() -> None:
    shortened = plan(num_gpu_blocks_override=100)
    assert (shortened.max_model_len, shortened.shortened) == (1600, True)
    with pytest.raises(ConfigError, match="max_model_len 4096 does not fit the KV cache"):
        plan(num_gpu_blocks_override=100, max_model_len=4096)


def test_a_window_bounds_what_a_sequence_needs() -> None:
    windowed = changed(SPEC, windows=(64,) * 30)
    assert plan(spec=windowed, num_gpu_blocks_override=100).max_model_len == 8192


def test_dynamic_rope_is_stretched_only_when_asked_for() -> None:
    dynamic = changed(SPEC, rope=RopeSpec(1e5, 64, "dynamic", 4.0, 2048), max_context=8192)
    assert plan(spec=dynamic).max_model_len == 2048
    assert plan(spec=dynamic, max_model_len=4096).max_model_len == 4096


def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ModelError, match=r"the weights need 0\.50 GiB, but 0\.25 GiB are there"):
        plan(GIB // 4)
    with pytest.raises(ConfigError, match=r"need more than the 1\.00 GiB there are"):
        plan(GIB, kv_cache_memory_bytes=GIB)


def test_on_a_gpu_the_pool_takes_what_weights_and_activations_leave() -> None:
    full = plan(80 * GIB, gpu=True)
    half = plan(80 * GIB, gpu=True, gpu_memory_utilization=0.45)
    assert 65 * GIB < full.kv_bytes < 72 * GIB
    assert full.kv_bytes - half.kv_bytes == pytest.approx(36 * GIB, rel=0.01)


# Half the layers have a window of 64 tokens: 4 blocks, or 5 if they begin within one. Pools run out
# together for sequences of 256 tokens, 16 blocks.
MIXED = changed(SPEC, windows=(64, None) * 15)
BLOCK = 16 * TOKEN // 2  # bytes, in either group


def test_two_pools_run_out_together_for_sequences_of_four_windows() -> None:
    mixed = plan(spec=MIXED, kv_cache_memory_bytes=1000 * BLOCK)
    assert mixed.group_blocks == (238, 760)  # and two null blocks; 238 / 5 = 760 / 16
    assert mixed.group_bytes == (239 * BLOCK, 761 * BLOCK)
    assert mixed.kv_bytes == 1000 * BLOCK
    assert mixed.max_model_len == 8192


def test_a_context_shorter_than_four_windows_is_the_reference() -> None:
    short = plan(spec=MIXED, kv_cache_memory_bytes=1000 * BLOCK, max_model_len=96)
    assert short.group_blocks == (454, 544)  # 5 and 6 blocks a sequence


def test_a_pool_with_a_window_holds_one_sequence_with_its_longest_chunk() -> None:
    small = plan(spec=MIXED, kv_cache_memory_bytes=60 * BLOCK, max_num_batched_tokens=512)
    assert small.group_blocks == (37, 21)  # 64 + 512 tokens
    assert (small.max_model_len, small.shortened) == (21 * 16, True)
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes to at least {40 * BLOCK}"):
        plan(spec=MIXED, kv_cache_memory_bytes=39 * BLOCK, max_num_batched_tokens=512)
    plan(spec=MIXED, kv_cache_memory_bytes=40 * BLOCK, max_num_batched_tokens=512)


def test_a_pool_with_a_window_holds_no_more_than_all_sequences_can() -> None:
    settings = {"max_num_seqs": 10, "max_num_batched_tokens": 512}
    mixed = plan(spec=MIXED, kv_cache_memory_bytes=1000 * BLOCK, **settings)
    assert mixed.group_blocks == (10 * 5 + 32, 998 - 82)


def test_an_override_is_of_the_group_that_keeps_all_positions() -> None:
    assert plan(spec=MIXED, num_gpu_blocks_override=1600).group_blocks == (500, 1600)
    with pytest.raises(ConfigError, match=r"raise num_gpu_blocks_override to 256$"):
        plan(spec=MIXED, num_gpu_blocks_override=100, max_model_len=4096)
    sliding = changed(SPEC, windows=(64, 16) * 15)
    assert plan(spec=sliding, num_gpu_blocks_override=500).group_blocks == (500, 200)


def test_pools_that_all_have_windows_share_by_the_same_rule() -> None:
    sliding = changed(SPEC, windows=(16, 64) * 15)
    assert plan(spec=sliding, kv_cache_memory_bytes=702 * BLOCK).group_blocks == (200, 500)
    most = plan(spec=sliding)
    assert most.group_blocks == (256 * 2 + 32, 256 * 5 + 32)
    assert most.max_model_len == 8192


def test_weights_are_counted_by_what_their_formats_take() -> None:
    given = 123_456_789
    made = plan_memory(EngineConfig(), SPEC, given, 4, 2, 64 * GIB, False)
    assert made.weight_bytes == given


def test_the_memory_of_this_machine_is_known() -> None:
    assert GIB // 4 < host_memory_bytes() < 2**50
