"""Text for people: as wide as their terminal, broken between words only."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO

GLUE = "\u00a0"
LEAST_COLUMNS = 20  # narrower, a flag's name would not fit


def columns(stream: TextIO | None) -> int | None:
    """The terminal's width; None for a file or a pipe, where lines may have any length."""
    if stream is None or not stream.isatty():  # None: it was closed before the start
        return None
    said = os.environ.get("COLUMNS", "")
    if said.isdigit() and int(said) > 0:
        return max(LEAST_COLUMNS, int(said))
    try:
        # 0: a terminal that does not know its size
        return max(LEAST_COLUMNS, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """The text in lines of at most `width` columns, all but the first indented. Its own line
    breaks stay, a word that is wider than a line keeps one to itself, and words that are `glued`
    stay together."""
    if width is None:
        return text.replace(GLUE, " ")
    lines = (
        textwrap.fill(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )
    return "\n".join(lines).replace(GLUE, " ")


def glued(text: str) -> str:
    return text.replace(" ", GLUE)
