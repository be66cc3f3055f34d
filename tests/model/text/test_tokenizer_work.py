"""Tokenizers of foreign files whose work for a text has no bound run in a limited process."""

from __future__ import annotations

import contextlib
import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.model.text.cuts import GPT4O_CUT, LLAMA3_CUT, QWEN2_CUT, TEKKEN_CUT
from twostroke.errors import ModelError, RequestError
from twostroke.model.text.grammar_tokenizer import GrammarTokenizer
from twostroke.model.text.limited_encoder import OWN_USER
from twostroke.model.text.pre_tokenizers import PRE_TOKENIZERS, pre_tokenizer_of
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.model.text.tokenizer_work import SQUARE_CHARS, degree, unlimited_chars

SMALL = replace(OWN_USER, cpu_s=0.5, memory_bytes=256 * 1024**2)
LETTERS = {letter: n for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz▁Ġ �é<>")}
UNKNOWN = len(LETTERS)
BPE = {"type": "BPE", "vocab": LETTERS | {"?": UNKNOWN}, "merges": [], "unk_token": "?"}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def replacing(pattern: str, content: str, kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def in_sequences(step: dict[str, Any], key: str, depth: int) -> dict[str, Any]:
    return sequence(key, in_sequences(step, key, depth - 1)) if depth else step


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


def opened(tmp_path: Path, **sections: Any) -> Tokenizer:
    content = {"version": "1.0", "model": BPE, "added_tokens": []} | sections
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    tokenizer.encoder_limits = SMALL
    return tokenizer


# ── what is ordinary ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_the_vocabularies_of_gguf_headers_are_ordinary(name: str) -> None:
    kind = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizer_of(kind)
    if kind.nfc:
        backend.normalizer = tokenizers.normalizers.NFC()
    assert unlimited_chars(backend) is None


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"pre_tokenizer": BYTE_LEVEL | {"use_regex": True}},
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": BYTE_LEVEL},
        {
            "normalizer": sequence(
                "normalizers",
                {"type": "Prepend", "prepend": "▁"},
                replacing(" ", "▁", "String"),
            )
        },
        {"pre_tokenizer": sequence("pretokenizers", split(LLAMA3_CUT), BYTE_LEVEL)},
    ],
)
def test_the_tokenizers_of_known_models_are_ordinary(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    tokenizer = opened(tmp_path, **sections)
    assert tokenizer._unlimited_chars is None
    assert tokenizer.encode("a " * 10_000)
    assert "_limited_encoder" not in tokenizer.__dict__


@pytest.mark.parametrize(
    "pattern",
    [
        LLAMA3_CUT,
        GPT4O_CUT,
        QWEN2_CUT,
        TEKKEN_CUT,
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",  # a class in a class
        r"[0-9][0-9][0-9]",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r" {2,}",
        "",
    ],
)
def test_the_patterns_of_known_models_work_in_proportion_to_the_text(pattern: str) -> None:
    assert degree(pattern) == 1


@pytest.mark.parametrize(
    ("pattern", "power"),
    [
        ("a*b", 2),
        (r"\s+$", 2),
        (r"\s+(?!\S)", 2),  # without `\s+`, nothing takes the run that it leaves
        ("a{0,1000}b", 2),
        ("a{1000,}", 2),
        ("a+?b", 2),
        ("a+a+b", 3),
        ("[^a]*a[^a]*b", 3),
        ("(a+)+b", None),
        ("(?:a|aa)+b", None),
        ("(a|b){9}c", None),
        ("a(?=b*c)", None),
        ("(?=(a+))x", None),
        ("(?<=a+)b", None),
        (r"(a)\1", None),
        (r"(?<n>a|b\g<n>c)", None),
        ("(?~ab)c", None),
        ("a?" * 9 + "b", None),
        ("(", None),
    ],
)
def test_patterns_that_read_letters_again_and_again_are_noticed(
    pattern: str, power: int | None
) -> None:
    assert degree(pattern) == power


# ── attacks ─────────────────────────────────────────────────────────────────────────────────

CHARSMAP = b64encode((4 * 256).to_bytes(4, "little") + bytes(4 * 256) + b"r" * 60 + b"\0").decode()
WORD_PIECE = {
    "type": "WordPiece",
    "vocab": LETTERS | {"[UNK]": UNKNOWN},
    "unk_token": "[UNK]",
    "continuing_subword_prefix": "##",
    "max_input_chars_per_word": 10**9,
}
LONG_PIECES = [["<unk>", 0.0], *(["a" * n, -1.0] for n in range(1, 2000))]
ATTACKS: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": replacing("q*q", "q")}, "q" * 200_000),
    ({"normalizer": replacing("a*b", "b")}, "a" * 200_000 + "cb"),
    ({"normalizer": replacing("a*a*b", "b")}, "a" * 3000 + "cb"),
    ({"normalizer": in_sequences(replacing("a*a*b", "b"), "normalizers", 5)}, "a" * 3000 + "cb"),
    ({"normalizer": replacing("q", "r" * 60)}, "q" * 2_000_000),
    ({"normalizer": replacing("", "r" * 60)}, "q" * 2_000_000),
    (
        {"normalizer": sequence("normalizers", {"type": "NFKC"}, replacing(".", "rrr"))},
        "\ufdfa" * 1_000_000,
    ),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "q" * 2_000_000),
    ({"normalizer": sequence("normalizers", *[BYTE_LEVEL] * 4)}, "é" * 2_000_000),
    ({"pre_tokenizer": sequence("pretokenizers", *[BYTE_LEVEL] * 60)}, "é" * 100),
    ({"pre_tokenizer": split("(a+)+$")}, "a" * 60 + "b"),
    ({"pre_tokenizer": split("(?=(a|aa)+$)x")}, "a" * 60 + "b"),
    ({"pre_tokenizer": split("(?=.*.*.*.*x)y")}, "a" * 3000),
    ({"pre_tokenizer": split("(?:a+a+)+b")}, "a" * 3000 + "cb"),
    ({"pre_tokenizer": in_sequences(split("a+a+b"), "pretokenizers", 5)}, "a" * 3000 + "cb"),
    ({"pre_tokenizer": split(r"(?<!\S)(\s|\s\s)*$")}, " " * 60 + "b"),
    ({"model": WORD_PIECE}, "a" * 100_000),
    ({"model": BPE | {"continuing_subword_prefix": "#" * 10_000}}, "a" * 1_000_000),
    ({"model": {"type": "Unigram", "vocab": LONG_PIECES, "unk_id": 0}}, "a" * 500_000),
]


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_a_tokenizer_that_works_without_a_bound_is_stopped_while_it_runs(
    tmp_path: Path, number: int
) -> None:
    sections, text = ATTACKS[number]
    try:
        tokenizer = opened(tmp_path, **sections)
    except ModelError:
        return  # refused at load
    limit = tokenizer._unlimited_chars
    assert limit is not None
    assert limit < len(text), "it would run in this process"
    with contextlib.suppress(RequestError):  # the limits may suffice on a fast machine
        tokenizer.encode(text)
    assert tokenizer.encode("a") != [], "the next text is read"
    tokenizer.close()


def test_a_text_beyond_the_limits_is_refused_with_the_limit(
    tmp_path: Path,
) -> None:
    tokenizer = opened(tmp_path, pre_tokenizer=split("a*b"))
    assert tokenizer.encode("a" * SQUARE_CHARS) == [0] * SQUARE_CHARS
    assert "_limited_encoder" not in tokenizer.__dict__
    with pytest.raises(RequestError, match=r"takes longer than 0\.5 s of CPU time"):
        tokenizer.encode("a" * 200_000 + "cb")  # the matcher looks for a "b" first
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        tokenizer.encode("\ud800" * 2 * SQUARE_CHARS)
    tokenizer.close()


def test_tokens_without_number_are_refused(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, normalizer=replacing("[q-q]", "r" * 60))
    tokenizer.encoder_limits = OWN_USER
    with pytest.raises(RequestError, match="makes 1200000 tokens of 20000 characters"):
        tokenizer.encode("q" * 20_000)
    tokenizer.close()


def test_the_limited_process_gives_the_same_ids(tmp_path: Path) -> None:
    texts = ["a", "ab aab b<x>a", "é" * 10, "", "b" * 5000]
    added: dict[str, Any] = {"id": UNKNOWN + 1, "content": "<x>", "special": True}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = opened(tmp_path, pre_tokenizer=split("(?=(a))(a+)b"), added_tokens=[added])
    assert tokenizer._unlimited_chars == 0
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in texts:
        assert tokenizer.encode(text) == own.encode(text).ids
    tokenizer.close()


def test_a_grammar_does_not_run_such_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = opened(
        tmp_path,
        pre_tokenizer=sequence("pretokenizers", split("(a+)+$"), BYTE_LEVEL),
        decoder=BYTE_LEVEL,
    )
    ours = GrammarTokenizer(tokenizer.to_json(), [1])
    ours.longest_first = lambda text: [len(text)]
    assert ours("a" * 60 + "b") == [61]


def refused(**sections: Any) -> Callable[[Path], None]:
    return lambda tmp_path: opened(tmp_path, **sections).close()


@pytest.mark.parametrize(
    ("open_it", "says"),
    [
        (refused(decoder=replacing("a+b", "b")), "pattern whose work is in proportion"),
        (
            refused(decoder=sequence("decoders", replacing("a+a+b", "b"))),
            "pattern whose work is in proportion",
        ),
        (
            refused(decoder=sequence("decoders", *[replacing("a", "aa", "String")] * 7)),
            "makes more than 64 times its length",
        ),
        (
            refused(model=BPE | {"vocab": LETTERS | {"?": UNKNOWN, "a" * 100_000: 50}}),
            "tokens of at most 16384 characters",
        ),
        (
            refused(model={"type": "Unigram", "vocab": [["a" * 100_000, 0.0]], "unk_id": 0}),
            "tokens of at most 16384 characters",
        ),
        (
            refused(
                normalizer=replacing("a+a+b", "b"),
                added_tokens=[{"id": 50, "content": "a" * 3000, "normalized": True}],
            ),
            "may take hours for the added tokens",
        ),
        (
            refused(pre_tokenizer=sequence("pretokenizers", *[BYTE_LEVEL] * 65)),
            "has more than 64 steps",
        ),
    ],
)
def test_a_file_whose_work_outside_of_that_process_has_no_bound_is_refused(
    tmp_path: Path, open_it: Callable[[Path], None], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        open_it(tmp_path)


def test_ids_with_endless_texts_are_not_decoded(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, model=BPE | {"vocab": LETTERS | {"?": UNKNOWN, "a" * 16_000: 50}})
    assert len(tokenizer.decode([50])) == 16_000
    assert len(tokenizer.decode([0] * 5000)) >= 5000
    with pytest.raises(RequestError, match="at most 67,108,864 are decoded at once"):
        tokenizer.decode([50] * 5000)
