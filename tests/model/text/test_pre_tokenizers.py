"""Byte-level vocabularies in GGUF headers, cut by every pre-tokenizer: against llama.cpp's answers.

`llama_cpp_tokens.json` is what `bench/peers/llama_tokenize.py` got from llama-server. Where a
model's own tokenizer is known to cut in another way than llama.cpp does, ours is the model's
(`bench/peers/own_tokenizers.py`), and the texts that show it are named here.
"""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.peers.llama_tokenize import DIGEST_CHARS, digest, header
from tests.model.text.hard_texts import hard_texts
from twostroke.errors import ModelError
from twostroke.model.text.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_of
from twostroke.model.text.tokenizer import Tokenizer

TEXTS = hard_texts()


def has(*categories: str) -> Callable[[str], bool]:
    return lambda text: any(unicodedata.category(sign).startswith(categories) for sign in text)


def is_not_composed(text: str) -> bool:
    """Qwen's tokenizers compose characters first."""
    return unicodedata.normalize("NFC", text) != text


def has_other_digits(text: str) -> bool:
    r"""`\d` is any script's digit."""
    return any(unicodedata.category(sign) == "Nd" and not sign.isascii() for sign in text)


def has_wide_blank(text: str) -> bool:
    """DeepSeek's ranges of wide scripts have some of Unicode's blanks in them, too."""
    return any(sign.isspace() and "\u0800" <= sign <= "\u4e00" for sign in text)


def has_marks_or_foreign_cases(text: str) -> bool:
    """Letters take their marks along and have cases in all scripts; in llama.cpp only in ASCII."""
    return has("M", "Lt", "Lm")(text) or any(
        unicodedata.category(sign) in ("Lu", "Ll") and not sign.isascii() for sign in text
    )


def is_cased(text: str) -> bool:
    """A small letter before a capital one, which llama.cpp does not part in these."""
    return has_marks_or_foreign_cases(text) or any(
        one.islower() and other.isupper() for one, other in pairwise(text)
    )


# Texts in which llama.cpp's cut is known to be another than the model's.
EXPLAINED: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35"), is_not_composed),
    "superbpe": has_other_digits,
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), has_wide_blank),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie"), has_marks_or_foreign_cases),
    **dict.fromkeys(("minimax-m2", "tekken"), has_marks_or_foreign_cases),
    **dict.fromkeys(("kimi-k2", "youtu"), is_cased),
}


@cache
def stored() -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The header of the vocabulary, and for each name the digests of all texts' ids."""
    path = Path(__file__).parent / "llama_cpp_tokens.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    texts = hashlib.blake2b(json.dumps(TEXTS).encode(), digest_size=8).hexdigest()
    assert found["texts"] == texts, "other texts: run bench/peers/llama_tokenize.py again"
    digests = {
        pre: [
            one["digests"][n : n + DIGEST_CHARS]
            for n in range(0, len(one["digests"]), DIGEST_CHARS)
        ]
        for one in found["tokens"]
        for pre in one["pre"]
    }
    return header([merge.split(" ") for merge in found["merges"]]), digests


@cache
def tokenizer(pre: str) -> Tokenizer:
    return Tokenizer.from_gguf(stored()[0] | {"tokenizer.ggml.pre": pre})


def texts_that_differ(pre: str, as_if: str) -> list[str]:
    expected = stored()[1][as_if]
    assert len(expected) == len(TEXTS) == 600
    found = (digest(tokenizer(pre).encode(text, add_special_tokens=False)) for text in TEXTS)
    return [t for t, one, other in zip(TEXTS, found, expected, strict=True) if one != other]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(pre: str) -> None:
    explained = EXPLAINED.get(pre, lambda text: False)
    assert [text for text in texts_that_differ(pre, pre) if not explained(text)] == []
    assert sum(not explained(text) for text in TEXTS) >= 350


def test_another_pre_tokenizer_is_told_apart() -> None:
    """Negative control: kinds that differ in a single sign or in how digits are grouped."""
    for one, other in (
        ("falcon", "default"),
        ("qwen2", "llama-bpe"),
        ("deepseek-coder", "deepseek-llm"),
        ("seed-coder", "stablelm2"),
        ("viking", "bloom"),
    ):
        assert len(texts_that_differ(one, other)) >= 2, (one, other)


@pytest.mark.parametrize(
    ("pre", "begins"), [("tekken", True), ("chameleon", True), ("glm4", False)]
)
def test_a_text_begins_with_bos_where_the_model_has_it_so(pre: str, begins: bool) -> None:
    vocabulary = dict(stored()[0]) | {"tokenizer.ggml.pre": pre}
    del vocabulary["tokenizer.ggml.add_bos_token"]
    ids = Tokenizer.from_gguf(vocabulary).encode("hello")
    assert (ids[0] == 0) is begins


def test_long_runs_take_the_time_of_their_length() -> None:
    """Digits that are looked ahead from at every place, as others do, take minutes here."""
    for pre in ("superbpe", "exaone-moe", "deepseek-v3", "gpt-4o", "kimi-k2"):
        cut = pre_tokenizer_of(PRE_TOKENIZERS[pre])
        start = time.monotonic()
        for text in ("1" * 100_000 + "x", " " * 20_000 + "x", "A" * 20_000):
            assert len(text) == sum(end - begin for _, (begin, end) in cut.pre_tokenize_str(text))
        assert time.monotonic() - start < 60, pre


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "gemma4", "no_vocab"])
def test_other_kinds_of_vocabularies_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"a vocabulary of the kind '{kind}'.*--tokenizer"):
        Tokenizer.from_gguf(stored()[0] | {"tokenizer.ggml.model": kind})


@pytest.mark.parametrize("pre", ["tiny_aya", "jais-2", "whitespace", "new-one"])
def test_other_pre_tokenizers_are_refused_by_name(pre: str) -> None:
    with pytest.raises(ModelError, match=rf"names the pre-tokenizer '{pre}'.*Supported: a\.x-4\.0"):
        Tokenizer.from_gguf(stored()[0] | {"tokenizer.ggml.pre": pre})
