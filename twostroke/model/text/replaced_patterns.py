"""Regular expressions in the replacements of a tokenizer.json: which of them the library can match
in bounded work, and which match between letters.

A backtracking matcher can take hours over a word: each point at which a match can go on in more
than one way multiplies the work, and a repeated group repeats that. Replacements of known
tokenizers, such as ` {2,}` and `\\s+`, have one such point.
"""

from __future__ import annotations

import re
from typing import Final

import tokenizers

MAX_REPEATS: Final = 2  # without an upper end
MAX_CHOICES: Final = 8  # repeats, optional letters, and alternatives in groups
ESCAPE: Final = re.compile(r"\\(?:[pP]\{\^?\w+\}|x\{\w+\}|.)", re.DOTALL)
CLASS: Final = re.compile(r"\[\^?\]?(?:\[:\^?\w+:\]|[^\]])*\]")
# Lookarounds, conditions and what is absent; groups and repeats that are repeated.
ENDLESS: Final = re.compile(r"\(\?<?[=!]|\(\?[~(]|\)\??[*+{]|[*+?}][*{]")
REPEAT: Final = re.compile(r"[*+]|\{\d*,\}")
OPTIONAL: Final = re.compile(r"(?<!\()\?|\{\d*,\d+\}")
LETTER: Final = "\ue000"


def is_bounded(pattern: str) -> bool:
    """Return whether matching a pattern takes a bounded number of tries per place in a text."""
    if any(escape[1] in "gk123456789" for escape in ESCAPE.findall(pattern)):
        return False  # groups that are called, or compared with
    outline = _outline(pattern)
    if ENDLESS.search(outline):
        return False
    repeats = len(REPEAT.findall(outline))
    choices = repeats + len(OPTIONAL.findall(outline))
    choices += outline.count("|") if "(" in outline else 0
    return repeats <= MAX_REPEATS and choices <= MAX_CHOICES


def may_match_nothing(pattern: str) -> bool:
    """Return whether a bounded pattern can match between two letters."""
    if any(escape[1] in "bBAGzZKyY" for escape in ESCAPE.findall(pattern)):
        return True
    if re.search(r"[$^]", _outline(pattern)):
        return True
    try:
        replace = tokenizers.normalizers.Replace(tokenizers.Regex(pattern), "x")
    except Exception:  # not a pattern; the library refuses the file
        return True
    return replace.normalize_str(LETTER) not in (LETTER, "x")


def _outline(pattern: str) -> str:
    """Return a pattern with a letter in the place of each escape and each class."""
    return CLASS.sub("c", ESCAPE.sub("c", pattern))
