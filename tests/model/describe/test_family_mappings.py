"""Configs of published models → specs, and where their weights and angles come from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
)

from tests.model.gguf.gguf_files import Edit, extra_tensor, setting, write_model
from tests.specs import changed, make_spec
from twostroke.errors import ModelError
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf, spec_from_hf
from twostroke.model.describe.rope import rope_tables
from twostroke.model.describe.spec import ModelSpec, RopeSpec
from twostroke.model.weights import check_weights
from twostroke.model.weights.gguf import GGUFWeights
from twostroke.model.weights.safetensors import SafetensorsWeights
from twostroke.model.weights.tensors import read_tensor

# Published configs, less what nobody reads.
GEMMA_2B = {"model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_act": "gelu"}
GEMMA_2B |= {"hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192}
GEMMA_2B |= {"num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1}
GEMMA_2B |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0}
GEMMA_2B |= {"vocab_size": 256000}
GEMMA2_27B = {"model_type": "gemma2", "attn_logit_softcapping": 50.0, "head_dim": 128}
GEMMA2_27B |= {"final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}
GEMMA2_27B |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608}
GEMMA2_27B |= {"intermediate_size": 36864, "max_position_embeddings": 8192}
GEMMA2_27B |= {"num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16}
GEMMA2_27B |= {"query_pre_attn_scalar": 144, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
GEMMA2_27B |= {"sliding_window": 4096, "vocab_size": 256000}
GEMMA3_4B: dict[str, Any] = {"model_type": "gemma3", "torch_dtype": "bfloat16"}
GEMMA3_4B |= {"text_config": {"hidden_size": 2560, "intermediate_size": 10240}}
GEMMA3_4B["text_config"] |= {"model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA3_4B["text_config"] |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA3_4B["text_config"] |= {"sliding_window": 1024}
PHI4_MINI = {"model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072}
PHI4_MINI |= {"intermediate_size": 8192, "max_position_embeddings": 131072}
PHI4_MINI |= {"num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8}
PHI4_MINI |= {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
PHI4_MINI |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144}
PHI4_MINI |= {"tie_word_embeddings": True, "vocab_size": 200064, "attention_bias": False}
PHI4_MINI |= {
    "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
}
OLMO2_7B = {"model_type": "olmo2", "attention_bias": False, "hidden_act": "silu"}
OLMO2_7B |= {"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096}
OLMO2_7B |= {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32}
OLMO2_7B |= {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 500000}
OLMO2_7B |= {"tie_word_embeddings": False, "vocab_size": 100352}
PHI3_MINI_4K = {**PHI4_MINI, "rope_scaling": None, "sliding_window": 2047}
PHI3_MINI_4K |= {"max_position_embeddings": 4096, "partial_rotary_factor": 1.0}


def text(**changes: Any) -> dict[str, Any]:
    return {"text_config": GEMMA3_4B["text_config"] | changes}


def kinds(spec: ModelSpec, name: str) -> list[Any]:
    return [getattr(layer.attention, name) for layer in spec.layers]


def test_gemma_2b() -> None:
    spec = spec_from_hf(GEMMA_2B)
    layer = spec.layers[0]
    assert (layer.pre_norm, layer.post_norm, layer.mlp.activation) == (True, False, "gelu_tanh")
    assert (spec.embed_scale, spec.norm_fp32) == (math.sqrt(2048), True)
    assert (spec.tie_embeddings, spec.max_context) == (True, 8192)
    assert spec.num_parameters() == 2_506_172_416


@pytest.mark.parametrize("spelling", ["gelu", "gelu_pytorch_tanh"])
def test_gemma_has_one_gelu_under_every_name(spelling: str) -> None:
    said = {"hidden_act": spelling, "hidden_activation": None}
    assert spec_from_hf(GEMMA_2B | said) == spec_from_hf(GEMMA_2B)
    later = {"hidden_act": "gelu", "hidden_activation": spelling}
    assert spec_from_hf(GEMMA_2B | later) == spec_from_hf(GEMMA_2B)


def test_a_gemma_without_its_usual_fields_has_those_of_its_own_code() -> None:
    usual = ("head_dim", "num_key_value_heads", "hidden_act", "rope_theta", "rope_scaling")
    config = {name: value for name, value in GEMMA_2B.items() if name not in usual}
    spec = spec_from_hf(config | {"num_attention_heads": 16})
    attention = spec.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim, attention.scale) == (16, 256, 1 / 16)
    assert (attention.rope, spec.layers[0].mlp.activation) == (RopeSpec(1e4, 256), "gelu_tanh")


def test_gemma_2_27b() -> None:
    spec = spec_from_hf(GEMMA2_27B)
    layer = spec.layers[0]
    assert (layer.pre_norm, layer.post_norm, layer.mlp.activation) == (True, True, "gelu_tanh")
    assert kinds(spec, "window") == [4096, None] * 23
    assert set(kinds(spec, "scale")) == {144**-0.5}
    assert set(kinds(spec, "softcap")) == {50.0}
    assert (spec.logit_softcap, spec.embed_scale) == (30.0, math.sqrt(4608))
    assert (spec.tie_embeddings, spec.norm_fp32, spec.max_context) == (True, True, 8192)
    assert spec.num_parameters() == 27_227_128_320


def test_gemma_3_4b_with_images(caplog: pytest.LogCaptureFixture) -> None:
    """Its config says little: the rest is what the family's own code takes."""
    spec = spec_from_hf(GEMMA3_4B)
    assert "images are not supported" in caplog.text
    assert kinds(spec, "window")[:7] == [1024] * 5 + [None, 1024]
    assert kinds(spec, "window").count(None) == 5
    sliding, full = RopeSpec(1e4, 256), RopeSpec(1e6, 256, "linear", 8.0, 131072)
    assert spec.ropes() == (sliding, full)
    assert [layer.attention.rope == full for layer in spec.layers] == [
        window is None for window in kinds(spec, "window")
    ]
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (attention.qk_norm, attention.softcap, attention.scale) == ("head", 0.0, 1 / 16)
    assert (spec.logit_softcap, spec.max_context, spec.vocab_size) == (0.0, 131072, 262208)
    assert len(spec.kv_groups()) == 2
    assert spec.num_parameters() == 3_880_263_168


def test_phi_4_mini_and_phi_3_mini() -> None:
    spec = spec_from_hf(PHI4_MINI)
    (rope,) = spec.ropes()
    sharpened = math.sqrt(1 + math.log(32) / math.log(4096))
    assert (rope.kind, rope.dim, rope.original_context) == ("longrope", 96, 4096)
    assert rope.attention_factor == pytest.approx(sharpened)
    assert (rope.freq_factors, rope.short_factors) == ((2.0,) * 48, (1.0,) * 48)
    assert set(kinds(spec, "window")) == {None}  # longer than the context
    assert (spec.max_context, spec.tie_embeddings, spec.norm_fp32) == (131072, True, False)
    small = spec_from_hf(PHI3_MINI_4K)
    assert set(kinds(small, "window")) == {2047}
    assert small.ropes() == (RopeSpec(1e4, 128),)


def test_olmo_2_7b() -> None:
    spec = spec_from_hf(OLMO2_7B)
    layer = spec.layers[0]
    assert (layer.pre_norm, layer.post_norm, layer.attention.qk_norm) == (False, True, "full")
    assert (spec.norm_fp32, spec.tie_embeddings, spec.max_context) == (True, False, 4096)
    assert spec.ropes() == (RopeSpec(5e5, 128),)
    assert spec.num_parameters() == 7_298_617_344


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (GEMMA_2B, {"hidden_activation": "silu"}, "the activation 'silu' .hidden_activation. is"),
        (GEMMA_2B, {"hidden_act": 1}, "the activation 1 .hidden_act. is not supported"),
        (GEMMA_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA2_27B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above"),
        (GEMMA2_27B, {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a number"),
        (GEMMA2_27B, {"final_logit_softcapping": "x"}, "final_logit_softcapping must be a number"),
        (GEMMA2_27B, {"hidden_activation": "gelu"}, "the activation 'gelu' .hidden_activation. is"),
        (GEMMA2_27B, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 46"),
        (GEMMA2_27B, {"sliding_window": 0}, "sliding_window must be a whole number from 1"),
        (GEMMA2_27B, {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        (GEMMA3_4B, {"text_config": 1}, "text_config must be an object"),
        (GEMMA3_4B, {"text_config": None}, "has no text_config, which a model of model_type"),
        (GEMMA3_4B, {"text_config": {}}, "text_config: has no num_hidden_layers"),
        (GEMMA3_4B, text(head_dim=0), "text_config: head_dim must be a whole"),
        (
            GEMMA3_4B,
            text(sliding_window_pattern=0),
            "sliding_window_pattern must be a whole number from 1",
        ),
        (
            GEMMA3_4B,
            text(rope_local_base_freq=1),
            "rope_local_base_freq must be a number above 1",
        ),
        (
            GEMMA3_4B,
            text(rope_scaling={"rope_type": "x"}),
            "text_config: rope_scaling: rope_type must be one of",
        ),
        (
            GEMMA3_4B,
            text(attn_logit_softcapping=50.0),
            "attn_logit_softcapping = 50.0 is not supported",
        ),
        (
            PHI4_MINI,
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": []}},
            "long_factor must be a list of 48 numbers above 0",
        ),
        (
            PHI4_MINI,
            {"rope_scaling": {"type": "su", "long_factor": [1] * 48, "short_factor": [0] * 48}},
            "short_factor must be a list of 48 numbers above 0",
        ),
        (OLMO2_7B, {"rms_norm_eps": 2}, "rms_norm_eps must be a number from 1e-20 to 1"),
        (OLMO2_7B, {"hidden_act": "gelu"}, "the activation 'gelu' .hidden_act. is not supported"),
        (PHI4_MINI, {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        (
            PHI4_MINI,
            {"rope_scaling": {"type": "ntk"}},
            "type must be one of default, dynamic, linear",
        ),
        (PHI4_MINI, {"hidden_act": "gelu"}, "the activation 'gelu' .hidden_act. is not supported"),
    ],
)
def test_wrong_values_are_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"^config\.json: .*({says})"):
        spec_from_hf(config | changes)


SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": None}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONGROPE |= {"short_factor": [1.1, 1.2], "long_factor": [2.0, 9.0]}
TINY: dict[str, PreTrainedConfig] = {
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(**SIZES, head_dim=16),
    "gemma3_text": Gemma3TextConfig(**SIZES, head_dim=16, rope_parameters=ROPES),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES, original_max_position_embeddings=16, rope_parameters=LONGROPE),
}
LAYER = {"o": "self_attn.o_proj", "down": "mlp.down_proj"}
APART = LAYER | {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
APART |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}
FOUR_NORMS = {"attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm"}
FOUR_NORMS |= {"mlp_norm": "pre_feedforward_layernorm"}
FOUR_NORMS |= {"mlp_post_norm": "post_feedforward_layernorm"}
HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
TWO_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
# Of a layer: our name → transformers', some with the rows that are ours.
WEIGHTS: dict[str, dict[str, Any]] = {
    "gemma": APART | TWO_NORMS,
    "gemma2": APART | FOUR_NORMS,
    "gemma3_text": APART | FOUR_NORMS | HEAD_NORMS,
    "olmo2": APART
    | HEAD_NORMS
    | {name: FOUR_NORMS[name] for name in ("attn_post_norm", "mlp_post_norm")},
    "phi3": LAYER
    | TWO_NORMS
    | {
        "q": ("self_attn.qkv_proj", slice(0, 32)),
        "k": ("self_attn.qkv_proj", slice(32, 48)),
        "v": ("self_attn.qkv_proj", slice(48, 64)),
        "gate": ("mlp.gate_up_proj", slice(0, 48)),
        "up": ("mlp.gate_up_proj", slice(48, 96)),
    },
}


def is_shifted(family: str, name: str) -> bool:
    return family.startswith("gemma") and name.endswith("norm")


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_weight_is_the_right_rows_of_the_right_tensor(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_config(TINY[family], dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    model.save_pretrained(tmp_path)
    spec, config = load_hf_config(tmp_path)
    source = SafetensorsWeights(tmp_path, spec, names_in_hf(config))
    check_weights(spec, source, "here")
    stored = {name: value.detach() for name, value in model.state_dict().items()}
    expected = {"embed": stored["model.embed_tokens.weight"]}
    expected["final_norm"] = stored["model.norm.weight"]
    if not spec.tie_embeddings:
        expected["head"] = stored["lm_head.weight"]
    for n in range(spec.num_layers):
        for name, theirs in WEIGHTS[family].items():
            tensor, rows = theirs if isinstance(theirs, tuple) else (theirs, slice(None))
            expected[f"layers.{n}.{name}"] = stored[f"model.layers.{n}.{tensor}.weight"][rows]
    assert set(expected) == set(spec.weight_shapes())
    for name, value in expected.items():
        wanted = value.float() + 1 if is_shifted(family, name) else value.float()
        assert torch.equal(read_tensor(source, name, torch.float32), wanted), name
        part = slice(1, 3)
        np.testing.assert_array_equal(source.floats(name, part), wanted[part].numpy())


def test_a_fused_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(TINY["phi3"]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"num_key_value_heads": 4}
    path.write_text(json.dumps(config))
    spec, _ = load_hf_config(tmp_path)
    source = SafetensorsWeights(tmp_path, spec, names_in_hf(config))
    with pytest.raises(ModelError, match=r"'layers\.0\.q' has shape \(0, 32\), but .* \(32, 32\)"):
        check_weights(spec, source, "here")


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("length", [16, 17, 64])
def test_angles_are_those_of_transformers(family: str, length: int) -> None:
    theirs = AutoModelForCausalLM.from_config(TINY[family]).model.rotary_emb
    spec = spec_from_hf(TINY[family].to_dict())
    positions, x = torch.arange(length)[None], torch.zeros(1)
    for layer in spec.layers:
        kind = "full_attention" if layer.attention.window is None else "sliding_attention"
        which = (kind,) if family == "gemma3_text" else ()
        for ours, other in zip(
            rope_tables(layer.attention.rope, length), theirs(x, positions, *which), strict=True
        ):
            half = other[0, :, : layer.attention.rope.dim // 2].numpy()
            # Of a frequency the last bit may differ: numpy and torch have powers of their own.
            last_bit = length * np.finfo(np.float32).eps
            np.testing.assert_allclose(ours, half, atol=2e-6 + last_bit, rtol=0)


# GGUF

GEMMA = make_spec(
    family="gemma2",
    vocab_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(32, None),
    rope=RopeSpec(10000.0, 16),
    norm_eps=2.0**-17,
    max_context=128,
    activation="gelu_tanh",
    post_norm=True,
    softcap=40.0,
    logit_softcap=20.0,
    tie_embeddings=True,
    embed_scale=8.0,
    norm_fp32=True,
)
PHI3 = changed(
    GEMMA,
    family="phi3",
    activation="silu",
    post_norm=False,
    softcap=0.0,
    logit_softcap=0.0,
    embed_scale=1.0,
    norm_fp32=False,
    windows=(None, None),
)


def edits(*given: Edit) -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        for one in given:
            one(writer)

    return edit


def of(family: str, **values: Any) -> Edit:
    return edits(*(setting(key.replace("__", "."), v, family) for key, v in values.items()))


GEMMA2_SETTINGS = of("gemma2", attn_logit_softcapping=40.0, final_logit_softcapping=20.0)
GEMMA2_WINDOW = of("gemma2", attention__sliding_window=32)


def test_a_gemma_file_is_read_back(tmp_path: Path) -> None:
    spec = changed(
        GEMMA,
        family="gemma",
        post_norm=False,
        softcap=0.0,
        logit_softcap=0.0,
        windows=(None, None),
    )
    file = write_model(tmp_path / "m.gguf", spec)
    assert spec_from_gguf(file) == spec
    check_weights(spec, GGUFWeights(file, spec), "here")


def test_a_gemma_2_file_is_read_back(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", GEMMA, edits(GEMMA2_SETTINGS, GEMMA2_WINDOW))
    assert spec_from_gguf(file) == GEMMA
    check_weights(GEMMA, GGUFWeights(file, GEMMA), "here")


def test_what_a_gemma_2_file_does_not_say_is_implied(tmp_path: Path) -> None:
    spec = spec_from_gguf(write_model(tmp_path / "m.gguf", GEMMA))
    assert spec == changed(GEMMA, softcap=50.0, logit_softcap=30.0, windows=(4096, None))


def test_the_scale_of_the_largest_gemma_2_is_known_by_its_layers(tmp_path: Path) -> None:
    spec = changed(GEMMA, head_dim=8, rope=RopeSpec(1e4, 8), windows=(4096, None) * 23)
    file = write_model(tmp_path / "m.gguf", spec, of("gemma2", attention__key_length=8))
    assert set(kinds(spec_from_gguf(file), "scale")) == {0.25}  # 64 / 4 heads, not 8


def test_a_gemma_3_file_has_two_ropes(tmp_path: Path) -> None:
    spec = changed(GEMMA, family="gemma3", qk_norm="head", windows=(32,) * 7)
    edit = of(
        "gemma3",
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
        attention__sliding_window=32,
    )
    found = spec_from_gguf(write_model(tmp_path / "m.gguf", spec, edit))
    assert kinds(found, "window") == [32] * 5 + [None, 32]
    assert found.ropes() == (RopeSpec(1e4, 16), RopeSpec(1e6, 16, "linear", 8.0, 128))
    assert (found.max_context, found.logit_softcap) == (128, 0.0)
    assert set(kinds(found, "softcap")) == {0.0}
    local = edits(edit, of("gemma3", rope__freq_base_swa=500.0))
    found = spec_from_gguf(write_model(tmp_path / "n.gguf", spec, local))
    assert found.ropes()[0] == RopeSpec(500.0, 16)


def factors(**tensors: list[float]) -> Edit:
    return edits(
        *(
            extra_tensor(f"rope_factors_{name}.weight", np.array(values, np.float32))
            for name, values in tensors.items()
        )
    )


def test_a_phi_3_file_is_read_back_with_its_fused_tensors(tmp_path: Path) -> None:
    edit = edits(
        of("phi3", rope__scaling__original_context_length=64, rope__scaling__attn_factor=1.25),
        of("phi3", rope__dimension_count=8, attention__sliding_window=128),
        factors(long=[1.0, 2.0, 3.0, 4.0], short=[1.0, 1.0, 1.0, 2.0]),
    )
    file = write_model(tmp_path / "m.gguf", PHI3, edit)
    rope = RopeSpec(
        1e4,
        8,
        "longrope",
        2.0,
        64,
        attention_factor=1.25,
        freq_factors=(1.0, 2.0, 3.0, 4.0),
        short_factors=(1.0, 1.0, 1.0, 2.0),
    )
    assert spec_from_gguf(file) == changed(PHI3, rope=rope)
    assert file.tensors["blk.0.attn_qkv.weight"].shape == (128, 64)
    check_weights(PHI3, GGUFWeights(file, PHI3), "here")


OLMO2 = changed(PHI3, family="olmo2", pre_norm=False, post_norm=True, qk_norm="full")
OLMO2 = changed(OLMO2, norm_fp32=True)


def test_an_olmo_2_file_is_read_back(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", OLMO2)
    assert spec_from_gguf(file) == OLMO2
    check_weights(OLMO2, GGUFWeights(file, OLMO2), "here")


@pytest.mark.parametrize(
    ("spec", "edit", "says"),
    [
        (GEMMA, of("gemma2", attn_logit_softcapping=-1.0), "attn_logit_softcapping must be a num"),
        (GEMMA, of("gemma2", final_logit_softcapping="x"), "final_logit_softcapping must be a num"),
        (
            GEMMA,
            of("gemma2", attention__sliding_window_pattern="x"),
            "sliding_window_pattern must be a whole number",
        ),
        (
            GEMMA,
            of("gemma2", attention__sliding_window_pattern=[True]),
            "sliding_window_pattern must be a list of 2 values, one for each layer",
        ),
        (GEMMA, of("gemma2", rope__freq_base_swa=0.5), "rope.freq_base_swa must be a number above"),
        (changed(GEMMA, family="gemma3"), of("gemma3"), "has no gemma3.rope.freq_base"),
        (
            changed(GEMMA, family="gemma3", qk_norm="head"),
            of("gemma3", rope__freq_base=1e6, attn_logit_softcapping=50.0),
            "gemma3.attn_logit_softcapping = 50.0 is not supported",
        ),
        (PHI3, factors(long=[1.0] * 8), "the tensor 'rope_factors_short.weight' is missing"),
        (
            PHI3,
            factors(short=[1.0] * 8, long=[1.0]),
            "rope_factors_long.weight must hold 8 numbers",
        ),
        (PHI3, factors(short=[-1.0] * 8, long=[1.0] * 8), "rope_factors_short.weight must hold 8"),
        (
            PHI3,
            of("phi3", attn_logit_softcapping=50.0),
            "phi3.attn_logit_softcapping = 50.0 is not",
        ),
    ],
)
def test_wrong_metadata_is_refused_by_name(
    tmp_path: Path, spec: ModelSpec, edit: Edit, says: str
) -> None:
    with pytest.raises(ModelError, match=rf"m\.gguf: .*({says})"):
        spec_from_gguf(write_model(tmp_path / "m.gguf", spec, edit))
