"""A tokenizer.json → a `tokenizers.Tokenizer`, once nothing in it can hang or flood the library.

The library believes what it reads: an id of 10⁹ becomes a table of as many entries, and a chain of
replacements that each write a letter a hundred times makes a gigabyte of a word.
"""

from __future__ import annotations

import base64
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

WAY_OUT: Final = "Fetch the file again, or give another one with --tokenizer FOLDER."
MAX_STEPS: Final = 64  # of a normalizer, a decoder or a post-processor
MAX_INSERTED_CHARS: Final = 64  # what one step may write for a match
MAX_PATTERN_CHARS: Final = 1 << 14
MAX_GROWTH: Final = 64  # of a text, through all steps
MAX_SURROUNDING_TOKENS: Final = 1024  # that are put around a prompt
MAX_GAPS: Final = 1 << 16  # ids without a token, beside as many again as there are tokens

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
            raise ModelError(f"{path}: has more than {MAX_JSON_BYTES} bytes. {WAY_OUT}")
        content = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as a tokenizer ({error}). {WAY_OUT}") from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: cannot be read as a tokenizer (it is {shown(content)}). {WAY_OUT}"
        )
    _check_ids(Fields(str(path), content))
    for part, steps_key in (("normalizer", "normalizers"), ("decoder", "decoders")):
        _check_growth(Fields(f"{path}: {part}", content), part, steps_key)
    _check_surroundings(Fields(f"{path}: post_processor", content))
    backend, problem = _build(data)
    if backend is None:
        raise ModelError(
            f"{path}: cannot be read as a tokenizer: {_culprit(content)} ({problem}). {WAY_OUT}"
        )
    try:
        backend.encode("")  # what is put around any text
    except BaseException as error:
        problem = library_error(error)
        raise ModelError(f"{path}: post_processor fails ({problem}). {WAY_OUT}") from None
    return backend


def library_error(error: BaseException) -> str:
    """What `tokenizers` says, which raises nothing more particular than Exception; where it has not
    checked something it panics, which is not even that. What is not its own goes on its way."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return str(error)[:300]


def _build(data: bytes) -> tuple[tokenizers.Tokenizer | None, str]:
    """The tokenizer, or what the library says against it."""
    try:
        return tokenizers.Tokenizer.from_buffer(data), ""
    except BaseException as error:
        return None, library_error(error)


def _culprit(content: Mapping[str, Any]) -> str:
    """Which part the library cannot read; it only says in which column."""
    for part in PARTS:
        if part not in content:
            if part == "model":
                return "it has no model"
        elif _build(_alone(part, content[part]))[0] is None:
            return f"{part} is not as it should be"
    return "its parts do not fit each other"


def _alone(part: str, value: Any) -> bytes:
    """A tokenizer that has nothing but one part."""
    return json.dumps(_EMPTY | {part: value}).encode()


def _check_ids(fields: Fields) -> None:
    """Ids are numbers of rows: they begin at 0 and leave few out, in both lists of tokens."""
    found: dict[str, int] = {}
    contents: dict[int, str] = {}
    for token in fields.items("added_tokens", dict, "objects, one for each token"):
        entry = Fields(f"{fields.where}: added_tokens", token)
        token_id = entry.integer("id", 0, VOCABULARY[1] - 1)
        content = entry.string("content", longest=1 << 14)
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
    size = len(vocab) if isinstance(vocab, dict | list) else 0
    _check_highest(f"{fields.where}: added_tokens", max(contents, default=0), size + len(found))


def _check_highest(what: str, highest: int, count: int) -> None:
    most = min(2 * count + MAX_GAPS, VOCABULARY[1])
    if highest >= most:
        raise ModelError(
            f"{what}: has the id {highest}, but there are only {count} tokens: expected ids below "
            f"{most}. {WAY_OUT}"
        )


def _check_growth(fields: Fields, part: str, steps_key: str) -> None:
    """Refuse steps that let a text grow without bound, or look at it without bound.

    The growth of steps that insert text is known from what they insert. The other steps are tried
    on a text with all that any step writes, each on what the step before has made."""
    steps = _steps(fields, part, steps_key)
    growth = math.prod(_growth(Fields(fields.where, step)) for step in steps)
    if growth > MAX_GROWTH:
        raise ModelError(
            f"{fields.where}: makes more than {MAX_GROWTH} times its length of some texts (up to "
            f"{min(growth, 10**9):,} times). {WAY_OUT}"
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
            return  # `read_backend` says which part it is
        try:
            if part == "normalizer":
                grown = backend.normalizer.normalize_str(grown)
            else:
                grown = backend.decoder.decode([grown])
        except BaseException as error:
            problem = library_error(error)
            raise ModelError(f"{fields.where}: fails on a text ({problem}). {WAY_OUT}") from None
        if len(grown) > MAX_GROWTH * len(probe):
            raise ModelError(
                f"{fields.where}: makes more than {MAX_GROWTH} times its length of a text of "
                f"{len(probe)} characters. {WAY_OUT}"
            )


def _growth(step: Fields) -> int:
    """Return how many times its length a step can make of a text by what it inserts."""
    if step.value("type") == "Prepend":
        return 1 + len(step.string("prepend", "", longest=MAX_INSERTED_CHARS))
    if step.value("type") == "Precompiled":
        return _longest_in_charsmap(step.value("precompiled_charsmap"))
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
    if text:
        return max(1, -(-num_chars // len(text)))
    return num_chars + 1 if may_match_nothing(regex) else max(1, num_chars)


def _longest_in_charsmap(charsmap: Any) -> int:
    """Return how many characters SentencePiece's table can write for one: after the bytes of a trie
    and their number come the texts, with a zero byte after each."""
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 1  # `read_backend` says that it cannot be read
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))


def _check_surroundings(fields: Fields) -> None:
    for step in _steps(fields, "post_processor", "processors"):
        tokens = Fields(fields.where, step).nested("special_tokens")
        count = sum(len(tokens.nested(name).items("ids", int, "ids")) for name in tokens.names())
        if count > MAX_SURROUNDING_TOKENS:
            raise ModelError(
                f"{fields.where}: special_tokens has {count} ids to put around a prompt, where at "
                f"most {MAX_SURROUNDING_TOKENS} are taken. {WAY_OUT}"
            )


def _steps(fields: Fields, part: str, steps_key: str) -> list[dict[str, Any]]:
    """A sequence, or sequences in it, unrolled; what is no step the library will refuse."""
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
            f"{fields.where}: has more than {MAX_STEPS} steps, which are not read. {WAY_OUT}"
        )
    return steps
