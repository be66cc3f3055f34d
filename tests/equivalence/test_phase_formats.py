"""A precision a phase: steps with prefill compute as an engine in prefill's format does, steps that
only decode as one in decode's; and what that costs in bytes and in log-probabilities is told."""

from __future__ import annotations

import logging
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.harness import small_spec
from tests.equivalence.test_latent_matrix import latent_spec
from tests.loud import Loud
from tests.model.weights.quantised_folders import refusal
from tests.model.weights.test_w8a8_checkpoints import folder_of
from tests.tiny import tiny_folder, tiny_llm
from twostroke.config import EngineConfig
from twostroke.engine import build_torch
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError
from twostroke.kernels.reference import Kernels
from twostroke.measure.quality.quality import phase_difference
from twostroke.model.formats.weight_formats import weight_formats
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.load_layers import LoadOptions
from twostroke.request import EngineRequest, SamplingParams
from twostroke.route.pool_settings import PoolSettings
from twostroke.sched.step import SchedulerConfig

REFERENCE = {"device": "cpu", "kernels": "reference"}
SPECS = {"heads": small_spec(qkv_bias=True), "latents": latent_spec("mixed")}
LONG, SHORT = [[(7 * n * n + size) % 512 for n in range(size)] for size in (40, 21)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


# ── which format a step reads ───────────────────────────────────────────────────────────────


@cache
def decoder(spec: str, prefill: str | None, decode: str | None) -> Decoder:
    weights = Loud(SPECS[spec])
    formats, other = (weight_formats(SPECS[spec], weights, one) for one in (prefill, decode))
    how = (torch.float32, torch.device("cpu"), 1024, Kernels())
    return Decoder(SPECS[spec], weights, *how, LoadOptions(formats, other))


def make_core(of: Decoder, graph_sizes: tuple[int, ...]) -> EngineCore:
    limits = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        block_size=16,
        groups=group_limits(of.spec, [40] * len(of.spec.kv_groups())),
        prefix_caching=False,
    )
    return assemble(of, limits, torch.float32, graph_sizes=graph_sizes)


def logits_of_a_step(core: EngineCore, rows: int) -> torch.Tensor:
    core.step()
    return core._executor.program.logits[:rows].clone()  # type: ignore[attr-defined]


def copy_state(source: EngineCore, to: EngineCore) -> None:
    """The cache and the tokens, so that the next step reads the same."""
    one, other = (core._executor.program for core in (source, to))  # type: ignore[attr-defined]
    other.rows.cells.copy_(one.rows.cells)
    for ours, theirs in zip(one.pool.layers, other.pool.layers, strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            its.copy_(mine)


@pytest.mark.parametrize(
    ("spec", "prefill", "decode", "graph_sizes"),
    [
        ("heads", "fp8", "int4", ()),
        ("heads", "fp8", "int4", (1,)),
        ("heads", "fp8", "int4", (2, 4)),
        ("heads", "int4", None, (1,)),
        ("latents", None, "fp8", (2,)),
    ],
)
def test_a_step_is_computed_in_its_phases_format(
    spec: str, prefill: str | None, decode: str | None, graph_sizes: tuple[int, ...]
) -> None:
    """Two decode rows are more than a ladder up to one has graphs for."""
    phased, only_prefill, only_decode = cores = [
        make_core(decoder(spec, prefill, decode), graph_sizes),
        make_core(decoder(spec, prefill, prefill), graph_sizes),
        make_core(decoder(spec, decode, decode), ()),  # nothing padded, whose rows would count
    ]
    for core in cores:
        core.add(EngineRequest("a", tuple(LONG), GREEDY, 0))
    with_chunks = [logits_of_a_step(core, 1) for core in cores]
    for core in cores:
        core.add(EngineRequest("b", tuple(SHORT), GREEDY, 0))
    mixed = [logits_of_a_step(core, 2) for core in cores[:2]]
    only_decode.step()
    assert phased.records.steps[-1].prefill.tokens == len(SHORT)
    assert phased.records.steps[-1].decode.tokens == 1
    # Whatever decodes beside a chunk is computed as the chunk is.
    assert torch.equal(with_chunks[0], with_chunks[1])
    assert not torch.equal(with_chunks[0], with_chunks[2])
    assert torch.equal(*mixed)
    for _ in range(2):
        copy_state(phased, only_decode)
        copy_state(phased, only_prefill)
        got, other, expected = (logits_of_a_step(core, 2) for core in (phased, *cores[1:]))
        assert phased.records.steps[-1].prefill.tokens == 0
        assert torch.equal(got, expected)
        assert not torch.allclose(got, other, atol=1e-2)


class SeenNorms(Kernels):
    """The formats that the norms after attention and MLP quantise to, in order."""

    def __init__(self) -> None:
        self.types: list[torch.dtype | None] = []

    def add_rms_norm(self, *args: Any, to: torch.dtype | None = None, **more: Any) -> Any:
        self.types.append(to)
        return super().add_rms_norm(*args, to=to, **more)


@pytest.mark.parametrize("spec", SPECS)
def test_norms_quantise_for_products_of_many_rows_alone(spec: str) -> None:
    of, seen = copy(decoder(spec, "fp8", "fp8")), SeenNorms()
    of.kernels = seen
    core = make_core(of, ())
    core.add(EngineRequest("a", tuple(LONG), GREEDY, 0))
    seen.types.clear()
    core.step()
    # The last layer goes on with the one token that is sampled. Latents are made of what is whole.
    expected: list[torch.dtype | None] = []
    for following in of.spec.layers[1:]:
        latent = following.attention.latent is not None
        expected += [torch.float8_e4m3fn, None if latent else torch.float8_e4m3fn]
    assert seen.types == [*expected, None, None]
    seen.types.clear()
    core.step()
    assert seen.types == [None] * 2 * len(of.spec.layers)


def test_layers_share_what_has_one_format() -> None:
    one, phased = decoder("heads", "fp8", "fp8"), decoder("heads", "fp8", "int4")
    assert one._layers == one._decode_layers
    assert not one.phases_differ
    assert phased.phases_differ
    first, own = phased._layers[0], phased._decode_layers[0]
    assert own.attn_norm is first.attn_norm
    assert own.mlp.down.num_bytes < first.mlp.down.num_bytes  # type: ignore[attr-defined]
    assert own.attention.qkv.bias is first.attention.qkv.bias  # type: ignore[attr-defined]


# ── what it costs ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("phases") / "tiny")


def test_bytes_of_both_are_held_and_each_step_reads_one(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    both = {"prefill_quantization": "fp8", "decode_quantization": "int4"}
    llm = tiny_llm(folder, **REFERENCE, **both)
    dense, fp8, int4 = (
        tiny_llm(folder, **REFERENCE, quantization=q) for q in (None, "fp8", "int4")
    )
    matrices = 4 * 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64)
    shared = dense.engine.memory.weight_bytes - matrices
    held, *alone = (one.engine.memory.weight_bytes for one in (llm, fp8, int4))
    assert held == sum(alone) - shared
    assert llm.engine.info().weights == "prefill fp8 + decode int4, from float32"
    told = next(line for line in caplog.messages if line.startswith("weights: prefill fp8 "))
    assert " GiB + decode int4 " in told
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.generate([list(range(5, 25))], params)
    cost, costs = llm.engine.core.cost, [one.engine.core.cost for one in (fp8, int4)]
    assert [cost.for_step(n).layer_weight_bytes for n in (1, 0)] == [
        one.layer_weight_bytes for one in costs
    ]
    first, second, *_ = llm.engine.core.records.steps
    kv = cost.kv_bytes_per_token
    head = cost.head_weight_bytes
    assert first.prefill.num_bytes == costs[0].layer_weight_bytes + head + 40 * kv
    assert second.decode.num_bytes == costs[1].layer_weight_bytes + head + 22 * kv


@pytest.mark.parametrize("prefill", ["fp8", "int4"])
def test_the_difference_in_log_probabilities_is_told(folder: Path, prefill: str) -> None:
    """A token as it was written, and the same token read as a prompt, of a model whose random
    weights lose more by rounding than trained ones."""
    prompts = [[n % 300 for n in prompt] for prompt in (LONG[:20], SHORT)]
    means = {}
    for decode in ("fp8", "int4"):
        both = {"prefill_quantization": prefill, "decode_quantization": decode}
        found = phase_difference(tiny_llm(folder, **REFERENCE, **both), prompts, 12)
        assert found["tokens"] == 2 * 11
        assert found["mean"] <= found["max"] < 5.0
        means[decode] = found["mean"]
    if prefill == "int4":
        assert means["int4"] < 1e-5
        assert 1e-2 < means["fp8"] < 1.0
    else:  # prompts round their activations, too
        assert 1e-2 < means["fp8"] < means["int4"] < 1.0


def test_two_formats_that_do_not_fit_are_refused_with_their_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_torch, "host_memory_bytes", lambda: 100_000)
    monkeypatch.setattr(build_torch, "gib", str)
    said = refusal(folder, prefill_quantization="none", decode_quantization="int4")
    assert "weights: prefill none 73728 + decode int4 10240 + shared by both" in said
    assert "but the memory has 100000; give one quantization for both phases" in said


# ── settings ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "settled"),
    [
        ({"prefill_quantization": "fp8"}, (None, "fp8", "none")),
        ({"decode_quantization": "int4", "quantization": "fp8"}, (None, "fp8", "int4")),
        ({"decode_quantization": "none", "quantization": "fp8"}, (None, "fp8", "none")),
        ({"decode_quantization": "fp8", "quantization": "fp8"}, ("fp8", None, None)),
        ({"decode_quantization": "int8", "prefill_quantization": "int8"}, ("int8", None, None)),
        ({"decode_quantization": "none", "prefill_quantization": "none"}, (None, None, None)),
    ],
    ids=str,
)
def test_what_a_phase_does_not_say_is_said_for_both(
    given: dict[str, Any], settled: tuple[str | None, ...]
) -> None:
    config = EngineConfig(**given)
    found = (config.quantization, config.prefill_quantization, config.decode_quantization)
    assert found == settled
    assert config.phases_differ == (settled[1] is not None)
    assert config.for_phase("prefill") == EngineConfig(
        quantization=given.get("prefill_quantization") or given.get("quantization")
        if settled != (None, None, None)
        else None
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prefill_quantization": "fp4"}, "prefill_quantization must be one of none, int8, int4"),
        ({"decode_quantization": 4}, "decode_quantization must be one of none, int8, int4, fp8"),
        (
            {"quantization": "fp8", "prefill_quantization": "fp8", "decode_quantization": "int4"},
            "quantization is 'fp8', but prefill_quantization and decode_quantization set it",
        ),
    ],
    ids=str,
)
def test_settings_that_are_wrong_or_without_effect_are_refused(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**given)


def test_a_pool_keeps_its_own_format_alone() -> None:
    config = EngineConfig(prefill_quantization="fp8", decode_quantization="int4")
    pools = PoolSettings(prefill_engines=1, decode_engines=2).engines(config)
    assert [one.config.quantization for one in pools] == ["fp8", "int4", "int4"]
    assert not any(one.config.phases_differ for one in pools)
    both = PoolSettings(data_parallel_size=2).engines(config)
    assert all(one.config.phases_differ for one in both)


# ── what is refused ─────────────────────────────────────────────────────────────────────────

BOTH = {"prefill_quantization": "fp8", "decode_quantization": "int4"}


def test_where_weights_are_kept_once_it_is_refused(folder: Path) -> None:
    for kernels in ("auto", "native"):
        assert "the native kernels of a CPU keep weights once" in refusal(
            folder, kernels=kernels, prefill_quantization="int8", decode_quantization="int4"
        )


def test_models_that_cannot_have_it_are_refused_by_name(tmp_path: Path) -> None:
    quantised, _ = folder_of(tmp_path, "compressed, a channel")
    said = refusal(quantised, **BOTH)
    assert "prefill_quantization is 'fp8' and decode_quantization 'int4'" in said
    assert "quantised already (fp8); leave both out, or use the unquantised model" in said
    more = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    said = refusal(tiny_folder(tmp_path / "experts", **more), **BOTH)
    assert "which do not support experts yet; leave both out" in said
