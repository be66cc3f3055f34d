"""`read_backend`: reads a tokenizer.json, after checks that bound the library's work.

The library does not check its input: an id of 10⁹ becomes a table of 10⁹ entries, and a chain of
replacements that each write a letter a hundred times turns a word into a gigabyte. A tokenizer that
passes these checks and may still take long for a text runs in a limited process
(`tokenizer_work.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from twostroke.errors import ModelError
from twostroke.model.describe.spec import VOCABULARY
from twostroke.model.fields import MAX_JSON_BYTES, Fields, shown
from twostroke.model.text.replaced_patterns import is_bounded, may_match_nothing
from twostroke.model.text.sentencepiece_charsmap import longest_in_charsmap
from twostroke.model.text.tokenizer_work import degree, normalizer_degree

ADVICE: Final = "Fetch the file again, or give another one with --tokenizer FOLDER."
MAX_STEPS: Final = 64  # of a section
MAX_TOKEN_CHARS: Final = 1 << 14
MAX_LOAD_WORK: Final = 10**8  # tries of the normalizer's patterns on the texts of added tokens
MAX_INSERTED_CHARS: Final = 64  # that a step may insert for a match
MAX_PATTERN_CHARS: Final = 1 << 14
MAX_GROWTH: Final = 64  # factor of a text's length, through all steps
MAX_SURROUNDING_TOKENS: Final = 1024  # around a prompt
MAX_GAPS: Final = 1 << 16  # unused ids, in addition to the number of tokens

PARTS: tuple[str, ...] = ("version", "truncation", "padding", "normalizer", "pre_tokenizer")
PARTS += ("post_processor", "decoder", "added_tokens", "model")
_EMPTY: Final[dict[str, Any]] = dict.fromkeys(PARTS) | {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


def read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        data = path.read_bytes()
        if len(data) > MAX_JSON_BYTES:
            raise ModelError(f"{path}: has more than {MAX_JSON_BYTES} bytes. {ADVICE}")
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as a tokenizer ({error}). {ADVICE}") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: cannot be read as a tokenizer (it is {shown(content)}). {ADVICE}"
        )
    _check_ids(Fields(str(path), content))
    for part, steps_key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        _check_growth(Fields(f"{path}: {part}", content), part, steps_key)
    _steps(Fields(f"{path}: pre_tokenizer", content), "pre_tokenizer", "pretokenizers")
    _check_surroundings(Fields(f"{path}: post_processor", content))
    _check_added_tokens(path, content)
    backend, problem = _build(data)
    if backend is None:
        section = _unreadable_section(content)
        raise ModelError(f"{path}: cannot be read as a tokenizer: {section} ({problem}). {ADVICE}")
    try:
        backend.encode("")  # runs the post-processor
    except BaseException as error:
        problem = library_error(error)
        raise ModelError(f"{path}: post_processor fails ({problem}). {ADVICE}") from None
    return backend


def library_error(error: BaseException) -> str:
    """Return the message of an exception of `tokenizers`; raise other exceptions again.

    The library raises plain `Exception`s. Where it lacks a check, it raises a `PanicException`,
    which is a `BaseException`.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)[:300]


def _build(data: bytes) -> tuple[tokenizers.Tokenizer | None, str]:
    """Return the tokenizer, or None and the library's message."""
    try:
        return tokenizers.Tokenizer.from_buffer(data), ""
    except BaseException as error:
        return None, library_error(error)


def _unreadable_section(content: Mapping[str, Any]) -> str:
    """Name the section that the library cannot read. Its own message has only a column."""
    for part in PARTS:
        if part not in content:
            if part == "model":
                return "it has no model"
        elif _build(_alone(part, content[part]))[0] is None:
            return f"the section {part} is invalid"
    return "its sections do not fit together"


def _alone(part: str, value: Any) -> bytes:
    """Return the JSON of a tokenizer with one section only."""
    return json.dumps(_EMPTY | {part: value}).encode()


def _check_ids(fields: Fields) -> None:
    """Refuse ids that cannot be row numbers, have many gaps, or differ between both lists."""
    found: dict[str, int] = {}
    contents: dict[int, str] = {}
    for token in fields.items("added_tokens", dict, "objects, one for each token"):
        entry = Fields(f"{fields.where}: added_tokens", token)
        token_id = entry.integer("id", 0, VOCABULARY[1] - 1)
        content = entry.string("content", longest=MAX_TOKEN_CHARS)
        if found.setdefault(content, token_id) != token_id:
            entry.refuse("id", f"{found[content]}, the id that added_tokens gives to the same text")
        if contents.setdefault(token_id, content) != content:
            entry.refuse("content", f"{shown(contents[token_id])}, the text that added_tokens has")
    model = fields.nested("model")
    vocab = model.value("vocab")
    if isinstance(vocab, dict):
        if not set(map(type, vocab.values())) <= {int}:
            model.refuse("vocab", "an object of texts with whole numbers")
        highest = max(vocab.values(), default=0)
        _check_highest(f"{fields.where}: model: vocab", highest, len(vocab) + len(found))
    texts = vocab if isinstance(vocab, dict) else [one[0] for one in _pairs(vocab)]
    if max((len(text) for text in texts if isinstance(text, str)), default=0) > MAX_TOKEN_CHARS:
        model.refuse("vocab", f"tokens of at most {MAX_TOKEN_CHARS} characters")
    size = len(vocab) if isinstance(vocab, dict | list) else 0
    _check_highest(f"{fields.where}: added_tokens", max(contents, default=0), size + len(found))


def _pairs(vocab: Any) -> list[list[Any]]:
    """Return the entries of a list of tokens with their scores."""
    entries = vocab if isinstance(vocab, list) else []
    return [entry for entry in entries if isinstance(entry, list) and entry]


def _check_added_tokens(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse added tokens that take long to normalise, as the library does when it reads a file."""
    backend, _ = _build(_alone("normalizer", content.get("normalizer")))
    if backend is None:
        return  # `read_backend` names the section
    power = normalizer_degree(backend) or 4
    tokens = content.get("added_tokens") or []
    lengths = [len(one["content"]) for one in tokens if one.get("normalized", True)]
    if power > 1 and sum(length**power for length in lengths) > MAX_LOAD_WORK:
        raise ModelError(
            f"{path}: normalizer: may take hours for the added tokens, because of its regular "
            f"expressions and of tokens with up to {max(lengths)} characters. {ADVICE}"
        )


def _check_highest(what: str, highest: int, count: int) -> None:
    limit = min(2 * count + MAX_GAPS, VOCABULARY[1])
    if highest >= limit:
        raise ModelError(
            f"{what}: has the id {highest}, but there are only {count} tokens: expected ids below "
            f"{limit}. {ADVICE}"
        )


def _check_growth(fields: Fields, part: str, steps_key: str) -> None:
    """Refuse steps with unbounded growth of a text or unbounded work on it.

    The growth of inserting steps follows from the inserted text. All steps are also run in order on
    a probe that contains the text that any step writes.
    """
    steps = _steps(fields, part, steps_key)
    is_decoder = part == "decoder"
    growth = math.prod(_growth(Fields(fields.where, step), is_decoder) for step in steps)
    if growth > MAX_GROWTH:
        raise ModelError(
            f"{fields.where}: makes more than {MAX_GROWTH} times its length of some texts (up to "
            f"{min(growth, 10**9):,} times). {ADVICE}"
        )
    probe = " aA1é.東"
    for step in steps:
        for key in ("content", "prepend"):
            probe += Fields(fields.where, step).string(key, "", longest=MAX_INSERTED_CHARS)
        pattern = step.get("pattern")
        if isinstance(pattern, dict):
            for kind in ("String", "Regex"):
                text = Fields(f"{fields.where}: pattern", pattern).string(
                    kind, "", longest=MAX_PATTERN_CHARS
                )
                probe += text[:256] if kind == "String" else ""
    grown = probe
    for step in steps:
        backend, _ = _build(_alone(part, step))
        if backend is None:
            return  # `read_backend` names the section
        try:
            if part == "normalizer":
                grown = backend.normalizer.normalize_str(grown)
            else:
                grown = backend.decoder.decode([grown])
        except BaseException as error:
            problem = library_error(error)
            raise ModelError(f"{fields.where}: fails on a text ({problem}). {ADVICE}") from None
        if len(grown) > MAX_GROWTH * len(probe):
            raise ModelError(
                f"{fields.where}: makes more than {MAX_GROWTH} times its length of a text of "
                f"{len(probe)} characters. {ADVICE}"
            )


def _growth(step: Fields, is_decoder: bool) -> int:
    """Return the largest factor by which a step's insertions can lengthen a text."""
    if step.value("type") == "Prepend":
        return 1 + len(step.string("prepend", "", longest=MAX_INSERTED_CHARS))
    if step.value("type") == "Precompiled":
        return longest_in_charsmap(step.value("precompiled_charsmap"))
    if step.value("type") != "Replace":
        return 1
    num_chars = len(step.string("content", "", longest=MAX_INSERTED_CHARS))
    pattern = step.nested("pattern")
    text = pattern.string("String", "", longest=MAX_PATTERN_CHARS)
    regex = pattern.string("Regex", "", longest=MAX_PATTERN_CHARS)
    if not is_bounded(regex):
        pattern.refuse(
            "Regex",
            "a pattern without lookarounds, back-references and repeated groups, and with few "
            "repeats and choices",
        )
    if is_decoder and degree(regex) != 1:
        pattern.refuse(
            "Regex",
            "a pattern whose work is in proportion to the text: no repeat before a letter that may "
            "be missing",
        )
    if text:
        return max(1, -(-num_chars // len(text)))
    return num_chars + 1 if may_match_nothing(regex) else max(1, num_chars)


def _check_surroundings(fields: Fields) -> None:
    for step in _steps(fields, "post_processor", "processors"):
        tokens = Fields(fields.where, step).nested("special_tokens")
        count = sum(len(tokens.nested(name).items("ids", int, "ids")) for name in tokens.names())
        if count > MAX_SURROUNDING_TOKENS:
            raise ModelError(
                f"{fields.where}: special_tokens has {count} ids to put around a prompt; the limit "
                f"is {MAX_SURROUNDING_TOKENS}. {ADVICE}"
            )


def _steps(fields: Fields, part: str, steps_key: str) -> list[dict[str, Any]]:
    """Return the steps of a section, with nested sequences flattened."""
    pending: list[Any] = [fields.value(part)]
    steps: list[dict[str, Any]] = []
    while pending and len(steps) <= MAX_STEPS:
        step = pending.pop(0)
        inner = step.get(steps_key) if isinstance(step, dict) else None
        if isinstance(inner, list):
            pending = [*inner[: MAX_STEPS + 1], *pending]
        elif isinstance(step, dict):
            steps.append(step)
    if len(steps) > MAX_STEPS:
        raise ModelError(
            f"{fields.where}: has more than {MAX_STEPS} steps, which is the limit. {ADVICE}"
        )
    return steps
