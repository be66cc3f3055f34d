r"""Writes a GGUF file of a small mixture of experts with random weights for measurements.

    python -m bench.expert_gguf FILE.gguf [VOCABULARY.gguf]
    llama-server -m FILE.gguf -c 16384 -np 8 -t 2 --port 8124, or twostroke serve FILE.gguf
    twostroke bench serve --base-url URL --max-concurrency 8 --num-prompts 16 \
        --random-input-len 512 --random-output-len 64

Architecture qwen3moe: 12 layers of 32 experts of 512 channels, 8 a token, hidden 1,024; 0.7 billion
parameters, 0.3 billion of them active for a token. Matrices are in Q4_0, routers in F32. The
vocabulary is another file's, the default model's if none is given.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from bench.measure_check import model_file

ARCH, LAYERS, HIDDEN, EXPERTS, USED, INNER = "qwen3moe", 12, 1024, 32, 8, 512
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 64
VOCABULARY = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


def copy_vocabulary(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    for name in VOCABULARY:
        field = reader.fields.get(f"tokenizer.ggml.{name}")
        if field is None:
            continue
        value = field.contents()
        if isinstance(value, list):
            writer.add_array(field.name, value)
        elif isinstance(value, str):
            writer.add_string(field.name, value)
        else:
            writer.add_uint32(field.name, int(value))
    return len(reader.fields["tokenizer.ggml.tokens"].contents())


def matrices(vocab: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"token_embd": (vocab, HIDDEN), "output": (vocab, HIDDEN)}
    for n in range(LAYERS):
        own = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate_inp": (EXPERTS, HIDDEN),
            "ffn_gate_exps": (EXPERTS, INNER, HIDDEN),
            "ffn_up_exps": (EXPERTS, INNER, HIDDEN),
            "ffn_down_exps": (EXPERTS, HIDDEN, INNER),
        }
        found |= {f"blk.{n}.{name}": shape for name, shape in own.items()}
    return found


def norms() -> dict[str, int]:
    found = {"output_norm": HIDDEN}
    for n in range(LAYERS):
        found |= {f"blk.{n}.{name}": HIDDEN for name in ("attn_norm", "ffn_norm")}
        found |= {f"blk.{n}.{name}": HEAD_DIM for name in ("attn_q_norm", "attn_k_norm")}
    return found


def main(path: str, vocabulary: str = "") -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, ARCH)
    vocab = copy_vocabulary(gguf.GGUFReader(vocabulary or model_file(None)), writer)
    writer.add_vocab_size(vocab)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    for name, shape in matrices(vocab).items():
        weight = 0.03 * random.standard_normal(shape, np.float32)
        if name.endswith("gate_inp"):
            writer.add_tensor(f"{name}.weight", weight)
            continue
        packed = gguf.quants.quantize(weight, Type.Q4_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=Type.Q4_0)
    for name, size in norms().items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
