"""A GGUF model as the folder of safetensors that peers without GGUF can read, for bench/cpu.py.

    python -m bench.cpu_dequantise FOLDER [--model FILE.gguf] [--dtype float32|bfloat16]

Llama's family only. Weights and vocabulary are the file's own, read by twostroke's loader.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twostroke.config import EngineConfig
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.load import find_model, open_tokenizer
from twostroke.model.opened import open_model
from twostroke.model.weights.tensors import read_tensor

# Ours → Hugging Face's, within a layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def their_name(ours: str) -> str:
    if ours.startswith("layers."):
        _, number, part = ours.split(".")
        return f"model.layers.{number}.{LAYER_NAMES[part]}.weight"
    names = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    return names[ours] + ".weight"


def config_of(
    spec: ModelSpec, dtype: str, bos_id: int | None, eos_id: int | None
) -> dict[str, Any]:
    layer, same = spec.layers[0], len(set(spec.layers)) == 1
    part = layer.attention
    if spec.family != "llama" or not same or part.rope.kind != "none" or part.qkv_bias:
        raise SystemExit(f"only plain Llama shapes are written here, not {spec.family}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": part.num_heads,
        "num_key_value_heads": part.num_kv_heads,
        "head_dim": part.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": part.rope.theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a GGUF file instead of the default model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    settings = EngineConfig(model=args.model)
    files = find_model(settings)
    opened, tokenizer = open_model(settings, files, "cpu"), open_tokenizer(settings, files)
    assert tokenizer is not None
    args.folder.mkdir(parents=True, exist_ok=True)
    config = config_of(opened.spec, args.dtype, tokenizer.bos_id, tokenizer.eos_id)
    dtype = getattr(torch, args.dtype)
    weights = {
        their_name(name): read_tensor(opened.weights, name, dtype).contiguous()
        for name in opened.spec.weight_shapes()
    }
    save_file(weights, args.folder / "model.safetensors", {"format": "pt"})
    (args.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.folder / "tokenizer.json").write_text(tokenizer.to_json())
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    (args.folder / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
