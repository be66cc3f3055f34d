"""Wraps text at the width of the terminal, only between words."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO
from unicodedata import combining, east_asian_width

from twostroke.environment import terminal_columns

NO_BREAK_SPACE = "\u00a0"
MIN_COLUMNS = 20  # enough for the name of a flag


def columns(stream: TextIO | None) -> int | None:
    """Return the terminal's width; None for a file or a pipe, where lines are not wrapped."""
    if stream is None or not stream.isatty():  # None: the stream was closed before the start
        return None
    if chosen := terminal_columns():
        return max(MIN_COLUMNS, chosen)
    try:
        # 0: the terminal does not know its size
        return max(MIN_COLUMNS, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError):
        return 80


def wrapped(text: str, width: int | None, indent: str = "") -> str:
    """Wrap a text at `width` columns and indent all lines but the first. Line breaks in the text
    are kept. A word that is wider than a line gets its own line. `unbreakable` texts are not
    wrapped."""
    if width is None:
        return text.replace(NO_BREAK_SPACE, " ")
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
    return "\n".join(lines).replace(NO_BREAK_SPACE, " ")


def unbreakable(text: str) -> str:
    return text.replace(" ", NO_BREAK_SPACE)


class WordWriter:
    """Writes a stream of text in lines of at most `width` columns. A word that would cross the edge
    begins the next line. A word is written when it is complete."""

    def __init__(self, stream: TextIO, width: int) -> None:
        self._stream, self._width = stream, width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        for char in text:
            wide = east_asian_width(char) in "WF"  # a line may end after any of these characters
            if not (char.isspace() or wide):
                self._word += char
                continue
            self._put_word()
            if char == "\n":
                self._put("\n", -self._column)
            elif wide:
                self._word = char
                self._put_word()
            elif self._column < self._width:  # a space at the edge is dropped
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
