"""Byte-level vocabularies in GGUF headers, cut by every pre-tokenizer: against llama.cpp's answers.

`llama_cpp_tokens.json` is what `bench/peers/llama_tokenize.py` got from llama-server.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from bench.peers.llama_tokenize import DIGEST_CHARS, digest, header
from tests.model.hard_texts import hard_texts
from twostroke.errors import ModelError
from twostroke.model.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_of
from twostroke.model.tokenizer import Tokenizer

TEXTS = hard_texts()


@cache
def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (Path(__file__).parent / "llama_cpp_tokens.json").read_text(encoding="utf-8")
    )
    texts = hashlib.blake2b(json.dumps(TEXTS).encode(), digest_size=8).hexdigest()
    assert found["texts"] == texts, "other texts: run bench/peers/llama_tokenize.py again"
    return found


@cache
def tokenizer(pre: str) -> Tokenizer:
    vocabulary = header([merge.split(" ") for merge in stored()["merges"]])
    return Tokenizer.from_gguf(vocabulary | {"tokenizer.ggml.pre": pre})
