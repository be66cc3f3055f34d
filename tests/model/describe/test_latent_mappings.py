"""Configs with latent attention → the spec, and what is refused; and what its cache takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV3Config, MiniCPM3Config

from twostroke import LLM, SamplingParams
from twostroke.engine import build
from twostroke.errors import ModelError
from twostroke.exec.native import NativeExecutor
from twostroke.kernels import cpu
from twostroke.measure.roofline.hardware import HARDWARE
from twostroke.measure.roofline.roofline import Roofline, Settings
from twostroke.measure.roofline.roofline_report import facts
from twostroke.model.describe.cost import cost_model, dense_weight_bytes
from twostroke.model.describe.hf_config import spec_from_hf
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.native_decoder import Packing
from twostroke.model.weights.dummy import DummyWeights
from twostroke.plan import PhaseWork

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32, "beta_slow": 1}
# As published, but that all layers are dense.
V3: dict[str, Any] = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168}
V3 |= {"intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
V3 |= {"num_key_value_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 61}
V3 |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
V3 |= {"v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu"}
V3 |= {"max_position_embeddings": 163840}
V3 |= {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
LITE = V3 | {"model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048}
LITE |= {"intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16}
LITE |= {"num_key_value_heads": 16, "n_routed_experts": 64, "first_k_dense_replace": 27}
LITE |= {"q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}


def test_deepseek_v3() -> None:
    spec = spec_from_hf(V3)
    part = spec.layers[0].attention
    assert part.latent is not None
    assert (part.num_heads, part.head_dim, part.nope_dim, part.value_dim) == (128, 192, 128, 128)
    assert (part.latent.q_lora_rank, part.latent.kv_lora_rank, part.rope.dim) == (1536, 512, 64)
    mscale = 0.1 * math.log(40) + 1
    assert part.scale == pytest.approx(192**-0.5 * mscale**2)
    assert (part.rope.attention_factor, spec.max_context) == (1.0, 163840)
    assert spec.kv_elements_per_token == 61 * (512 + 64)
    assert spec.expanded_kv_elements_per_token == 61 * 128 * (192 + 128)


def test_deepseek_v2_lite_projects_queries_directly() -> None:
    spec = spec_from_hf(LITE)
    shapes = spec.layers[0].weight_shapes(2048)
    assert shapes["q"] == (16 * 192, 2048)
    assert shapes["kv_a"] == (576, 2048)
    assert shapes["kv_b"] == (16 * 256, 512)
    assert shapes["o"] == (2048, 16 * 128)
    assert not {"q_a", "q_b", "k", "v"} & shapes.keys()
    factor = 0.1 * 0.707 * math.log(40) + 1
    assert spec.layers[0].attention.scale == pytest.approx(192**-0.5 * factor**2)


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV2Config(),
        DeepseekV3Config(),
        MiniCPM3Config(),
    ],
    ids=lambda config: config.model_type,
)
def test_the_usual_sizes_of_a_family_have_the_parameters_of_transformers(config: Any) -> None:
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in theirs.parameters())
    # Which transformers does not count as parameters.
    corrections = [one for name, one in theirs.named_buffers() if "correction" in name]
    count += sum(one.numel() for one in corrections)
    assert spec_from_hf(config.to_dict()).num_parameters() == count


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"first_k_dense_replace": 3, "n_group": 7}, "n_group"),
        ({"first_k_dense_replace": 3, "model_type": "deepseek_v2", "mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"qk_rope_head_dim": 63}, "63"),
        ({"v_head_dim": "wide"}, "v_head_dim"),
        ({"q_lora_rank": -1}, "q_lora_rank"),
        ({"model_type": "llama", "n_routed_experts": 0}, "kv_lora_rank"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec_from_hf(V3 | changes)


def test_a_model_without_routed_experts_is_dense() -> None:
    spec = spec_from_hf(V3 | {"n_routed_experts": None, "first_k_dense_replace": 3})
    assert spec.layers[60].mlp.intermediate_size == 18432


# ── what it takes ───────────────────────────────────────────────────────────────────────────


def test_a_roofline_tells_the_bytes_of_latents_beside_those_of_heads() -> None:
    found = Roofline(spec_from_hf(V3), HARDWARE["A100"], Settings())
    assert found.kv_bytes_per_token == 70_272
    told = "\n".join(facts(found))
    assert "KV cache: 70,272 bytes a token" in told
    assert "keys and values of all heads would take 4,997,120" in told
    assert found.as_json()["expanded_kv_bytes_per_token"] == 4_997_120


def test_each_phase_is_counted_in_its_own_form() -> None:
    spec = spec_from_hf(LITE)
    cost = cost_model(spec, dense_weight_bytes(spec, 2), 2)
    one = PhaseWork(1, 1, 1000, 1000)
    rest = cost.flops_per_token + cost.flops_per_sample
    decoded = 27 * 16 * 1000 * 2 * (512 + 64 + 512)
    assert cost.decode_flops(one) == pytest.approx(rest + decoded)
    prefilled = 27 * 16 * 1000 * 2 * (192 + 128)
    expanded = 27 * 999 * 2 * 512 * 16 * 256  # the positions before the chunk
    assert cost.prefill_flops(one, 1) == pytest.approx(rest + prefilled + expanded)


SMALL = LITE | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 24}
SMALL |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def open_small(folder: Path, **settings: Any) -> LLM:
    fixed = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 64}
    return LLM(model=str(folder), device="cpu", num_gpu_blocks_override=9, **fixed | settings)


NATIVE = pytest.param(
    "native", 2, marks=pytest.mark.skipif(not cpu.available(), reason="no native kernels")
)


@pytest.mark.parametrize(("kernels", "size"), [NATIVE, ("reference", 4)])
def test_the_start_tells_what_a_token_takes(
    folder: Path, caplog: pytest.LogCaptureFixture, kernels: str, size: int
) -> None:
    caplog.set_level("INFO")
    llm = open_small(folder, block_size=16, kernels=kernels)
    spec: ModelSpec = llm.engine.spec
    each = 2 * (24 + 8) * size  # layers × (latent + rope key) × bytes
    assert f"KV cache: latents, {each} bytes a token" in caplog.text
    assert f"all heads would take {2 * 4 * (20 + 10) * size:,}" in caplog.text
    assert llm.engine.memory.kv_bytes == 10 * 16 * size * spec.kv_elements_per_token == 160 * each


@pytest.mark.skipif(not cpu.available(), reason="no native kernels")
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_without_torch_the_native_kernels_compute_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    monkeypatch.setattr(build, "has_torch", lambda: False)
    llm = open_small(folder, quantization=quantization)
    executor = llm.engine.core._executor
    assert isinstance(executor, NativeExecutor)
    assert [pool.shape for pool in executor._caches] == [(10, 2, 1, 1, 16, 32)]
    out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(out[0].outputs[0].token_ids) == 3


@pytest.mark.skipif(not cpu.available(), reason="no native kernels")
def test_kv_b_is_kept_in_two_forms_and_never_rounded() -> None:
    """The two phases read it in two orders, and roundings of the two would differ."""
    spec = spec_from_hf(LITE | {"num_hidden_layers": 1, "first_k_dense_replace": 1})
    packing = Packing(spec, DummyWeights(spec), "float32", "int8")
    assert packing.format(["layers.0.q", "layers.0.kv_a"]) == "q8"
    assert packing.format(["layers.0.kv_b"]) == packing.transposed_format("layers.0.kv_b") == "f32"
    sizes = packing.weight_bytes()
    assert sizes["layers.0.kv_b"] == 16 * 512 * 4 * (128 + 128 + 128)
    assert sizes.keys() == {name for name, shape in spec.weight_shapes().items() if len(shape) == 2}
