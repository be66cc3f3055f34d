"""Scales of key channels: large key biases do not cost an int8 KV cache its precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config

from tests.equivalence import test_families as families
from tests.equivalence.rows import Written, random_model, random_prompts, write_with_ours
from twostroke.kernels import cpu, packed
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import E4M3, INT8, quantised, w8_weight
from twostroke.model import native_decoder
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf
from twostroke.model.formats.key_scales import key_scales
from twostroke.model.formats.linear import DenseLinear, PackedLinear, StackedLinear, W8Linear
from twostroke.model.torch import load_layers
from twostroke.model.weights.safetensors import SafetensorsWeights

BIAS = 100.0  # of two channels that turn slowly, as in Qwen2.5-0.5B; the others' are about 1
KERNELS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(not cpu.available(), reason="not built")),
]
# Of int8 as the cache has it, on log-probabilities of a random model of two layers.
CLOSE = 0.15

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased")
    model = random_model(Qwen2Config(**families.SIZES | {"num_key_value_heads": 2}))
    _bias_keys(model)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def _bias_keys(model: PreTrainedModel) -> None:
    """Queries have little of the channels, as those of trained models: scores stay of one size."""
    dim = model.config.hidden_size // model.config.num_attention_heads
    pair = [dim // 2 - 1, dim - 1]
    for name, weight in model.named_parameters():
        if name.endswith("k_proj.bias"):
            weight.unflatten(0, (-1, dim))[:, pair] += BIAS
        elif "q_proj" in name:
            weight.unflatten(0, (-1, dim))[:, pair] *= 1 / BIAS


def write(folder: Path, **settings: Any) -> list[Written]:
    prompts = random_prompts((9, 40), families.VOCAB)
    exact = {"exact": True} if settings["kernels"] == "native" else {}
    return write_with_ours(folder, prompts, 8, families.VOCAB, **settings, **exact)


def prompt_error(folder: Path, kernels: str) -> float:
    """The mean difference between log-probabilities over a cache in int8 and over one in floats."""
    floats, narrow = (
        write(folder, kernels=kernels, kv_cache_dtype=dtype) for dtype in ("float16", "int8")
    )
    pairs = zip(floats, narrow, strict=True)
    errors = [(a.rows - b.rows)[: len(a.prompt) - 1].abs().mean() for a, b in pairs]
    return float(torch.stack(errors).mean())


def ones(*args: Any) -> Floats:
    return np.ones_like(key_scales(*args))


@pytest.mark.parametrize("kernels", KERNELS)
def test_large_key_biases_do_not_cost_the_other_channels_their_precision(
    biased: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = prompt_error(biased, kernels)
    for module in (load_layers, native_decoder):
        monkeypatch.setattr(module, "key_scales", ones)
    assert found < 0.25 * prompt_error(biased, kernels)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "olmo2", "gpt_neox", "phi", "gemma3_text"])
@pytest.mark.skipif(not cpu.available(), reason="not built")
def test_both_backends_keep_the_same_keys_in_int8(name: str, tmp_path: Path) -> None:
    """Norms over heads, over all heads, biases, norms with biases, and rope over some channels."""
    variant = next(one for one in families.VARIANTS if one.family.model_type == name)
    random_model(variant.described()).save_pretrained(tmp_path)
    reference, other = (
        write(tmp_path, kernels=kernels, kv_cache_dtype="int8")
        for kernels in ("reference", "native")
    )
    for one, two in zip(reference, other, strict=True):
        rows = slice(len(one.prompt) - 1)
        assert (one.rows[rows] - two.rows[rows]).abs().max() < CLOSE


def test_channels_that_rope_turns_together_have_one_scale(biased: Path) -> None:
    spec, config = load_hf_config(biased / "config.json")
    source = SafetensorsWeights(biased, spec, names_in_hf(config))
    part = spec.layers[0].attention
    half = part.head_dim // 2
    scales = key_scales(spec, source, 0)
    assert scales.shape == (part.num_kv_heads, part.head_dim)
    assert np.array_equal(scales[:, :half], scales[:, half:])
    assert (scales.argmax(axis=1) == half - 1).all()
    assert (scales.max(axis=1) > 10 * np.median(scales, axis=1)).all()


def _codes(rows: int, bits: int, offsets: bool) -> packed.Codes:
    codes = torch.randint(1 << bits, (rows, 64), dtype=torch.uint8)
    offset = torch.rand(rows, 2) if offsets else None
    return packed.Codes(bits, codes, 0.01 * torch.rand(rows, 2), None, offset)


def _linears(bias: torch.Tensor) -> dict[str, Any]:
    kernels, rows = Kernels(), len(bias)
    parts = [
        PackedLinear(packed.pack(_codes(rows // 2, bits, offsets)), own, kernels)
        for bits, offsets, own in zip((4, 8), (True, False), torch.chunk(bias, 2), strict=True)
    ]
    made = {
        "dense": DenseLinear(torch.randn(rows, 64), bias, kernels),
        "stacked": StackedLinear(parts, kernels),
    }
    for dtype in (E4M3, INT8):
        values, scale = quantised(torch.randn(rows, 64), dtype)
        weight = w8_weight(values, scale.unsqueeze(1))
        made[str(dtype)] = W8Linear(weight, bias, kernels, weight_only=True)
    return made


def test_rows_of_every_kind_of_weight_can_be_scaled() -> None:
    torch.manual_seed(0)
    bias, x = torch.zeros(12), torch.randn(3, 64)
    factors = torch.exp(torch.linspace(-4, 4, 12))
    for name, linear in _linears(bias).items():
        before = linear.product(x)
        linear.scale_rows(factors)
        expected = before * factors
        error = (linear.product(x) - expected).abs().amax(0) / expected.abs().amax(0)
        assert error.max() < 2e-3, name


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_weights_that_are_rounded_when_they_are_loaded_are_scaled_too(
    biased: Path, asked: str
) -> None:
    """The rounding comes first, so that a cache in int8 changes nothing but itself."""
    settings = {"kernels": "reference", "quantization": asked}
    floats, narrow = (
        write(biased, kv_cache_dtype=dtype, **settings) for dtype in ("float16", "int8")
    )
    for one, two in zip(floats, narrow, strict=True):
        rows = slice(len(one.prompt) - 1)
        assert (one.rows[rows] - two.rows[rows]).abs().mean() < CLOSE
