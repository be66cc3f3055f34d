"""`kv_cache_dtype`: what an engine keeps, how much it holds, and what is refused in words."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.test_latent import latent_spec
from tests.kv.test_transfer import fetch
from tests.specs import make_spec
from tests.tiny import tiny_llm
from twostroke import LLM, SamplingParams
from twostroke.config import EngineConfig
from twostroke.engine.build import _check_cache
from twostroke.engine.build_torch import check_fp8_cache
from twostroke.errors import ConfigError
from twostroke.kernels import cpu, kv_dtypes
from twostroke.kv.host_pool import HostPool
from twostroke.kv.pool import KVPool
from twostroke.kv.transports import TransportConfig, host_transfer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(5, 45))
ROOM = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 128}
native = pytest.mark.skipif(not cpu.available(), reason="built without the native kernels")


def blocks_of(llm: LLM) -> int:
    return llm.engine.memory.group_blocks[0]


def write(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@native
def test_int8_on_a_cpu_holds_more_and_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = tiny_llm(folder, device="cpu", **ROOM)
    with caplog.at_level(logging.INFO):
        llm = tiny_llm(folder, device="cpu", kv_cache_dtype="int8", **ROOM)
    group = llm.engine.spec.kv_groups()[0]
    more = 2 * group.head_dim / (group.head_dim + 4)
    assert blocks_of(llm) == pytest.approx(more * blocks_of(plain), rel=0.01)
    assert (
        f"KV cache: int8, {group.block_bytes(16, 1, True) / 16:,.0f} bytes a token" in caplog.text
    )
    assert len(write(llm)) == 8


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2", "int8"])
def test_the_reference_kernels_have_every_type(folder: Path, kind: str) -> None:
    settings: dict[str, Any] = {"device": "cpu", "kernels": "reference", **ROOM}
    llm = tiny_llm(folder, kv_cache_dtype=kind, **settings)
    assert blocks_of(llm) > 2 * blocks_of(tiny_llm(folder, **settings))  # which are in fp32
    assert len(write(llm)) == 8


@native
@pytest.mark.parametrize("kernels", ["auto", "native"])
def test_fp8_on_a_cpu_is_refused_with_what_to_use(folder: Path, kernels: str) -> None:
    with pytest.raises(ConfigError, match=r"'fp8_e4m3' is for GPUs.*use kv_cache_dtype='int8'"):
        tiny_llm(folder, device="cpu", kernels=kernels, kv_cache_dtype="fp8")


def test_fp8_on_an_older_gpu_is_refused_and_int8_offered() -> None:
    check_fp8_cache(torch.float8_e4m3fn, (8, 9))
    check_fp8_cache(torch.int8, (7, 5))
    with pytest.raises(ConfigError, match=r"8\.9 .*this one has 8\.0; kv_cache_dtype='int8'"):
        check_fp8_cache(torch.float8_e5m2, (8, 0))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_latents_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"caches latents \(MLA\).*leave it at 'auto'"):
        _check_cache(EngineConfig(kv_cache_dtype=kind), latent_spec())


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, float32"):
        EngineConfig(kv_cache_dtype="fp4")


def test_scales_lie_in_the_block_of_their_elements() -> None:
    """So that a block copied as bytes is a block; odd sizes included."""
    spec = make_spec(windows=(8, None, None))
    pool = KVPool(spec, [4, 4], 5, torch.int8, torch.device("cpu"))
    slots, x = torch.arange(10, 15), torch.randn(5, *pool.layers[1][0].shape[2:])
    for layer in pool.layers:
        for side in layer:
            kv_dtypes.store(side, slots, x)
    for data in pool.groups:
        assert data[2].any()
        assert not data[[0, 1, 3, 4]].any()
        data[4] = data[2]
    group = spec.kv_groups()[0]
    assert pool.block(0, 2).nbytes == group.block_bytes(5, 1, scaled=True)
    for side in pool.layers[1]:
        found = kv_dtypes.load(side, torch.tensor([2, 4]), torch.float32)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[1], kv_dtypes.as_stored(x, torch.int8))


def test_native_blocks_in_int8_are_sent_as_they_are() -> None:
    spec = make_spec(windows=(8, None, None))
    sender = HostPool(spec, [4, 4], 16, shared=True, int8=True)
    receiver = HostPool(spec, [4, 4], 16, int8=True)
    for data in sender.data:
        data[1:] = np.random.default_rng(1).integers(-127, 128, data[1:].shape)
    sending = host_transfer(sender.blocks(), sender.shared, TransportConfig("checked", "memory"))
    fetching = host_transfer(
        receiver.blocks(), None, TransportConfig(transport="memory", timeout_s=20)
    )
    fetch(fetching, sending.offer([[3, 1], [2, 4]], 32), [[(0, 2), (1, 4)], [(1, 1)]])
    assert np.array_equal(sender.data[0][[3, 1]], receiver.data[0][[2, 4]])
    assert np.array_equal(sender.data[1][4], receiver.data[1][1])
    group = spec.kv_groups()[0]
    assert sender.data[0][0].nbytes == group.block_bytes(16, 1, scaled=True)
