"""Configs and GGUF files of the families that came after Gemma, Phi and OLMo 2 → specs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Ernie4_5Config,
    Exaone4Config,
    Glm4Config,
    GraniteMoeHybridConfig,
    Ministral3Config,
    Olmo3Config,
    PreTrainedConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from tests.model.describe.test_family_mappings import APART, HEAD_NORMS, ROPES, TWO_NORMS, kinds, of
from tests.model.gguf.gguf_files import SPEC, Edit, write_model
from tests.specs import changed
from twostroke.errors import ModelError
from twostroke.kernels.activations import ClampedSwiglu
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf, spec_from_hf
from twostroke.model.describe.hf_families import FAMILIES
from twostroke.model.describe.rope import rope_tables
from twostroke.model.describe.spec import (
    NO_ROPE,
    ExpertsSpec,
    MLPSpec,
    ModelSpec,
    RopeSpec,
    RoutingSpec,
    with_layers,
    without_rope,
)
from twostroke.model.describe.tensor_names import halves_from_interleaved
from twostroke.model.weights import check_weights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights
from twostroke.model.weights.tensors import read_tensor

# Published configs, less what nobody reads.


def config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return {"model_type": model_type} | dict(zip(names, sizes, strict=True)) | more


SMOLLM3_3B = config("smollm3", (128256, 2048, 11008, 36, 16, 4, 65536), rope_theta=5e6)
SMOLLM3_3B |= {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}
SMOLLM3_3B |= {"use_sliding_window": False, "sliding_window": None}
GRANITE_8B = config("granite", (49155, 4096, 12800, 40, 32, 8, 131072), rope_theta=1e7)
GRANITE_8B |= {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0}
GRANITE_8B |= {"logits_scaling": 16.0, "residual_multiplier": 0.22, "tie_word_embeddings": True}
GRANITE4_MICRO = config("granitemoehybrid", (100352, 2560, 8192, 40, 40, 8, 131072))
GRANITE4_MICRO |= {"layer_types": ["attention"] * 40, "shared_intermediate_size": 8192}
GRANITE4_MICRO |= {"num_local_experts": 0, "num_experts_per_tok": 0, "rope_theta": 1e7}
GRANITE4_MICRO |= {"attention_multiplier": 0.015625, "embedding_multiplier": 12}
GRANITE4_MICRO |= {"logits_scaling": 10, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5}
GRANITE4_MICRO |= {"position_embedding_type": "rope", "tie_word_embeddings": True}
GLM4_9B = config("glm", (151552, 4096, 13696, 40, 32, 2, 131072), attention_bias=True)
GLM4_9B |= {"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}
OLMO3_7B = config("olmo3", (100278, 4096, 11008, 32, 32, 32, 65536), sliding_window=4096)
OLMO3_7B |= {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
OLMO3_7B["rope_scaling"] |= {"original_max_position_embeddings": 8192}
EXAONE4_32B = config("exaone4", (102400, 5120, 27392, 64, 40, 8, 131072), head_dim=128)
EXAONE4_32B |= {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "rope_theta": 1e6}
EXAONE4_32B |= {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16}
NEMO_12B = config("mistral", (131072, 5120, 14336, 40, 32, 8, 131072), head_dim=128)
NEMO_12B |= {"sliding_window": None, "rope_theta": 1e6}
MINISTRAL3 = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0}
MINISTRAL3 |= {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
MINISTRAL3 |= {"beta_slow": 1.0, "llama_4_scaling_beta": 0.1}
MINISTRAL3_3B = config("ministral3", (131072, 3072, 9216, 26, 32, 8, 262144), head_dim=128)
MINISTRAL3_3B |= {"rope_parameters": MINISTRAL3, "tie_word_embeddings": True}
MINISTRAL3_8B = config("ministral3", (131072, 4096, 14336, 34, 32, 8, 262144), head_dim=128)
MINISTRAL3_8B |= {"rope_parameters": MINISTRAL3, "sliding_window": None, "rms_norm_eps": 1e-5}
COMMAND_R = config("cohere", (256000, 8192, 22528, 40, 64, 64, 8192), logit_scale=0.0625)
COMMAND_R |= {"model_max_length": 131072, "rope_theta": 8e6, "use_qk_norm": False}
R7B = config("cohere2", (256000, 4096, 14336, 32, 32, 8, 132096), logit_scale=0.25)
R7B |= {"rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4}
STABLELM2 = config("stablelm", (100352, 2048, 5632, 24, 32, 32, 4096), use_qkv_bias=True)
STABLELM2 |= {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5}
STARCODER2_3B = config("starcoder2", (49152, 3072, 12288, 30, 24, 2, 16384), use_bias=True)
STARCODER2_3B |= {"sliding_window": 4096, "hidden_act": "gelu_pytorch_tanh"}
STARCODER2_3B |= {"norm_epsilon": 1e-5, "rope_theta": 999999.4420358813}
INTERNLM2_7B = config("internlm2", (92544, 4096, 14336, 32, 32, 8, 32768), bias=False)
INTERNLM3_8B = config("internlm3", (128512, 4096, 10240, 48, 32, 2, 32768), bias=False)
INTERNLM3_8B |= {"head_dim": 128, "qkv_bias": False}
SEED_36B = config("seed_oss", (155136, 5120, 27648, 64, 80, 8, 524288), rope_theta=1e7)
ERNIE45_03B = config("ernie4_5", (103424, 1024, 3072, 18, 16, 2, 131072), head_dim=128)
ERNIE45_03B |= {"rope_theta": 500000, "use_bias": False, "rms_norm_eps": 1e-5}
ERNIE45_03B |= {"tie_word_embeddings": True}


PYTHIA_160M = config("gpt_neox", (50304, 768, 3072, 12, 12, 12, 2048), hidden_act="gelu")
PYTHIA_160M |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
GPT2 |= {"n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GPTJ_6B = {"model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16}
GPTJ_6B |= {"n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False, "n_inner": None}
PHI_2 = config("phi", (51200, 2560, 10240, 32, 32, 32, 2048), partial_rotary_factor=0.4)
FALCON_7B: dict[str, Any] = {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544}
FALCON_7B |= {"num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True}
FALCON_40B = FALCON_7B | {"hidden_size": 8192, "num_hidden_layers": 60, "num_kv_heads": 8}
FALCON_40B |= {"num_attention_heads": 128, "new_decoder_architecture": True}
GPT_OSS_20B = config("gpt_oss", (201088, 2880, 2880, 24, 64, 8, 131072), head_dim=64)
GPT_OSS_20B |= {"sliding_window": 128, "rope_theta": 150000, "rms_norm_eps": 1e-5}
GPT_OSS_20B["rope_scaling"] = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
GPT_OSS_20B["rope_scaling"] |= {"original_max_position_embeddings": 4096}
GPT_OSS_20B |= {"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
GPT_OSS_20B["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}


@pytest.mark.parametrize(
    ("published", "parameters"),
    [
        (PYTHIA_160M, 162_322_944),
        (GPT2, 124_439_808),
        (GPTJ_6B, 6_050_882_784),
        (PHI_2, 2_779_683_840),
        (FALCON_7B, 6_921_720_704),
        (FALCON_40B, 41_303_293_952),
        (SMOLLM3_3B, 3_075_098_624),
        (GRANITE_8B, 8_170_848_256),
        (GRANITE4_MICRO, 3_402_836_480),
        (GLM4_9B, 9_399_951_360),
        (GLM4_9B | {"model_type": "glm4", "attention_bias": False}, 9_400_094_720),
        (OLMO3_7B, 7_298_011_136),
        (EXAONE4_32B, 32_003_216_384),
        (NEMO_12B, 12_247_782_400),
        (MINISTRAL3_3B, 3_429_006_336),
        (MINISTRAL3_8B, 8_489_553_920),
        ({"model_type": "mistral3", "text_config": MINISTRAL3_8B}, 8_489_553_920),
        (COMMAND_R, 34_980_831_232),
        (R7B, 8_028_033_024),
        (STABLELM2, 1_644_515_328),
        (STARCODER2_3B, 3_030_371_328),
        (INTERNLM2_7B, 7_737_708_544),
        (INTERNLM3_8B, 8_804_241_408),
        (SEED_36B, 36_151_104_512),
        (ERNIE45_03B, 360_748_032),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_published_config_has_the_parameters_of_its_model(
    published: dict[str, Any], parameters: int
) -> None:
    assert spec_from_hf(published).num_parameters() == parameters


def test_smollm3_has_no_rope_in_every_fourth_layer() -> None:
    spec = spec_from_hf(SMOLLM3_3B)
    assert kinds(spec, "rope") == [*[RopeSpec(5e6, 128)] * 3, NO_ROPE] * 9
    assert (set(kinds(spec, "window")), spec.tie_embeddings) == ({None}, True)
    implied = {**SMOLLM3_3B, "no_rope_layers": None, "rope_theta": None}
    assert kinds(spec_from_hf(implied), "rope") == [*[RopeSpec(2e6, 128)] * 3, NO_ROPE] * 9


def test_ministral_3_multiplies_queries_beyond_the_original_context() -> None:
    spec = spec_from_hf(MINISTRAL3_8B)
    (rope,) = spec.ropes()
    assert (rope.kind, rope.factor, rope.original_context) == ("yarn", 16.0, 16384)
    assert (rope.attention_factor, rope.query_beta, rope.query_span) == (1.0, 0.1, 16384)
    assert (spec.max_context, spec.norm_eps, spec.tie_embeddings) == (262144, 1e-5, False)
    assert set(kinds(spec, "window")) == {None}
    whole = {"model_type": "mistral3", "text_config": MINISTRAL3_8B}
    absent = ("rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps")
    implied = {name: value for name, value in MINISTRAL3_8B.items() if name not in absent}
    assert spec_from_hf(whole) == spec_from_hf(implied) == spec
    sharpened = MINISTRAL3_8B | {"rope_parameters": MINISTRAL3 | {"mscale_all_dim": 0.0}}
    assert spec_from_hf(sharpened).ropes()[0].attention_factor == 0.1 * np.log(16) + 1
    plain = MINISTRAL3_8B | {"rope_parameters": MINISTRAL3 | {"llama_4_scaling_beta": 0}}
    assert spec_from_hf(plain).ropes() == (replace(rope, query_beta=0.0, query_span=0),)


def test_granite_has_four_multipliers() -> None:
    spec = spec_from_hf(GRANITE_8B)
    assert set(kinds(spec, "scale")) == {1 / 128}
    assert (spec.embed_scale, spec.residual_scale, spec.logit_scale) == (12.0, 0.22, 1 / 16)


def test_granite_4_has_rope_and_experts_where_it_says_so() -> None:
    spec = spec_from_hf(GRANITE4_MICRO)
    assert (set(kinds(spec, "rope")), set(kinds(spec, "scale"))) == ({RopeSpec(1e7, 64)}, {1 / 64})
    assert (spec.embed_scale, spec.residual_scale, spec.logit_scale) == (12.0, 0.22, 1 / 10)
    for said in ("nope", None):
        assert spec_from_hf(GRANITE4_MICRO | {"position_embedding_type": said}).ropes() == (
            NO_ROPE,
        )
    sizes = {"num_experts_per_tok": 3, "intermediate_size": 512, "shared_intermediate_size": 1024}
    for said, count in ((6, 6), (None, 8)):
        mixture = spec_from_hf(GRANITE4_MICRO | sizes | {"num_local_experts": said})
        experts = ExpertsSpec(count, MLPSpec(512), RoutingSpec(3), shared=MLPSpec(1024))
        assert {layer.mlp for layer in mixture.layers} == {experts}


MAMBA = {"layer_types": [*["mamba"] * 9, "attention"] * 4, "position_embedding_type": "nope"}
HYBRID = "mamba layers are not supported, and {} of the 40 layers have mamba .layer_types; without"


def test_glm_turns_half_of_the_channels_and_glm4_has_norms_after() -> None:
    spec = spec_from_hf(GLM4_9B)
    assert set(kinds(spec, "rope")) == {RopeSpec(1e4, 64)}
    assert (spec.layers[0].attention.qkv_bias, spec.layers[0].attention.output_bias) == (
        True,
        False,
    )
    later = spec_from_hf(GLM4_9B | {"model_type": "glm4", "partial_rotary_factor": None})
    assert (later.layers[0].pre_norm, later.layers[0].post_norm) == (True, True)


def test_olmo_3_scales_the_rope_of_layers_without_a_window() -> None:
    spec = spec_from_hf(OLMO3_7B)
    assert kinds(spec, "window") == [4096, 4096, 4096, None] * 8
    sliding, full = spec.ropes()
    assert sliding == RopeSpec(5e5, 128)
    assert (full.kind, full.factor, full.original_context) == ("yarn", 8.0, 8192)
    assert (spec.max_context, spec.norm_fp32, spec.layers[0].pre_norm) == (65536, True, False)


def test_ernie_has_128_channels_in_each_head_and_one_setting_for_all_biases() -> None:
    spec = spec_from_hf(ERNIE45_03B)
    assert set(kinds(spec, "rope")) == {RopeSpec(5e5, 128)}
    absent = ("rope_theta", "head_dim", "num_key_value_heads", "rms_norm_eps", "use_bias")
    absent += ("tie_word_embeddings",)
    implied = {name: value for name, value in ERNIE45_03B.items() if name not in absent}
    assert spec_from_hf(implied) == spec
    biased = spec_from_hf(ERNIE45_03B | {"use_bias": True})
    assert {name for name in biased.weight_shapes() if name.startswith("layers.0.")} == {
        *(name for name in spec.weight_shapes() if name.startswith("layers.0.")),
        *(f"layers.0.{part}_bias" for part in ("q", "k", "v", "o", "gate", "up", "down")),
    }
    narrow = spec_from_hf(ERNIE45_03B | {"head_dim": None})
    assert narrow.layers[0].attention.head_dim == 64


@pytest.mark.parametrize("changes", [{}, {"layer_types": None}])
def test_exaone_4_has_rope_where_it_slides(changes: dict[str, Any]) -> None:
    spec = spec_from_hf(EXAONE4_32B | changes)
    assert kinds(spec, "window") == [4096, 4096, 4096, None] * 16
    assert kinds(spec, "rope") == [*[RopeSpec(1e6, 128)] * 3, NO_ROPE] * 16
    whole = spec_from_hf(EXAONE4_32B | {"sliding_window": None, "layer_types": None})
    assert whole.ropes() == (RopeSpec(1e6, 128),)


def test_command_r_is_parallel_and_its_context_is_what_it_was_made_for() -> None:
    spec = spec_from_hf(COMMAND_R)
    assert (spec.norm, spec.norm_bias, spec.norm_fp32) == ("layer", False, True)
    assert (spec.max_context, spec.logit_scale, spec.tie_embeddings) == (131072, 0.0625, True)
    assert all(layer.parallel for layer in spec.layers)
    small = spec_from_hf(R7B)
    assert kinds(small, "window") == [4096, 4096, 4096, None] * 8
    assert kinds(small, "rope") == [*[RopeSpec(5e4, 128)] * 3, NO_ROPE] * 8


def test_stablelm_and_starcoder_2() -> None:
    spec = spec_from_hf(STABLELM2)
    assert (spec.norm, spec.norm_bias, spec.layers[0].parallel) == ("layer", True, False)
    assert set(kinds(spec, "rope")) == {RopeSpec(1e4, 16)}
    assert spec_from_hf(STABLELM2 | {"use_parallel_residual": True}).layers[0].parallel
    code = spec_from_hf(STARCODER2_3B)
    mlp = code.layers[0].mlp
    assert (mlp.gated, mlp.activation, mlp.bias) == (False, "gelu_tanh", True)
    assert (set(kinds(code, "window")), code.tie_embeddings) == ({4096}, True)
    plain = spec_from_hf(STARCODER2_3B | {"use_bias": False})
    assert not any(name.endswith(("q_bias", "o_bias", "up_bias")) for name in plain.weight_shapes())
    assert "layers.0.mlp_norm_bias" in plain.weight_shapes()


def test_gpt_2_and_its_heirs() -> None:
    spec = spec_from_hf(PYTHIA_160M)
    layer = spec.layers[0]
    assert (layer.parallel, layer.two_norms, layer.mlp.activation) == (True, True, "gelu")
    assert spec.ropes() == (RopeSpec(1e4, 16),)
    later = spec_from_hf(PYTHIA_160M | {"use_parallel_residual": False, "hidden_act": "gelu_fast"})
    assert (later.layers[0].parallel, later.layers[0].two_norms) == (False, False)
    assert later.layers[0].mlp.activation == "gelu_tanh"
    old = spec_from_hf(GPT2)
    assert (old.learned_positions, old.ropes(), old.tie_embeddings) == (True, (NO_ROPE,), True)
    assert old.weight_shapes()["positions"] == (1024, 768)
    assert old.layers[0].mlp.intermediate_size == 3072
    scaled = spec_from_hf(GPT2 | {"scale_attn_by_inverse_layer_idx": True})
    assert kinds(scaled, "scale") == [1 / 8 / (n + 1) for n in range(12)]
    assert spec_from_hf(GPTJ_6B).ropes() == (RopeSpec(1e4, 64),)
    assert spec_from_hf(PHI_2).ropes() == (RopeSpec(1e4, 32),)
    assert spec_from_hf(FALCON_7B).layers[0].attention.num_kv_heads == 1
    assert spec_from_hf(FALCON_40B).layers[0].two_norms


def test_gpt_oss_is_read() -> None:
    spec = spec_from_hf(GPT_OSS_20B)
    published = GPT_OSS_20B | {"num_local_experts": 128, "num_hidden_layers": 36}
    assert spec_from_hf(published).num_parameters() == 116_829_156_672
    assert (spec.num_parameters(), spec.num_active_parameters()) == (20_914_757_184, 4_187_440_704)
    expert = MLPSpec(2880, ClampedSwiglu(alpha=1.702, limit=7.0), bias=True)
    assert {layer.mlp for layer in spec.layers} == {
        ExpertsSpec(32, expert, RoutingSpec(4, bias=True))
    }
    assert kinds(spec, "window") == [128, None] * 12
    assert set(kinds(spec, "sinks")) == set(kinds(spec, "qkv_bias")) == {True}
    (rope,) = spec.ropes()
    assert (rope.theta, rope.kind, rope.factor) == (150000.0, "yarn", 32.0)
    assert (rope.truncate, rope.original_context, spec.max_context) == (False, 4096, 131072)
    assert spec.weight_shapes()["layers.3.sinks"] == (64,)


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (GPT2, {"n_embd": 0}, "n_embd must be a whole number from 1"),
        (GPT2, {"n_head": None}, r"has no n_head \(.*\), which must be"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        (GPT2, {"activation_function": "relu"}, "the activation 'relu' .activation_function. is"),
        (GPTJ_6B, {"rotary_dim": 63}, "rotary_dim must be even"),
        (GPTJ_6B, {"rotary_dim": None}, "has no rotary_dim"),
        (GPTJ_6B, {"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        (PHI_2, {"qk_layernorm": True}, "qk_layernorm = True is not supported"),
        (PYTHIA_160M, {"rotary_emb_base": 0}, "rotary_emb_base must be a number above 1"),
        (FALCON_7B, {"alibi": True}, "alibi = True is not supported"),
        (FALCON_40B, {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be a whole"),
        (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit must be a number above 0"),
        (GPT_OSS_20B, {"swiglu_alpha": "x"}, "swiglu_alpha must be a number above 0"),
        (GPT_OSS_20B, {"num_experts_per_tok": 33}, "num_experts_per_tok 33 is more than the 32"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "awq"}}, "bits = None"),
        (GPT_OSS_20B, {"quantization_config": "mxfp4"}, "quantization_config must be an object"),
        (SMOLLM3_3B, {"quantization_config": {"quant_method": "mxfp4"}}, "quantised by 'mxfp4'"),
        (SMOLLM3_3B, {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 0 or 1 for"),
        (SMOLLM3_3B, {"no_rope_layers": "x"}, "no_rope_layers must be a list of 0 or 1"),
        (SMOLLM3_3B, {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole"),
        (GRANITE_8B, {"logits_scaling": 0}, "logits_scaling must be a number above 0"),
        (GRANITE_8B, {"residual_multiplier": "x"}, "residual_multiplier must be a number above 0"),
        (GRANITE_8B, {"embedding_multiplier": -1}, "embedding_multiplier must be a number above"),
        (GRANITE_8B, {"attention_multiplier": 0}, "attention_multiplier must be a number above 0"),
        (GRANITE4_MICRO, MAMBA, HYBRID.format(36)),
        (GRANITE4_MICRO, {"layer_types": ["linear_attention"] * 40}, HYBRID.format(40)),
        (GRANITE4_MICRO, {"layer_types": None}, HYBRID.format(40)),
        (GRANITE4_MICRO, {"layer_types": ["attention"]}, "layer_types has 1 entries for 40"),
        (
            GRANITE4_MICRO,
            {"layer_types": ["sliding_attention"] * 40},
            "the layer type 'sliding_attention' .layer_types. is not supported",
        ),
        (
            GRANITE4_MICRO,
            {"position_embedding_type": "alibi"},
            "position_embedding_type must be one of nope, rope, not 'alibi'",
        ),
        (GRANITE4_MICRO, {"num_local_experts": -1}, "num_local_experts must be a whole number"),
        (GRANITE4_MICRO, {"shared_intermediate_size": 0}, "shared_intermediate_size must be a w"),
        (
            GRANITE4_MICRO,
            {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 0},
            r"\bintermediate_size must be a whole number from 1",
        ),
        (EXAONE4_32B, {"sliding_window_pattern": []}, "sliding_window_pattern must be a whole"),
        (ERNIE45_03B, {"model_type": "ernie4_5_moe"}, "the architecture 'ernie4_5_moe' is not"),
        (ERNIE45_03B, {"use_bias": "x"}, "use_bias must be true or false"),
        (ERNIE45_03B, {"hidden_act": "gelu"}, "the activation 'gelu' .hidden_act. is not"),
        (COMMAND_R, {"use_qk_norm": True}, "use_qk_norm = True is not supported"),
        (COMMAND_R, {"logit_scale": 0}, "logit_scale must be a number above 0"),
        (COMMAND_R, {"layer_norm_eps": 2}, "layer_norm_eps must be a number from 1e-20 to 1"),
        (COMMAND_R, {"model_max_length": 1}, "model_max_length must be a whole number from 2"),
        (STABLELM2, {"qk_layernorm": True}, "qk_layernorm = True is not supported"),
        (STARCODER2_3B, {"hidden_act": "gelu"}, "the activation 'gelu' .hidden_act. is not"),
        (STARCODER2_3B, {"norm_epsilon": None}, "has no norm_epsilon"),
        (NEMO_12B, {"model_type": "mistral3"}, "has no text_config, which a model of model_type"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            {},
            "text_config: the architecture 'mistral4' .model_type. is not supported, only",
        ),
        *(
            (MINISTRAL3_8B, {"rope_parameters": MINISTRAL3 | changes}, f"rope_parameters: {says}")
            for changes, says in (
                ({"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta must be a number from 0"),
                ({"llama_4_scaling_beta": "x"}, "llama_4_scaling_beta must be a number from 0"),
                ({"original_max_position_embeddings": 0}, "original_max_position_embeddings must"),
            )
        ),
        *(
            (
                MINISTRAL3_8B,
                {"rope_parameters": given},
                "there is no llama_4_scaling_beta in rope_parameters .*this model_type",
            )
            for given in ({}, MINISTRAL3 | {"llama_4_scaling_beta": None})
        ),
        (MINISTRAL3_8B, {"hidden_act": "gelu"}, "the activation 'gelu' .hidden_act. is not"),
        *(
            (NEMO_12B, {"model_type": name}, f"the architecture '{name}' is not supported")
            for name in ("gemma3n", "gemma3n_text", "qwen2_5_vl", "llava", "siglip_vision_model")
        ),
    ],
)
def test_wrong_values_are_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: .*({says})"):
        spec_from_hf(config | changes)


# Weights and angles

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": None}
TINY: dict[str, PreTrainedConfig] = {
    "glm4": Glm4Config(**SIZES, head_dim=8),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZES,
        layer_types=["attention"] * 4,
        num_local_experts=0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "ministral3": Ministral3Config(
        **SIZES, head_dim=12, rope_parameters=MINISTRAL3 | {"original_max_position_embeddings": 16}
    ),
    "olmo3": Olmo3Config(**SIZES, rope_parameters=ROPES),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=8, use_bias=True),
    "exaone4": Exaone4Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES),
    "cohere2": Cohere2Config(**SIZES),
    "stablelm": StableLmConfig(**SIZES),
    "starcoder2": Starcoder2Config(**SIZES),
}
AFTER = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
BIASED_NORMS = {f"{name}_bias": tensor for name, tensor in TWO_NORMS.items()}
GATE_UP = {"gate": ("mlp.gate_up_proj", slice(0, 48)), "up": ("mlp.gate_up_proj", slice(48, 96))}
SHARED = {"gate": ("shared_mlp.input_linear", slice(0, 40)), "down": "shared_mlp.output_linear"}
SHARED |= {"up": ("shared_mlp.input_linear", slice(40, 80))}
GLM4_NORMS = {"attn_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
C_MLP = {"up": "mlp.c_fc", "down": "mlp.c_proj"}
# Of a layer: our name → transformers', some with the rows that are ours.
WEIGHTS: dict[str, dict[str, Any]] = {
    "glm4": APART | GATE_UP | TWO_NORMS | GLM4_NORMS,
    "granitemoehybrid": APART | TWO_NORMS | SHARED,
    "ministral3": APART | TWO_NORMS,
    "olmo3": APART | AFTER | HEAD_NORMS,
    "ernie4_5": APART | TWO_NORMS | {f"{name}_bias": APART[name] for name in APART},
    "exaone4": APART | AFTER | HEAD_NORMS,
    "smollm3": APART | TWO_NORMS,
    "cohere2": APART | {"attn_norm": "input_layernorm"},
    "stablelm": APART | TWO_NORMS | BIASED_NORMS,
    "starcoder2": {name: APART[name] for name in "qkvo"} | C_MLP | TWO_NORMS | BIASED_NORMS,
}
WEIGHTS["glm4"] |= {f"{name}_bias": APART[name] for name in "qkv"}
WEIGHTS["starcoder2"] |= {f"{name}_bias": APART[name] for name in "qkvo"}
WEIGHTS["starcoder2"] |= {f"{name}_bias": tensor for name, tensor in C_MLP.items()}
# Families whose files have the channels that rope rotates together side by side.
NEIGHBOURS = ("glm4", "ernie4_5", "cohere2")


@pytest.mark.parametrize("family", TINY)
def test_every_weight_is_the_right_rows_of_the_right_tensor(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(TINY[family], dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(tmp_path)
    spec, saved = load_hf_config(tmp_path)
    source = SafetensorsWeights(tmp_path, spec, names_in_hf(saved))
    check_weights(spec, source, "here")
    stored = {name: value.detach() for name, value in model.state_dict().items()}
    expected = {"embed": stored["model.embed_tokens.weight"]}
    expected["final_norm"] = stored["model.norm.weight"]
    if spec.norm_bias:
        expected["final_norm_bias"] = stored["model.norm.bias"]
    if not spec.tie_embeddings:
        expected["head"] = stored["lm_head.weight"]
    for n, layer in enumerate(spec.layers):
        for name, theirs in WEIGHTS[family].items():
            tensor, rows = theirs if isinstance(theirs, tuple) else (theirs, slice(None))
            kind = "bias" if name.endswith("_bias") else "weight"
            value = stored[f"model.layers.{n}.{tensor}.{kind}"][rows]
            if family in NEIGHBOURS and name[0] in "qk":
                heads = len(value) // layer.attention.head_dim
                order = halves_from_interleaved(heads, 8, layer.attention.rope.dim)
                value = value[torch.from_numpy(order)]
            expected[f"layers.{n}.{name}"] = value
    assert set(expected) == set(spec.weight_shapes())
    for name, value in expected.items():
        assert torch.equal(read_tensor(source, name, torch.float32), value), name
        part = slice(1, 3)
        np.testing.assert_array_equal(source.floats(name, part), value[part].numpy())


@pytest.mark.parametrize("family", TINY)
def test_angles_are_those_of_transformers(family: str) -> None:
    theirs = AutoModelForCausalLM.from_config(TINY[family]).model.rotary_emb
    spec = spec_from_hf(TINY[family].to_dict())
    positions, x = torch.arange(17)[None], torch.zeros(1)
    compared = 0
    for layer in spec.layers:
        if layer.attention.rope == NO_ROPE:
            cos, sin = rope_tables(NO_ROPE, 17)
            assert (cos == 1).all()
            assert (sin == 0).all()
            continue
        kind = "full_attention" if layer.attention.window is None else "sliding_attention"
        which = (kind,) if family == "olmo3" else ()
        for ours, other in zip(
            rope_tables(layer.attention.rope, 17), theirs(x, positions, *which), strict=True
        ):
            dim = layer.attention.rope.dim
            channels = slice(0, dim, 2) if family == "cohere2" else slice(dim // 2)
            np.testing.assert_allclose(ours, other[0, :, channels].numpy(), atol=2e-6, rtol=0)
            compared += 1
    assert compared >= 6


# GGUF

SMOLLM3 = without_rope(changed(SPEC, family="smollm3", windows=(None,) * 5), [3])
GRANITE = changed(SPEC, family="granite", scale=0.125, embed_scale=12.0, residual_scale=0.25)
GRANITE = changed(GRANITE, logit_scale=1 / 16)
SCALES = {"attention__scale": 0.125, "embedding_scale": 12.0, "residual_scale": 0.25}
SCALES |= {"logit_scale": 16.0}
GRANITE_EXPERTS = ExpertsSpec(4, MLPSpec(96), RoutingSpec(2))
GRANITE_MOE = with_layers(changed(GRANITE, family="granitemoe"), mlp=GRANITE_EXPERTS)
GRANITE4 = with_layers(GRANITE_MOE, mlp=replace(GRANITE_EXPERTS, shared=MLPSpec(48)))
COUNTS = {"expert_count": 4, "expert_used_count": 2}
SHARED_WIDTH = {"expert_shared_feed_forward_length": 48}
YARN = RopeSpec(1e4, 16, "yarn", 4.0, 32, attention_factor=1.0)
SCALED = replace(YARN, query_beta=0.25, query_span=32)
YARN_SETTINGS: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
YARN_SETTINGS |= {"rope__scaling__original_context_length": 32}
YARN_SETTINGS |= {"rope__scaling__yarn_log_multiplier": 1.0}
GLM4 = changed(SPEC, family="glm4", rope=RopeSpec(1e4, 8), post_norm=True, qkv_bias=True)
COHERE = changed(SPEC, family="command-r", parallel=True, norm="layer", norm_fp32=True)
COHERE = changed(COHERE, tie_embeddings=True, logit_scale=0.25)
COHERE2 = changed(COHERE, family="cohere2", windows=(32, 32, 32, None, 32))
COHERE2 = without_rope(COHERE2, [3])
STABLELM = changed(SPEC, family="stablelm", norm="layer", norm_bias=True, rope=RopeSpec(1e4, 4))
STARCODER2 = changed(SPEC, family="starcoder2", norm="layer", norm_bias=True, gated=False)
STARCODER2 = changed(STARCODER2, activation="gelu_tanh", qkv_bias=True, output_bias=True)
STARCODER2 = changed(STARCODER2, mlp_bias=True, tie_embeddings=True)
OLMO3 = changed(SPEC, family="olmo2", pre_norm=False, post_norm=True, qk_norm="full")
OLMO3 = changed(OLMO3, norm_fp32=True, windows=(32, 32, 32, None))
EXAONE4 = changed(OLMO3, family="exaone4", qk_norm="head", norm_fp32=False)
EPS = {"attention__layer_norm_epsilon": 2.0**-17}
GPTNEOX = changed(STARCODER2, family="gptneox", activation="gelu", tie_embeddings=False)
GPTNEOX = changed(GPTNEOX, parallel=True, two_norms=True, rope=RopeSpec(1e4, 4))
GPT2_FILE = changed(STARCODER2, family="gpt2", learned_positions=True, rope=NO_ROPE)
PHI2 = changed(STARCODER2, family="phi2", parallel=True, head_bias=True, tie_embeddings=False)
FALCON = changed(STARCODER2, family="falcon", parallel=True, activation="gelu", qkv_bias=False)
FALCON = changed(FALCON, output_bias=False, mlp_bias=False)


@pytest.mark.parametrize(
    ("spec", "edit"),
    [
        (SMOLLM3, of("smollm3")),
        (GRANITE, of("granite", **SCALES)),
        (
            without_rope(GRANITE, range(2)),
            of("granite", **SCALES, rope__scaling__finetuned=False),
        ),
        (
            GRANITE,
            of(
                "granite", **SCALES, **SHARED_WIDTH, expert_count=0, attention__head_count_kv=[2, 2]
            ),
        ),
        (GRANITE_MOE, of("granitemoe", **SCALES, **COUNTS)),
        (GRANITE4, of("granitemoe", **SCALES, **COUNTS, **SHARED_WIDTH)),
        (
            changed(SPEC, family="mistral3", rope=SCALED),
            of("mistral3", **YARN_SETTINGS, attention__temperature_scale=0.25),
        ),
        (changed(SPEC, family="mistral3", rope=YARN), of("mistral3", **YARN_SETTINGS)),
        (changed(SPEC, family="mistral3"), of("mistral3")),  # Mistral Small 3.1
        (GLM4, of("glm4", rope__dimension_count=8)),
        (
            changed(SPEC, family="chatglm", rope=RopeSpec(1e4, 8), qkv_bias=True),
            of("chatglm", rope__dimension_count=8),
        ),
        (COHERE, of("command-r", logit_scale=0.25, **EPS)),
        (COHERE2, of("cohere2", logit_scale=0.25, attention__sliding_window=32, **EPS)),
        (STABLELM, of("stablelm", rope__dimension_count=4, use_parallel_residual=True, **EPS)),
        (
            changed(STABLELM, parallel=True),
            of("stablelm", rope__dimension_count=4, use_parallel_residual=True, **EPS),
        ),
        (STARCODER2, of("starcoder2", **EPS)),
        (GPTNEOX, of("gptneox", rope__dimension_count=4, use_parallel_residual=True, **EPS)),
        (
            changed(GPTNEOX, parallel=False, two_norms=False),
            of("gptneox", rope__dimension_count=4, use_parallel_residual=False, **EPS),
        ),
        (GPT2_FILE, of("gpt2", **EPS)),
        (PHI2, of("phi2", **EPS)),
        (FALCON, of("falcon", **EPS)),
        (OLMO3, of("olmo2", attention__sliding_window=32)),
        (without_rope(EXAONE4, [3]), of("exaone4", attention__sliding_window=32)),
        (changed(EXAONE4, windows=(None,) * 2), of("exaone4")),
        (changed(SPEC, family="seed_oss", qkv_bias=True), of("seed_oss")),
        (changed(SPEC, family="internlm2"), of("internlm2")),
        (changed(SPEC, family="ernie4_5", tie_embeddings=True), of("ernie4_5")),
    ],
    ids=lambda value: value.family if isinstance(value, ModelSpec) else "",
)
def test_a_file_is_read_back(spec: ModelSpec, edit: Edit, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", spec, edit)
    assert spec_from_gguf(file) == spec
    check_weights(spec, GGUFWeights(file, spec), "here")


@pytest.mark.parametrize(
    "arch", ["ernie4_5-moe", "gemma3n", "clip", "qwen2vl", "gptj", "granitehybrid"]
)
def test_files_of_other_architectures_are_refused_by_name(arch: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"the architecture '{arch}' is not supported"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", changed(SPEC, family=arch)))


@pytest.mark.parametrize(
    ("spec", "edit", "says"),
    [
        (
            changed(GPTNEOX, sinks=True),
            of("gptneox", **EPS),
            "the tensor 'blk.0.attn_sinks.weight' is not part of a gptneox model",
        ),
        (GRANITE, of("granite", logit_scale=-1.0), "granite.logit_scale must be a number from 0"),
        (GRANITE, of("granite", residual_scale="x"), "granite.residual_scale must be a number"),
        (GRANITE, of("granite", expert_count=4), "granite.expert_count = 4 is not supported"),
        (
            GRANITE4,
            of("granitemoe", **COUNTS),
            "the tensor 'blk.0.ffn_[a-z]*_shexp.weight' is not part of a granitemoe model",
        ),
        (SPEC, of("llama", residual_scale=0.5), "llama.residual_scale = 0.5 is not supported"),
        (
            SPEC,
            of("llama", attention__temperature_scale=0.1),
            "llama.attention.temperature_scale = 0.1.* is not supported",
        ),
        (
            changed(SPEC, family="mistral3"),
            of("mistral3", attention__temperature_scale=-1.0),
            "mistral3.attention.temperature_scale must be a number from 0",
        ),
        (
            GLM4,
            of("glm4", rope__dimension_sections=[2, 2]),
            "glm4.rope.dimension_sections must be absent in a GLM-4 model",
        ),
        (COHERE, of("command-r"), "has no command-r.attention.layer_norm_epsilon"),
        (
            changed(COHERE, qk_norm="head"),
            of("command-r", **EPS),
            "the tensor 'blk.0.attn_._norm.weight' is not part of a command-r model",
        ),
    ],
)
def test_wrong_metadata_is_refused_by_name(
    spec: ModelSpec, edit: Edit, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=rf"m\.gguf: .*({says})"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", spec, edit))


def test_all_families_are_named_in_the_docs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "MODELS.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in text] == []
