"""Checks of the regular expressions in a tokenizer.json's replacements: whether their work is
bounded, and whether they match the empty text.

A backtracking matcher can take hours over a word: each point with more than one way to continue
multiplies the work, and a repeated group repeats it. Replacements of known tokenizers, such as
` {2,}` and `\\s+`, have one such point.
"""

from __future__ import annotations

import re
from typing import Final

import tokenizers

MAX_REPEATS: Final = 2  # without an upper bound
MAX_CHOICES: Final = 8  # repeats, optional letters, and alternatives in groups
ESCAPE: Final = re.compile(r"\\(?:[pP]\{\^?\w+\}|x\{\w+\}|.)", re.DOTALL)
CLASS: Final = re.compile(r"\[\^?\]?(?:\[:\^?\w+:\]|[^\]])*\]")
# Lookarounds, conditions and absence operators; repeated groups and repeats.
ENDLESS: Final = re.compile(r"\(\?<?[=!]|\(\?[~(]|\)\??[*+{]|[*+?}][*{]")
REPEAT: Final = re.compile(r"[*+]|\{\d*,\}")
OPTIONAL: Final = re.compile(r"(?<!\()\?|\{\d*,\d+\}")
LETTER: Final = "\ue000"


def is_bounded(pattern: str) -> bool:
    """Return whether matching a pattern takes a bounded number of tries per place in a text."""
    if any(escape[1] in "gk123456789" for escape in ESCAPE.findall(pattern)):
        return False  # subexpression calls and back-references
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
    """Return a pattern with each escape and each class replaced by a letter."""
    return CLASS.sub("c", ESCAPE.sub("c", pattern))
