"""Two and four ranks write what one writes, over models with every feature that is split.

The ranks add up in another order, which moves a log-probability by less than `MOVES`; the weights
are loud enough that tokens whose two best lie closer than twice that are few.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence.harness import MOVES, Written, assert_same, run, small_spec
from tests.equivalence.rank_threads import RankThreads, run_model
from tests.equivalence.test_experts_matrix import EXPERTS, PLAIN
from tests.equivalence.test_latent_matrix import latent_spec
from tests.loud import Loud
from tests.support import default_model_path
from tests.tiny import CONFIG, tiny_folder
from twostroke.config import EngineConfig
from twostroke.engine.core import EngineCore
from twostroke.errors import ConfigError, EngineError
from twostroke.exec.memory import plan_memory
from twostroke.exec.ranks_executor import agree_on_memory, decode_plan, encode_plan
from twostroke.exec.start import warm_plan
from twostroke.kernels.activations import ClampedSwiglu
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.cost import ring_bytes
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import names_in_hf, spec_from_hf
from twostroke.model.describe.spec import ExpertsSpec, MLPSpec, ModelSpec, RoutingSpec, with_layers
from twostroke.model.describe.tensor_parallel import (
    Ranks,
    check_ranks,
    part_of,
    rank_parameters,
    rank_spec,
)
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.torch import load_layers
from twostroke.model.torch.attention import HeadsAttention
from twostroke.model.torch.decoder import Decoder
from twostroke.model.torch.mlp import DenseMLP
from twostroke.model.weights import WeightSource
from twostroke.model.weights.dummy import DummyWeights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights
from twostroke.model.weights.tensors import _draw_on_device, read_tensor
from twostroke.observe.record import StepRecord
from twostroke.request import EngineRequest, SamplingParams

PROMPTS = [[(7 * n * n + 3 * n + size) % 509 for n in range(size)] for size in (5, 37, 90)]

# Each has its own features; most have 2 key and value heads, fewer than 4 ranks.
SPECS: dict[str, ModelSpec] = {
    "plain": small_spec(vocab_size=511),  # which neither 2 nor 4 divide
    "biases": small_spec(qkv_bias=True, output_bias=True, mlp_bias=True, tie_embeddings=True),
    "full q/k norm": small_spec(qk_norm="full", pre_norm=False, post_norm=True),
    "windows": small_spec(
        windows=(24, None, 24), qk_norm="head", softcap=20.0, logit_softcap=30.0, embed_scale=8.0
    ),
    "parallel": small_spec(
        parallel=True,
        norm="layer",
        norm_bias=True,
        gated=False,
        activation="gelu_tanh",
        logit_scale=0.5,
        num_kv_heads=4,
    ),
    "latents": latent_spec("mixed"),
    "experts, a shared one": with_layers(small_spec(), mlp=EXPERTS),
    "experts without a gate": with_layers(
        small_spec(), mlp=replace(PLAIN, expert=replace(PLAIN.expert, intermediate_size=52))
    ),
    "experts of gpt-oss": with_layers(
        small_spec(sinks=True, windows=(24, None)),
        mlp=ExpertsSpec(5, MLPSpec(40, ClampedSwiglu(), bias=True), RoutingSpec(2, bias=True)),
    ),
    "sinks, learned positions": replace(
        small_spec(sinks=True, head_bias=True), learned_positions=True
    ),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RankThreads:
    return RankThreads(1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module", params=[2, 4])
def threads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankThreads]:
    ranks = RankThreads(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


class Answers:
    """The texts of one rank, computed once per model."""

    def __init__(self, alone: RankThreads) -> None:
        self.of = cache(lambda name: run_model(alone, SPECS[name], Loud(SPECS[name]), greedy))


@pytest.fixture(scope="module")
def answers(alone: RankThreads) -> Answers:
    return Answers(alone)


def greedy(core: EngineCore) -> list[Written]:
    return run(core, PROMPTS, 12)


def sent_bytes(spec: ModelSpec, ranks: int, step: StepRecord) -> float:
    """By each rank in a step without padding, by the formula; the mean over the ranks."""
    tokens, samples = step.prefill.tokens + step.decode.tokens, step.num_written
    last = samples if step.prefill.rows else tokens
    return ring_bytes(spec, ranks, 4, tokens, samples, last) * (ranks - 1) / ranks


@pytest.mark.parametrize("name", SPECS)
def test_ranks_write_what_one_writes(threads: RankThreads, answers: Answers, name: str) -> None:
    """In chunks beside others' decoding: a step has 64 tokens."""
    seen: list[Any] = []

    def use(core: EngineCore) -> list[Written]:
        written = greedy(core)
        seen.extend(core.records.steps)
        return written

    got = run_model(threads, SPECS[name], Loud(SPECS[name]), use)
    assert max(one.num_chunks for one in got) > 1
    assert any(step.prefill.rows and step.decode.rows for step in seen)
    assert all(0 < step.comm_s <= step.device_s for step in seen)
    for step in seen:
        assert step.comm_bytes == sent_bytes(SPECS[name], threads.size, step)
    assert_same(answers.of(name), got)


def test_preempted_and_cached_on_ranks_gives_the_same(
    threads: RankThreads, answers: Answers
) -> None:
    """Rows are retired and taken anew, blocks move, on every rank alike."""

    def use(core: EngineCore) -> list[Written]:
        first = run(core, PROMPTS, 12)
        assert sum(one.num_preempted for one in first) > 0
        return run(core, PROMPTS, 12)

    spec = SPECS["windows"]
    tight = {"num_blocks": 10, "lookahead": 0, "prefix_caching": True}
    got = run_model(threads, spec, Loud(spec), use, **tight)
    assert sum(one.num_cached for one in got) > 0
    assert_same(answers.of("windows"), got)


@pytest.fixture(scope="module", params=[1, 2])
def staged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RankThreads]:
    ranks = RankThreads(request.param, tmp_path_factory.mktemp("staged"), staged=True)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", ["plain", "full q/k norm", "experts, a shared one"])
def test_recorded_steps_are_cut_where_ranks_talk_and_write_the_same(
    staged: RankThreads, answers: Answers, name: str
) -> None:
    """As several ranks on one GPU do; and a group of one, which sums and gathers as well."""
    sizes: list[int] = []

    def use(core: EngineCore) -> list[Written]:
        own: Any = core._executor
        executor = own._own
        replay = executor._graphs._replays[4]
        sizes.append(len(replay.args[0]))
        return greedy(core)

    spec = SPECS[name]
    got = run_model(staged, spec, Loud(spec), use, graphs=True)
    cuts = 1 + 2 * spec.num_layers + 1  # embedding, o and down, head
    cuts += 2 * spec.num_layers if name == "full q/k norm" else 0
    assert sizes == [2 * cuts + 1]
    assert_same(answers.of(name), got)


def drawn(core: EngineCore) -> tuple[list[tuple[int, ...]], list[float]]:
    """Tokens drawn with penalties, biases and bans, and a prompt's log-probabilities."""
    settings = [
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=10, prompt_logprobs=1),
        SamplingParams(temperature=0.9, repetition_penalty=1.3, max_tokens=10),
        SamplingParams(temperature=0.9, logit_bias={3: 5.0}, min_tokens=4, max_tokens=10),
    ]
    tokens: dict[str, tuple[int, ...]] = {}
    judged: list[float] = []
    for n, (prompt, params) in enumerate(zip(PROMPTS, settings, strict=True)):
        core.add(EngineRequest(f"r{n}", tuple(prompt), params, seed=n, stop_ids=frozenset({7})))
    while core.has_work:
        for update in core.step():
            assert not update.error
            name = update.request_id
            tokens[name] = (*tokens.get(name, ()), *update.tokens)
            judged += [one.logprobs[0] for one in update.prompt_logprobs or ()]
    return [tokens[f"r{n}"] for n in range(len(settings))], judged


def test_what_is_drawn_at_random_and_judged_is_the_same(
    threads: RankThreads, alone: RankThreads
) -> None:
    spec = SPECS["plain"]
    expected, judged = run_model(alone, spec, Loud(spec), drawn)
    got, judged_by_ranks = run_model(threads, spec, Loud(spec), drawn)
    assert got == expected
    assert len(judged) == len(PROMPTS[0]) - 1
    torch.testing.assert_close(
        torch.tensor(judged_by_ranks), torch.tensor(judged), atol=MOVES, rtol=0
    )


def test_a_norm_over_a_ranks_own_heads_makes_the_comparison_fail(
    threads: RankThreads, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""

    def own(ranks: Ranks, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return Kernels().rms_norm(x, weight, eps)

    monkeypatch.setattr(load_layers, "_rms_norm", own)
    spec = SPECS["full q/k norm"]
    got = run_model(threads, spec, Loud(spec), greedy)
    with pytest.raises(AssertionError, match=r"differs at step|moved by"):
        assert_same(answers.of("full q/k norm"), got)


def test_a_step_that_fails_ends_the_engine(alone: RankThreads) -> None:
    def use(core: EngineCore) -> None:
        core.add(EngineRequest("r", (1, 2, 3), SamplingParams(), seed=0))
        core._executor._own.forward = None  # type: ignore[attr-defined]
        core.step()

    with pytest.raises(EngineError, match=r"failed on rank 0 \(TypeError.*all of them end"):
        run_model(alone, SPECS["plain"], Loud(SPECS["plain"]), use)


def test_a_plan_is_the_same_after_its_way_to_a_rank() -> None:
    params = SamplingParams(logit_bias={3: 0.5}, stop=["x"], bad_words=["y"], seed=4)
    plan = warm_plan(3, [5, 7], 100, params)
    assert decode_plan(encode_plan(plan)) == plan


# ── memory ──────────────────────────────────────────────────────────────────────────────────


def sources(folder: Path) -> dict[str, tuple[ModelSpec, WeightSource]]:
    """Return a source of each kind: reordered rows, several weights in a tensor, quantised."""
    file = GGUFFile.open(default_model_path())
    of_gguf = spec_from_gguf(file)
    phi = CONFIG | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 301}
    merged = spec_from_hf(phi)
    plain = small_spec(qk_norm="full", qkv_bias=True)
    oss = CONFIG | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2}
    oss |= {"head_dim": 8}
    experts = spec_from_hf(oss)
    tiny_folder(folder, **phi)
    tiny_folder(folder / "experts", **oss)
    return {
        "gguf": (of_gguf, GGUFWeights(file, of_gguf)),
        "safetensors": (merged, SafetensorsWeights(folder, merged, names_in_hf(phi))),
        "dummy": (plain, DummyWeights(plain)),
        "experts": (experts, SafetensorsWeights(folder / "experts", experts, names_in_hf(oss))),
    }


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "dummy"])
def test_a_rank_reads_and_holds_its_part_only(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, source = sources(tmp_path)[kind]
    size = 3 if kind == "gguf" else 2  # the default model has 9 heads
    read: list[int] = []

    def counted(source: Any, name: str, dtype: torch.dtype, part: Any = ()) -> torch.Tensor:
        tensor = read_tensor(source, name, dtype, part)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        read.append(tensor.numel())
        return tensor

    monkeypatch.setattr(load_layers, "read_tensor", counted)
    for rank in range(size):
        read.clear()
        held = Decoder(spec, source, torch.float32, CPU, 64, Kernels(), ranks=Ranks(rank, size))
        expected = rank_parameters(spec, size)
        matrices = [held._embed.weight.numel(), held._head.num_bytes // 4]
        matrices = matrices[:1] if spec.tie_embeddings else matrices
        for layer in held._layers:
            assert isinstance(layer.mlp, DenseMLP)
            assert isinstance(layer.attention, HeadsAttention)
            parts = (layer.attention.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            matrices += [part.num_bytes // 4 for part in parts]
        assert sum(matrices) <= expected
        assert sum(read) <= expected
        assert sum(read) > 0.98 * expected
        assert expected < 1.1 * spec.num_parameters() / size


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "dummy", "experts"])
def test_the_parts_of_a_weight_are_the_whole_of_it(kind: str, tmp_path: Path) -> None:
    spec, source = sources(tmp_path)[kind]
    size = 3 if kind == "gguf" else 2
    own_shapes = rank_spec(spec, size).weight_shapes()
    for name, shape in spec.weight_shapes().items():
        if not name.startswith(("layers.0.", "layers.1.")):
            continue
        own = own_shapes[name]
        whole = read_tensor(source, name, torch.float32)
        parts = [part_of(shape, own, Ranks(rank, size)) for rank in range(size)]
        tensors = [read_tensor(source, name, torch.float32, part) for part in parts]
        if own == shape:
            assert all(torch.equal(tensor, whole) for tensor in tensors)
        else:
            axis = next(n for n in range(len(shape)) if own[n] != shape[n])
            assert torch.equal(torch.cat(tensors, axis), whole)


def test_dummy_weights_drawn_on_a_device_are_cut_alike() -> None:
    spec = small_spec(hidden_size=1024, intermediate_size=2048)  # more than a tile
    source = DummyWeights(spec)
    whole = _draw_on_device(source, "layers.0.down", torch.float32, ())
    for part in ((slice(3, 9),), (slice(0, 1024), slice(1024, 2048)), (slice(7, 8), slice(5, 6))):
        assert torch.equal(
            _draw_on_device(source, "layers.0.down", torch.float32, part), whole[part]
        )


class Offers(Ranks):
    """The first of three ranks, of which the others have less memory."""

    def all_gather_numbers(self, numbers: Any) -> list[list[int]]:
        length, *blocks = numbers
        return [numbers, [length, *(n - 7 for n in blocks)], [length - 9, *(n - 5 for n in blocks)]]


def test_the_smallest_rank_decides_the_cache_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, spec = EngineConfig(num_gpu_blocks_override=100), SPECS["plain"]
    plan = plan_memory(config, spec, 1 << 20, 4, 4, 1 << 32, on_gpu=False)
    with caplog.at_level(logging.WARNING):
        agreed = agree_on_memory(plan, Offers(0, 3))
    assert agreed.group_blocks == (93,)
    assert agreed.max_model_len == plan.max_model_len - 9
    assert "rank 1 has the least memory for the KV cache: 93 blocks" in caplog.text


@pytest.mark.parametrize(
    ("given", "size", "says"),
    [
        ({}, 3, "has 4 attention heads, which 3 ranks cannot share equally; use 2 or 4, or leave"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, "3 key and value heads, which 4 ranks"),
        ({"intermediate_size": 130}, 4, "an intermediate_size of 130, which 4 ranks"),
        ({"intermediate_size": 131}, 2, "cannot share equally; leave it out"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_by_name(
    given: dict[str, int], size: int, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_ranks(small_spec(**given), size)
    assert str(refused.value).startswith(f"tensor_parallel_size is {size}, but the model has ")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("expert", "shared", "says"),
    [(41, None, "an intermediate_size of 41"), (40, 30, "an intermediate_size of 30")],
)
def test_experts_that_do_not_divide_are_refused_by_name(
    expert: int, shared: int | None, says: str
) -> None:
    beside = None if shared is None else MLPSpec(shared)
    experts = ExpertsSpec(4, MLPSpec(expert), RoutingSpec(2), beside)
    with pytest.raises(ConfigError, match=says):
        check_ranks(with_layers(SPECS["plain"], mlp=experts), 4)
