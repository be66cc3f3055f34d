"""A model that always generates the same text, with weights that map each token to the next.

    python -m tests.clients.reciting_model FOLDER TEXT

Programs that need a certain answer, such as a tool call, can run with the model. Embeddings are
unit vectors, the layers add zero, and the output head maps the vector of a token to the next token.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny import write_json

WIDTH, LENGTH = 512, 16384
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def reciting_folder(path: Path, text: str) -> Path:
    """Write a model to `path` that answers every prompt with `text`."""
    path.mkdir(parents=True, exist_ok=True)
    pieces = _pieces(text)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    tokenizer.save(str(path / "tokenizer.json"))
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    end, count = tokenizer.token_to_id("</s>"), tokenizer.get_vocab_size()
    assert count <= WIDTH, "the text has too many words"
    after = dict.fromkeys(range(count), ids[0]) | dict(zip(ids, [*ids[1:], end], strict=True))
    head = np.zeros((count, WIDTH), np.float32)
    for token, following in after.items():
        head[following, token] = 1.0
    layer = "model.layers.0."
    none = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH)}
    none |= {"self_attn.k_proj": (128, WIDTH), "self_attn.v_proj": (128, WIDTH)}
    none |= {f"mlp.{name}_proj": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    weights = {f"{layer}{name}.weight": np.zeros(shape, np.float32) for name, shape in none.items()}
    for name in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = np.ones(WIDTH, np.float32)
    weights["model.embed_tokens.weight"] = np.eye(count, WIDTH, dtype=np.float32)
    weights["lm_head.weight"] = head
    save_file(weights, path / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": count,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    write_json(path / "config.json", config)
    write_json(path / "generation_config.json", {"eos_token_id": end, "temperature": 0.01})
    names = {"eos_token": "</s>", "chat_template": TEMPLATE}
    write_json(path / "tokenizer_config.json", names)
    return path


def _pieces(text: str) -> list[str]:
    """Cut so that no piece comes twice: else it would not be known which one follows."""
    pieces: list[str] = []
    held = ""
    for word in re.findall(r"\s*\S+", text):
        held += word
        if held not in pieces and len(held) > 1:
            pieces.append(held)
            held = ""
    return [*pieces, held] if held else pieces


if __name__ == "__main__":
    print(reciting_folder(Path(sys.argv[1]), sys.argv[2]))
