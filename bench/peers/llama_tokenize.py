"""What llama.cpp's own tokenizer makes of hard texts, for each pre-tokenizer that we read.

    python -m bench.peers.llama_tokenize PATH/TO/llama-server

A vocabulary is trained on `tests/model/text/hard_texts.py` with no cut at all, so that its merges
reach over every cut that a pre-tokenizer could make: where one is made shows in the ids. A tiny
model with that vocabulary and each name in `tokenizer.ggml.pre` is given to llama-server, and what
its /tokenize answers is written to `tests/model/text/llama_cpp_tokens.json`: the vocabulary, and
for each name (together, if they are alike) a digest of each text's ids, which
`tests/model/text/test_pre_tokenizers.py` compares with ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from tests.model.text.hard_texts import hard_texts
from twostroke.model.text.pre_tokenizers import PRE_TOKENIZERS

RESULT = Path(__file__).parents[2] / "tests/model/text/llama_cpp_tokens.json"
PORT = 18_571
START_S = 60
DIGEST_CHARS = 4  # of base64: one text in 16 million passes by chance


def digest(ids: list[int]) -> str:
    raw = hashlib.blake2b(json.dumps(ids).encode(), digest_size=3).digest()
    return base64.b64encode(raw).decode()[:DIGEST_CHARS]


def train() -> dict[str, Any]:
    """The header of a vocabulary whose merges know no words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(hard_texts(), trainer)
    return header(json.loads(tokenizer.to_str())["model"]["merges"])


def header(merges: list[list[str]]) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(dict.fromkeys(["<|end|>", *alphabet, *("".join(pair) for pair in merges)]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_model(path: Path, vocabulary: dict[str, Any], pre: str) -> None:
    hidden, inner, heads = 32, 32, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"])
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {"token_embd": (len(vocabulary["tokenizer.ggml.tokens"]), hidden)}
    shapes |= {f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (inner, hidden) for part in ("gate", "up", "down")}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ask(route: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{route}", data)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def tokens_of(server: str, path: Path, texts: list[str]) -> list[list[int]]:
    command = [server, "-m", str(path), "--port", str(PORT), "-c", "64", "--no-warmup", "-t", "1"]
    log = path.with_suffix(".log")
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    ask("/health")
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(log.read_text(errors="replace")[-2000:]) from None
                    time.sleep(0.05)
            return [
                ask("/tokenize", {"content": t, "parse_special": False})["tokens"] for t in texts
            ]
        finally:
            process.kill()


def main() -> None:
    server = sys.argv[1]
    version = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    texts, vocabulary = hard_texts(), train()
    alike: dict[str, list[str]] = {}  # digests of all texts' ids → the names that give them
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            path = Path(folder) / "model.gguf"
            write_model(path, vocabulary, pre)
            try:
                ids = tokens_of(server, path, texts)
            except RuntimeError as error:
                print(f"{pre}: {str(error)[-300:]}")
                continue
            alike.setdefault("".join(map(digest, ids)), []).append(pre)
            print(pre, sum(map(len, ids)), flush=True)
    result = {
        "of": (version.stdout + version.stderr).split("\n")[0],
        "texts": hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest(),
        "merges": vocabulary["tokenizer.ggml.merges"],
        "tokens": [{"pre": names, "digests": digests} for digests, names in alike.items()],
    }
    RESULT.write_text(json.dumps(result, ensure_ascii=True, indent=0) + "\n")


if __name__ == "__main__":
    main()
