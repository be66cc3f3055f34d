"""Text for people: as wide as their terminal, broken between words only."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO
from unicodedata import combining, east_asian_width

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


class WordWriter:
    """Text as it is written, in lines of at most `width` columns: a word that would cross the edge
    begins the next line. A word is shown once it is complete."""

    def __init__(self, stream: TextIO, width: int) -> None:
        self._stream, self._width = stream, width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        for char in text:
            wide = east_asian_width(char) in "WF"  # written without spaces; a line may end anywhere
            if not (char.isspace() or wide):
                self._word += char
                continue
            self._put_word()
            if char == "\n":
                self._put("\n", -self._column)
            elif wide:
                self._word = char
                self._put_word()
            elif self._column < self._width:  # a space at the edge is the end of the line
                self._put(char, 8 - self._column % 8 if char == "\t" else 1)
        self._stream.flush()

    def flush(self) -> None:
        self._put_word()
        self._stream.flush()

    def _put_word(self) -> None:
        size = sum(
            2 if east_asian_width(char) in "WF" else not combining(char) for char in self._word
        )
        if self._column and self._column + size > self._width:
            self._put("\n", -self._column)
        self._put(self._word, size)
        self._column = self._column % self._width if size > self._width else self._column
        self._word = ""

    def _put(self, text: str, columns: int) -> None:
        self._stream.write(text)
        self._column += columns
