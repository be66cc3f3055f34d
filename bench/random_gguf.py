"""Writes a GGUF file of a Llama's shape with random blocks, in the type mixture Q4_K_M.

    python -m bench.random_gguf SHAPE FILE.gguf        a shape of bench/shapes, or a config.json
    python -m bench.gpu_parts FILE.gguf decode         its packed blocks on a GPU

Matrices are in Q4_K. The head, and the value and MLP down projections of the layers with more bits,
are in Q6_K. The same random blocks repeat, which does not change the speed of kernels. Needs the
package `gguf`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from bench.gpu_workloads import SHAPES

BLOCK = 256
SCALE = 2e-5  # of codes: weights are about 0.02
MOST_BLOCKS = 1 << 16  # that are drawn


def has_more_bits(layer: int, layers: int) -> bool:
    """Return True for layers with more bits in llama.cpp's mixture: the first and last eighth, and
    every third of the other layers."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def random_blocks(
    kind: Type, random: np.random.Generator, count: int, scale: float
) -> np.ndarray[Any, Any]:
    """Return random blocks [count, bytes of a block] with finite scales."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    if kind == Type.Q6_K:
        blocks[:, -2:] = _bytes(scale)
    else:
        blocks[:, :2] = _bytes(scale)
        blocks[:, 2:4] = _bytes(7.5 * scale)
    return blocks


def _bytes(value: float) -> np.ndarray[Any, Any]:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def matrices(config: dict[str, Any]) -> dict[str, tuple[int, int, Type]]:
    hidden, inner, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    vocab = config["vocab_size"]
    found = {"token_embd": (vocab, hidden, Type.Q4_K), "output": (vocab, hidden, Type.Q6_K)}
    for n in range(layers):
        more = Type.Q6_K if has_more_bits(n, layers) else Type.Q4_K
        own = {
            "attn_q": (heads * size, hidden, Type.Q4_K),
            "attn_k": (kv_heads * size, hidden, Type.Q4_K),
            "attn_v": (kv_heads * size, hidden, more),
            "attn_output": (hidden, heads * size, Type.Q4_K),
            "ffn_gate": (inner, hidden, Type.Q4_K),
            "ffn_up": (inner, hidden, Type.Q4_K),
            "ffn_down": (hidden, inner, more),
        }
        found |= {f"blk.{n}.{name}": sizes for name, sizes in own.items()}
    return found


def main(shape: str, path: str) -> None:
    source = Path(shape if shape.endswith(".json") else f"{SHAPES}/{shape}.json")
    write(json.loads(source.read_text()), path)


def write(config: dict[str, Any], path: str, scale: float = SCALE) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    known = [*map(chr, range(33, 127)), "ab"]
    others = [f"token_{n}" for n in range(len(known), config["vocab_size"])]
    writer.add_token_list(known + others)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    kinds = (Type.Q4_K, Type.Q6_K)
    drawn = {kind: random_blocks(kind, random, MOST_BLOCKS, scale) for kind in kinds}
    for name, (rows, columns, kind) in matrices(config).items():
        assert columns % BLOCK == 0, f"{name}: rows of {columns} are not of blocks of {BLOCK}"
        blocks = drawn[kind]
        data = np.resize(blocks, (rows, columns // BLOCK * blocks.shape[1]))
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    norms = ["output_norm", *(f"blk.{n}.{a}_norm" for n in range(layers) for a in ("attn", "ffn"))]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(config["hidden_size"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
