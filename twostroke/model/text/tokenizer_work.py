"""Estimates the work that a tokenizer does for a text, from the tokenizer's own steps.

The time and memory of most tokenizers are proportional to the text. Others, with unusual regular
expressions or with steps that lengthen a text, may take hours for a short text. The first kind runs
in this process; the second kind runs in a limited process (`limited_encoder.py`) for every text
that is longer than `unlimited_chars` allows.

    degree of a pattern   the work for n letters grows at most like n to this power; None: unknown
    growth of a step      how many times longer it may make a text
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import tokenizers

from twostroke.model.text.pre_tokenizers import PRE_TOKENIZERS
from twostroke.model.text.replaced_patterns import ESCAPE, may_match_nothing
from twostroke.model.text.sentencepiece_charsmap import longest_in_charsmap

MAX_INSERTED: Final = 4  # factor by which ordinary steps lengthen a text with inserted letters
MAX_GROWTH: Final = 16  # the same, with Unicode's normal forms and the letters of bytes
GROWN_CHARS: Final = 1 << 20  # of a lengthened text in this process; each takes some 100 bytes
SQUARE_CHARS: Final = 1 << 12  # that a pattern of degree 2 reads in this process: 0.3 s at worst
MAX_WORD_CHARS: Final = 1000  # longest word of which a WordPiece model looks up all parts
MAX_PIECE_CHARS: Final = 512  # longest piece of a Unigram vocabulary, tried at each place
MAX_AFFIX_CHARS: Final = 64  # that a model puts around each letter
MAX_COUNT: Final = 16  # a repeat with a higher bound counts as unbounded
MAX_CHOICES: Final = 8  # optional letters and alternatives before a letter that may be missing
# Factors of the length by steps without settings. A byte of ByteLevel is a character.
UNICODE_GROWTH: Final = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 4,
    "ByteLevel": 4,
}
# If one of these does not match a run of blanks, the alternative `\s+` matches the whole run, so
# that no blank is read again and again.
BLANKS: Final = frozenset((r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)"))
KNOWN_PATTERNS: Final = frozenset(
    pattern for kind in PRE_TOKENIZERS.values() for pattern in kind.patterns
)
_ATOM: Final = re.compile(
    rf"(?P<escape>{ESCAPE.pattern})"
    r"|(?P<look>\(\?<?[=!])|(?P<group>\((?!\?)|\(\?(?:[a-z]*:|>))|(?P<flag>\(\?[a-z]+\))"
    r"|(?P<close>\))|(?P<or>\|)|(?P<repeat>[*+]|\{\d*,\d*\}|\{\d+\}|\?)|(?P<letter>[^\[\](){}\\])",
    re.DOTALL,
)


def unlimited_chars(backend: tokenizers.Tokenizer) -> int | None:
    """Return the length of the texts that a tokenizer may encode in this process; None: any text
    (an ordinary tokenizer), 0: none."""
    normalizer = list(_steps(backend.normalizer, "normalizers"))
    splitting = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    if not _is_ordinary(backend.model):
        return 0
    inserted = math.prod(_inserted(step) for step in normalizer)
    normal_growth = inserted * math.prod(map(_unicode_growth, normalizer))
    growth = normal_growth * math.prod(map(_unicode_growth, splitting))
    limits = []
    if inserted > MAX_INSERTED or growth > MAX_GROWTH:
        limits.append(GROWN_CHARS // growth)
    for step in (*normalizer, *splitting):
        power = _degree_of_step(step)
        if power is None or power > 2:
            return 0
        if power == 2:
            limits.append(SQUARE_CHARS // normal_growth)
    return min(limits, default=None)


def normalizer_degree(backend: tokenizers.Tokenizer) -> int | None:
    """Return the degree of the normalizer's patterns; None: unknown."""
    degrees = [_degree_of_step(step) for step in _steps(backend.normalizer, "normalizers")]
    known = [power for power in degrees if power is not None]
    return max(known, default=1) if len(known) == len(degrees) else None


def _steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    """Return the steps of a section in the form of tokenizer.json, with sequences flattened."""
    pending = [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop(0)
        if isinstance(step.get(key), list):
            pending = [*step[key], *pending]
        else:
            yield step


def _is_ordinary(model: Any) -> bool:
    kind = type(model).__name__
    if kind == "Unigram":
        return max(map(len, tokenizers.Tokenizer(model).get_vocab()), default=0) <= MAX_PIECE_CHARS
    if kind == "WordPiece" and model.max_input_chars_per_word > MAX_WORD_CHARS:
        return False
    names = ("continuing_subword_prefix", "end_of_word_suffix")
    return all(len(getattr(model, name, None) or "") <= MAX_AFFIX_CHARS for name in names)


def _inserted(step: dict[str, Any]) -> int:
    """Return the factor by which a step's own letters lengthen a text."""
    match step.get("type"):
        case "Prepend":
            return 1 + len(step["prepend"]) if len(step["prepend"]) > 1 else 1
        case "Replace":
            content, pattern = step["content"], step["pattern"]
            if "String" in pattern:
                return max(1, -(-len(content) // max(1, len(pattern["String"]))))
            return max(1, len(content) + may_match_nothing(pattern["Regex"]))
    return 1


def _unicode_growth(step: dict[str, Any]) -> int:
    if step.get("type") == "Precompiled":
        return longest_in_charsmap(step["precompiled_charsmap"])
    return UNICODE_GROWTH.get(str(step.get("type")), 1)


def _degree_of_step(step: dict[str, Any]) -> int | None:
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern:
        return degree(pattern["Regex"])
    return 1


def degree(pattern: str) -> int | None:
    """Return the degree of the work to find all matches of a pattern in a text; None: unknown."""
    if pattern in KNOWN_PATTERNS:
        return 1
    alternatives = _alternatives(pattern)
    if alternatives is None:
        return None
    texts = ["".join(text for _, text in atoms) for atoms in alternatives]
    worst = 1
    for text, atoms in zip(texts, alternatives, strict=True):
        if text in BLANKS and r"\s+" in texts:
            continue
        power = _degree_of_alternative(atoms)
        if power is None:
            return None
        worst = max(worst, power)
    return worst


def _end_of_class(pattern: str, start: int) -> int:
    """Return the place after a character class, which may contain classes."""
    depth, place = 0, start
    while place < len(pattern):
        letter = pattern[place]
        place += 1
        if letter == "\\":
            place += 1
        elif letter == "[":
            depth += 1
            place += pattern.startswith("^", place)
            place += pattern.startswith("]", place)  # a letter of the class
        elif letter == "]":
            depth -= 1
            if depth == 0:
                break
    return min(place, len(pattern))


Atoms = list[tuple[str, str]]  # kind and text


def _alternatives(pattern: str) -> list[Atoms] | None:
    """Return the atoms of each alternative at the top; None for syntax that is not known here."""
    found: list[Atoms] = [[]]
    place = depth = 0
    while place < len(pattern):
        if pattern[place] == "[":
            end = _end_of_class(pattern, place)
            found[-1].append(("class", pattern[place:end]))
            place = end
            continue
        atom = _ATOM.match(pattern, place)
        if atom is None or atom.lastgroup is None:
            return None
        kind, text = atom.lastgroup, atom[0]
        if kind == "escape" and text[1] in "gk123456789":
            return None  # back-references and calls
        depth += (kind in ("group", "look")) - (kind == "close")
        if depth < 0:
            return None
        if kind == "or" and depth == 0:
            found.append([])
        else:
            found[-1].append((kind, text))
        place = atom.end()
    return found if depth == 0 else None


def _degree_of_alternative(atoms: Atoms) -> int | None:
    """Return 1 plus the number of unbounded repeats before a letter that may be missing. If it is
    missing, the matcher tries each repeat again with fewer letters."""
    repeats = failing = choices = depth = 0
    for (kind, _), (after, count) in zip(atoms, [*atoms, ("", "")][1:], strict=True):
        if kind in ("group", "look"):
            depth += 1
            continue
        if kind == "flag" or (kind == "repeat" and after != "repeat"):
            continue
        if kind == "repeat":  # two in a row: lazy and possessive repeats read the same letters
            if count not in "+?":
                return None
            continue
        if kind == "or":
            choices += 1
            continue
        depth -= kind == "close"
        bounds = _bounds(count) if after == "repeat" else (1, 1)
        endless = bounds[1] > MAX_COUNT
        if (endless or bounds[1] > 1) and (kind == "close" or depth):
            return None  # a repeated group, or a repeat in a group
        repeats += bounds[0] > MAX_COUNT  # it may be missing after many letters
        if bounds[0] > 0 and kind != "close":
            failing = max(failing, repeats)
            if choices > MAX_CHOICES:
                return None
        repeats += endless
        choices += not endless and bounds[0] != bounds[1]
    return 1 + failing


def _bounds(count: str) -> tuple[int, float]:
    if count in ("*", "+", "?"):
        return int(count == "+"), 1 if count == "?" else math.inf
    low, comma, high = count[1:-1].partition(",")
    lowest = int(low or 0)
    return lowest, (int(high) if high else math.inf) if comma else lowest
