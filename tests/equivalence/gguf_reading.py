"""A GGUF file as the `gguf` package reads it, run by transformers: nothing of ours is in it."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def as_the_package_reads(
    file: gguf.GGUFReader, config: PreTrainedConfig, reorder: bool = True
) -> PreTrainedModel:
    """transformers with the weights of the file, read and dequantised by the `gguf` package."""
    stored = {tensor.name: tensor for tensor in file.tensors}
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, _ in shapes.named_parameters():  # a tied head is named once, as the embedding
        tensor = stored.pop(gguf_name(name, config))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = heads_reordered(name, config) if reorder else 0
        if heads:
            values = halves_from_interleaved(values, heads)
        weights[name] = torch.from_numpy(values.astype(np.float32)) - norm_offset(name, config)
    assert all(name.startswith("rope_f") for name in stored)
    model = type(shapes).from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, attn_implementation="eager"
    )
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name])
    return model.eval()


def gguf_name(name: str, config: PreTrainedConfig) -> str:
    """By the package's own table of names."""
    names = _names(architecture(config), config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def architecture(config: PreTrainedConfig) -> str:
    own = {"gemma3_text": "gemma3", "olmo3": "olmo2", "cohere": "command-r", "glm": "chatglm"}
    own |= {"gpt_neox": "gptneox", "phi": "phi2", "gpt_oss": "gpt-oss"}
    own |= {"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2"}
    own |= {"ministral3": "mistral3"}
    own |= {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
    if config.model_type == "granitemoehybrid":  # without mamba layers
        return "granitemoe" if config.num_local_experts else "granite"
    return own.get(config.model_type, config.model_type)


def norm_offset(name: str, config: PreTrainedConfig) -> float:
    """Return the number that converters add to a weight: files of Gemma hold 1 + w of norms."""
    return float(config.model_type.startswith("gemma") and name.endswith("norm.weight"))


@cache
def _names(arch: str, num_layers: int) -> gguf.TensorNameMap:
    (number,) = (number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == arch)
    return gguf.get_tensor_name_map(number, num_layers)


def heads_reordered(name: str, config: PreTrainedConfig) -> int:
    """Return the heads of a weight whose rows converters of this architecture reorder, else 0."""
    kinds = ("llama", "smollm3", "granite", "granitemoe", "granitemoehybrid", "mixtral")
    kinds += ("ministral3",)
    if config.model_type not in kinds:
        return 0
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0


def halves_from_interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """In each head (0 3 1 4 2 5) → (0 1 2 3 4 5): rope's pairs, stored as neighbours, part."""
    split = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
