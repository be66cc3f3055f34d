"""Tiny folders in the layouts of quantised checkpoints, beside twins of what their numbers stand
for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import CONFIG, tiny_folder, tiny_llm, write_json
from twostroke import SamplingParams
from twostroke.errors import ConfigError, ModelError
from twostroke.model.describe.hf_config import load_hf_config, names_in_hf, quantized_in_hf
from twostroke.model.weights.safetensors import SafetensorsWeights

REFERENCE = {"device": "cpu", "kernels": "reference"}
FEW = [5, 6, 7, 8, 9, 10, 11, 12]  # tokens
SAME = 2e-5  # of log-probabilities
# Biases; several weights in one tensor; rows that are put in another order.
OTHER_PLACES: list[dict[str, Any]] = [
    {"model_type": "qwen2"},
    {"model_type": "phi3"},
    {"model_type": "glm", "head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5},
]
DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}

# A weight's name and numbers → the tensors in its place, and what they stand for.
Quantise = Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]


def compressed(strategy: str, activations: Any = DYNAMIC, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    kind = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    kind |= {"strategy": strategy, "group_size": None, "block_structure": None, **weights}
    group = {"weights": kind, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "quantization_status": "compressed",
    }


def two_kinds(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    groups = {**one["config_groups"], "group_1": other["config_groups"]["group_0"]}
    return one | {"config_groups": groups}


def folder_and_twin(
    path: Path, said: dict[str, Any], quantise: Quantise, left: str = "lm_head", **config: Any
) -> tuple[Path, Path]:
    """`left`: which matrices are not quantised."""
    twin = tiny_folder(path / "twin", **config)
    folder = tiny_folder(path / "quantised", **config, quantization_config=said)
    tensors, dense = load_file(twin / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("proj.weight") and left not in n]:
        stored, dense[name] = quantise(name, tensors.pop(name).float())
        tensors |= stored
    save_file(tensors, folder / "model.safetensors")
    save_file(load_file(twin / "model.safetensors") | dense, twin / "model.safetensors")
    return folder, twin


def opened(folder: Path) -> SafetensorsWeights:
    spec, settings = load_hf_config(folder)
    quantized = quantized_in_hf(settings, "config.json")
    return SafetensorsWeights(folder, spec, names_in_hf(settings), quantized)


def logprobs(folder: Path, prompt: list[int], **settings: Any) -> np.ndarray:
    llm = tiny_llm(folder, **settings)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=5, prompt_logprobs=5)
    output = llm.generate([prompt], params)[0]
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([sorted((p.logprob for p in row.values()), reverse=True)[:5] for row in rows])


def gap(folder: Path, other: Path, prompt: list[int] = FEW, **settings: Any) -> np.ndarray:
    """Between two folders' log-probabilities, on the reference kernels."""
    how = {**REFERENCE, **settings}
    return np.abs(logprobs(folder, prompt, **how) - logprobs(other, prompt, **how))


def assert_native_kernels_take_it_dequantised(folder: Path, twin: Path, weights: str) -> None:
    ours, its = (logprobs(path, FEW, device="cpu", exact=True) for path in (folder, twin))
    assert np.abs(ours - its).max() < SAME
    assert tiny_llm(folder, device="cpu").engine.info().weights == weights


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises((ModelError, ConfigError)) as caught:
        tiny_llm(folder, **{**REFERENCE, **settings})
    return str(caught.value)


def assert_config_is_refused(folder: Path, said: Any, named: str) -> None:
    write_json(folder / "config.json", CONFIG | {"quantization_config": said})
    with pytest.raises(ModelError) as caught:
        load_hf_config(folder)
    assert named in str(caught.value)
    assert "quantization_config" in str(caught.value)


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
