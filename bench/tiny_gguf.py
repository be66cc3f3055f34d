"""Writes a GGUF model with almost no computation, to measure the HTTP side of other servers.

    python -m bench.tiny_gguf tiny.gguf
    llama-server -m tiny.gguf -c 262144 -np 256 --threads-http 306 -t 1 --cache-ram 0 --port 8124
    python -m bench.capacity --url http://127.0.0.1:8124 --pid PID --streams 256

Every token is one printable character: one event a token, as `capacity.py` expects.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

HIDDEN, HEADS, INNER = 32, 4, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ"]  # a space and a line feed as BPE has them


def main(path: str) -> None:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output": (len(TOKENS), HIDDEN),
        **{f"blk.0.attn_{n}": (HIDDEN, HIDDEN) for n in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", 0.1 * random.standard_normal(shape, np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
