"""Mixtures of experts: routing rules, what configs and files say of them, and what they cost."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from tests.model.describe.test_family_mappings import edits
from tests.model.gguf.gguf_files import SPEC, Edit, setting, write_model
from tests.specs import changed, make_spec
from twostroke import LLM
from twostroke.errors import ModelError
from twostroke.kernels.activations import ClampedSwiglu
from twostroke.kernels.records import ExpertWeights, RoutingRule
from twostroke.kernels.reference import Kernels
from twostroke.model.describe import hf_experts
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf, spec_from_hf
from twostroke.model.describe.spec import ExpertsSpec, MLPSpec, ModelSpec, RoutingSpec, with_layers
from twostroke.model.fields import Fields
from twostroke.model.weights import check_weights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights
from twostroke.model.weights.tensors import read_tensor

HIDDEN, TOKENS = 32, 200
DEEPSEEK = {"hidden_size": HIDDEN, "n_routed_experts": 16, "num_experts_per_tok": 4}
DEEPSEEK |= {"num_hidden_layers": 3, "intermediate_size": 64, "moe_intermediate_size": 24}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
V2 = DEEPSEEK | GROUPS | {"first_k_dense_replace": 1, "n_shared_experts": 2}
V3 = V2 | {"norm_topk_prob": True}


def deepseek_routing(config: dict[str, Any], v3: bool) -> RoutingSpec:
    dense, first, _ = hf_experts.deepseek(Fields("config.json", config), v3)
    assert dense == MLPSpec(64)
    assert isinstance(first, ExpertsSpec)
    assert first.shared == MLPSpec(48)
    return first.routing


ROUTERS: dict[str, tuple[Any, PreTrainedConfig, RoutingSpec]] = {
    "deepseek_v3": (DeepseekV3TopkRouter, DeepseekV3Config(**V3), deepseek_routing(V3, True)),
    "deepseek_v3_not_normalised": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(**V3 | {"norm_topk_prob": False}),
        deepseek_routing(V3 | {"norm_topk_prob": False}, True),
    ),
    "deepseek_v2_groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**V2, topk_method="group_limited_greedy"),
        deepseek_routing(V2 | {"topk_method": "group_limited_greedy"}, False),
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**V2, topk_method="greedy"),
        deepseek_routing(V2 | {"topk_method": "greedy"}, False),
    ),
    "mixtral": (
        MixtralTopKRouter,
        MixtralConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2),
        RoutingSpec(2),
    ),
    "granitemoe": (
        GraniteMoeTopKRouter,
        GraniteMoeConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=2),
        RoutingSpec(2),
    ),
    "qwen2_moe": (
        Qwen2MoeTopKRouter,
        Qwen2MoeConfig(hidden_size=HIDDEN, num_experts=8, num_experts_per_tok=3),
        RoutingSpec(3, normalised=False),
    ),
    "gpt_oss": (
        GptOssTopKRouter,
        GptOssConfig(hidden_size=HIDDEN, num_local_experts=8, num_experts_per_tok=3),
        RoutingSpec(3, bias=True),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_every_rule_chooses_and_weighs_as_transformers_does(name: str) -> None:
    kind, config, rule = ROUTERS[name]
    theirs, random = kind(config), torch.Generator().manual_seed(1)
    theirs.weight.normal_(0, 0.3, generator=random)
    bias, correction = getattr(theirs, "bias", None), None
    if bias is not None:
        bias.normal_(0, 0.5, generator=random)
    if rule.correction_bias:
        correction = theirs.e_score_correction_bias.normal_(0, 0.2, generator=random)
    x = torch.randn(TOKENS, HIDDEN, generator=random)
    settings = asdict(rule)
    del settings["bias"], settings["correction_bias"]
    chosen, weights = Kernels().route(x, theirs.weight, bias, correction, RoutingRule(**settings))
    _, expected, places = theirs(x)
    shape = (TOKENS, len(theirs.weight))
    ours = torch.zeros(shape).scatter(1, chosen, weights)
    assert torch.equal(ours > 0, torch.zeros(shape).scatter(1, places, expected) > 0)
    torch.testing.assert_close(ours, torch.zeros(shape).scatter(1, places, expected))


def test_experts_are_a_sum_over_the_chosen_ones() -> None:
    random = torch.Generator().manual_seed(2)
    x, up = torch.randn(7, 8, generator=random), torch.randn(5, 12, 8, generator=random)
    down, biases = torch.randn(5, 8, 12, generator=random), torch.randn(5, 12, generator=random)
    chosen = torch.tensor([[4, 1], [1, 0], [4, 0], [1, 4], [0, 1], [0, 4], [4, 1]])
    weights = torch.rand(7, 2, generator=random)
    stacked = ExpertWeights(up, biases, down, None, "silu", gated=False)
    got = Kernels().experts(x, chosen, weights, stacked)
    for t in range(7):
        parts = []
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            inner = torch.nn.functional.silu(up[expert] @ x[t] + biases[expert])
            parts.append(weight * (down[expert] @ inner))
        torch.testing.assert_close(got[t], sum(parts))


MIXTRAL_8X7B = {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096}
MIXTRAL_8X7B |= {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
MIXTRAL_8X7B |= {"num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
MIXTRAL_8X7B |= {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}
QWEN3_30B = {"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048}
QWEN3_30B |= {"intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_30B |= {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960}
QWEN3_30B |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_30B |= {"norm_topk_prob": True, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("published", "parameters", "active"),
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B, 30_532_122_624, 3_353_032_704),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_a_published_config_has_the_parameters_of_its_model(
    published: dict[str, Any], parameters: int, active: int
) -> None:
    spec = spec_from_hf(published)
    assert (spec.num_parameters(), spec.num_active_parameters()) == (parameters, active)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 exp"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts must be at least 1 with this"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 0}, "num_experts_per_tok must be a whole number"),
        (QWEN3_30B, {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number"),
        (QWEN3_30B, {"mlp_only_layers": ["x"]}, "mlp_only_layers must be a list of layer numbers"),
        (QWEN3_30B, {"moe_intermediate_size": -1}, "moe_intermediate_size must be a whole number"),
        (QWEN3_30B, {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        (QWEN3_30B, {"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (MIXTRAL_8X7B, {"model_type": "llama"}, "num_local_experts = 8 is not supported with this"),
    ],
)
def test_wrong_values_are_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: .*({says})"):
        spec_from_hf(config | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_group": 3}, "n_group must be a divisor of the number of experts, 16"),
        ({"n_group": 16, "topk_group": 8}, "n_group must be such that a group has at least two"),
        ({"topk_group": 5}, "topk_group must be at most n_group, 4"),
        ({"num_experts_per_tok": 9}, "topk_group must be such that its groups, of 4 experts each"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"scoring_func": "softmax"}, "scoring_func must be one of sigmoid"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        hf_experts.deepseek(Fields("config.json", V3 | changes), True)


# Files

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
STACKED = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
    ),
    "granitemoe": GraniteMoeConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["attention"] * 2,
        num_local_experts=3,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        mamba_n_heads=4,
    ),
}


@pytest.mark.parametrize("family", STACKED)
def test_experts_are_found_each_in_its_tensors_and_all_in_one(family: str, tmp_path: Path) -> None:
    """As `save_pretrained` writes them, and as transformers has them in memory."""
    model = AutoModelForCausalLM.from_config(STACKED[family], dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(tmp_path)
    spec, config = load_hf_config(tmp_path)
    names, path = names_in_hf(config), tmp_path / "model.safetensors"
    apart = SafetensorsWeights(tmp_path, spec, names)
    check_weights(spec, apart, "here")
    values = {name: read_tensor(apart, name, torch.float32) for name in spec.weight_shapes()}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if spec.tie_embeddings:
        tensors.pop("lm_head.weight")
    (tmp_path / "stacked").mkdir()
    save_file(tensors, tmp_path / "stacked" / "model.safetensors")
    together = SafetensorsWeights(tmp_path / "stacked", spec, names)
    check_weights(spec, together, "here")
    for name, value in values.items():
        assert torch.equal(read_tensor(together, name, torch.float32), value), name
    (stacked,) = (t for n, t in tensors.items() if "1." in n and n.endswith("gate_up_proj"))
    inner = stacked.shape[1] // 2
    assert torch.equal(values["layers.1.experts.2.gate"], stacked[2, :inner])
    assert torch.equal(values["layers.1.experts.2.up"], stacked[2, inner:])
    some = together.floats("layers.1.experts.2.up", slice(3, 5))
    assert torch.equal(torch.from_numpy(some), stacked[2, inner + 3 : inner + 5])
    if family == "mixtral":
        stored = load_file(path)
        stored.pop("model.layers.1.block_sparse_moe.experts.0.w1.weight")
        save_file(stored, path)
        with pytest.raises(ModelError, match=r"the weight 'layers.1.experts.0.gate' is missing"):
            check_weights(spec, SafetensorsWeights(tmp_path, spec, names), "here")


EXPERTS = ExpertsSpec(4, MLPSpec(96), RoutingSpec(2))
MIXTRAL = with_layers(SPEC, mlp=EXPERTS)


def counts(family: str, experts: int = 4, used: int = 2) -> Edit:
    def edit(writer: Any) -> None:
        setting("expert_count", experts, family)(writer)
        setting("expert_used_count", used, family)(writer)
        setting("feed_forward_length", 96, family)(writer)
        setting("expert_feed_forward_length", 96, family)(writer)

    return edit


@pytest.mark.parametrize("used", [1, 2])
def test_a_mixtral_in_gguf_is_read_back(used: int, tmp_path: Path) -> None:
    routing = RoutingSpec(used)
    spec = with_layers(SPEC, mlp=ExpertsSpec(4, MLPSpec(96), routing))
    file = write_model(tmp_path / "m.gguf", spec, counts("llama", used=used))
    assert spec_from_gguf(file) == spec
    source = GGUFWeights(file, spec)
    check_weights(spec, source, "here")
    assert source.packed("layers.1.experts.3.up").rows.shape == (96, 4 * 64)


def test_a_gpt_oss_in_gguf_is_read_back(tmp_path: Path) -> None:
    """Also the activation and the pattern of windows, which a file does not contain."""
    expert = MLPSpec(96, ClampedSwiglu(alpha=1.702, limit=7.0), bias=True)
    spec = changed(SPEC, family="gpt-oss", qkv_bias=True, output_bias=True, norm_fp32=True)
    rope = replace(SPEC.layers[0].attention.rope, truncate=False)
    spec = changed(spec, sinks=True, rope=rope, windows=(32, None, 32))
    spec = with_layers(spec, mlp=ExpertsSpec(4, expert, RoutingSpec(2, bias=True)))
    window = setting("attention.sliding_window", 32, "gpt-oss")
    file = write_model(tmp_path / "m.gguf", spec, edits(counts("gpt-oss"), window))
    assert spec_from_gguf(file) == spec
    source = GGUFWeights(file, spec)
    check_weights(spec, source, "here")
    assert not np.array_equal(
        source.floats("layers.0.experts.1.up_bias"), source.floats("layers.0.experts.2.up_bias")
    )


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (counts("llama", used=5), "llama.expert_used_count 5 is more than the 4 experts there are"),
        (counts("llama", used=0), "llama.expert_used_count must be a whole number from 1"),
        (counts("llama", experts=0), "the tensor 'blk.0.ffn_gate_inp.weight' is not part of a"),
    ],
)
def test_wrong_metadata_is_refused_by_name(edit: Edit, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=says):
        spec_from_gguf(write_model(tmp_path / "m.gguf", MIXTRAL, edit))


def test_a_file_with_fewer_experts_than_it_says_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", MIXTRAL, counts("llama", experts=5))
    spec = spec_from_gguf(file)
    with pytest.raises(ModelError, match=r"weight 'layers.0.router' has shape .4, 64."):
        check_weights(spec, GGUFWeights(file, spec), "here")


# Cost


def test_the_start_tells_how_many_parameters_a_token_goes_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    STACKED["mixtral"].save_pretrained(tmp_path)
    fixed = {"skip_tokenizer_init": True, "load_format": "dummy", "num_gpu_blocks_override": 9}
    spec = LLM(model=str(tmp_path), device="cpu", max_model_len=64, **fixed).engine.spec
    total, active = spec.num_parameters(), spec.num_active_parameters()
    assert total - active == 2 * 3 * 32 * 48  # an expert in each of two layers
    assert f"parameters: {total:,}, of which a token uses {active:,}" in caplog.text


def test_a_step_is_expected_to_read_the_experts_that_its_tokens_choose() -> None:
    experts = ExpertsSpec(8, MLPSpec(128), RoutingSpec(2))
    assert experts.experts_in_use(1) == pytest.approx(2)
    assert experts.experts_in_use(2) == pytest.approx(8 * (1 - 0.75**2))
    assert experts.experts_in_use(1000) == pytest.approx(8)
    plain = make_spec()
    spec = with_layers(plain, mlp=experts)
    cost, dense = (cost_model(one, dense_weight_bytes(one, 2), 2) for one in (spec, plain))
    each, layers = 3 * 64 * 128, plain.num_layers
    router = layers * 8 * 64
    assert cost.flops_per_token == dense.flops_per_token + 2 * (layers * each + router)
    # Of one token: two experts where the dense model has one such MLP.
    more = 2 * (layers * each + router)
    assert cost.weight_bytes(1, 1) == pytest.approx(dense.weight_bytes(1) + more)
    assert cost.weight_bytes(1) == sum(dense_weight_bytes(spec, 2)[n] for n in matrices(spec))


def matrices(spec: ModelSpec) -> list[str]:
    return [name for name, shape in spec.weight_shapes().items() if len(shape) == 2][1:]
