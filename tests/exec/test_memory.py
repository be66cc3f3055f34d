"""The memory plan, by the numbers."""

from __future__ import annotations

import pytest

from tests.specs import changed, make_spec
from twostroke.config import GIB, EngineConfig
from twostroke.errors import ConfigError, ModelError
from twostroke.exec.memory import host_memory_bytes, plan_memory
from twostroke.model.spec import ModelSpec, RopeSpec

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


def test_the_memory_of_this_machine_is_known() -> None:
    assert GIB // 4 < host_memory_bytes() < 2**50
