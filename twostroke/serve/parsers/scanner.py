"""`Scanner`: the base of parsers of streamed text.

A parser is a generator (`read`), written as if the whole text were available. When the parser needs
a character that has not arrived, it yields, and continues when more text has arrived. The parser
never asks how much text has arrived, so its result does not depend on where the stream is cut. It
never goes back by more than the length of a tag, so its time is linear in the length of the text.

    _held ───────────────────────────┬─ _at ───────────────┬── end of the text so far
    read, but may still be content   │ peeked at, not read │
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import cache
from typing import Final, TypeVar

from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields for more text, returns the value read
SPACE: Final = " \t\r\n"
_IN_STRING: Final = re.compile(r'["\\]')
_IN_VALUE: Final = re.compile(r'["{}\[\],\s]')


class Scanner(ABC):
    """Turns streamed text into deltas, independent of where the stream is cut."""

    thinking = False  # True while the current position is within reasoning

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._ended = False
        self._deltas: list[Delta] = []
        self._kind: Callable[[str], Delta] = ContentDelta
        self._runs: list[str] = []  # texts of this kind, not yet in `_deltas`
        self._sink: Callable[[str], None] = self.emit_text  # for text that is in no tag or call
        self._reader = self._read_all()

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the text. Text that the parser does not read is content."""

    def push(self, text: str) -> list[Delta]:
        """Add text and return the new deltas. Text that may be part of a tag or call is held
        back."""
        keep = self._at if self._held is None else self._held
        self._text = self._text[keep:] + text
        self._at -= keep
        self._held = None if self._held is None else 0
        next(self._reader)
        return self._take()

    def flush(self) -> list[Delta]:
        """Return the deltas of the text held back: the text has ended."""
        self._ended = True
        for _ in self._reader:
            pass
        return self._take()

    @property
    def looks_ahead(self) -> bool:
        """Return whether unread text may be the beginning of a tag."""
        return self._at < len(self._text)

    def _read_all(self) -> Steps[None]:
        yield from self.read()
        self.give_up()
        while (yield from self.peek()):
            self._sink(self._text[self._at :])
            self._at = len(self._text)

    def _take(self) -> list[Delta]:
        self._flush_runs()
        deltas, self._deltas = self._deltas, []
        return deltas

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def peek(self, ahead: int = 0) -> Steps[str]:
        """Return the character `ahead` of the position, unread; "" if the text ends before it."""
        while self._at + ahead >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at + ahead]

    def space(self, chars: str = SPACE) -> Steps[None]:
        """Skip white space."""
        while (char := (yield from self.peek())) and char in chars:
            self._at += 1

    def accept(self, *texts: str, after: str = "") -> Steps[str]:
        """If one of the texts follows, read and return it; otherwise read nothing and return "".
        Characters of `after` before the text are skipped."""
        skipped = 0
        while after and (char := (yield from self.peek(skipped))) and char in after:
            skipped += 1
        left, size = texts, 0
        while left:
            char = yield from self.peek(skipped + size)
            left = tuple(text for text in left if text[size] == char)
            size += 1
            for text in left:
                if len(text) == size:
                    self._at += skipped + size
                    return text
        return ""

    def text_until(self, *tags: str) -> Steps[str]:
        """Emit text up to one of the tags, read the tag and return it; "" if the text ends first.
        Hold the tag and the white space before it."""
        firsts = {tag[0] for tag in tags}
        here, later = _before_tags(tags)
        while True:
            # Emit the text before the next possible tag, or before the end of the text so far.
            found = here.match(self._text, self._at) or later.search(self._text, self._at)
            assert found is not None
            self._sink(self._text[self._at : found.start()])
            self._held, self._at = found.span()
            char = yield from self.peek()
            if char and char in SPACE:
                yield from self.space()
                char = yield from self.peek()
            if not char:
                return ""
            if char in firsts:
                if tag := (yield from self.accept(*tags)):
                    return tag
                self._at += 1
            self.give_up()

    def until(
        self, *tags: str, max_chars: int | None = None, sink: Callable[[str], None] | None = None
    ) -> Steps[tuple[str, str]]:
        """Read text up to one of the tags; return the text and the tag. The tag is "" if the text
        ends first or has more than `max_chars` characters. With `sink`, the text goes to `sink`."""
        pattern = _first_of(tags)
        parts: list[str] = []
        size = 0
        take = sink or parts.append
        while max_chars is None or size <= max_chars:
            found = pattern.search(self._text, self._at)
            stop = found.start() if found else len(self._text)
            if max_chars is not None:  # so that the result does not depend on the stream's cuts
                stop = min(stop, self._at + max_chars + 1 - size)
            run = self._text[self._at : stop]
            self._at = stop
            size += len(run)
            if run:
                take(run)
            if max_chars is not None and size > max_chars:
                break
            char = yield from self.peek()
            if not char:
                break
            if pattern.match(char):
                if tag := (yield from self.accept(*tags)):
                    return "".join(parts), tag
                self._at += 1
                size += 1
                take(char)
        return "".join(parts), ""

    def json_value(self, sink: Callable[[str], None] | None = None) -> Steps[str]:
        """Read one JSON value, bounded by its brackets and strings; "" if no value begins here.
        With `sink`, the text goes to `sink`."""
        parts: list[str] = []
        take = sink or parts.append
        depth, in_string = 0, False
        while True:
            pattern = _IN_STRING if in_string else _IN_VALUE
            found = pattern.search(self._text, self._at)
            run = self._text[self._at : found.start() if found else None]
            if run:
                self._at += len(run)
                take(run)
            char = yield from self.peek()
            if not char:
                break
            if not pattern.match(char):
                continue
            if char == "\\":
                if not (yield from self.peek(1)):
                    self._at += 1
                    take(char)
                    break
                char = self._text[self._at : self._at + 2]
            elif char == '"':
                in_string = not in_string
            elif char in "{[":
                depth += 1
            elif depth == 0:
                break
            elif char in "}]":
                depth -= 1
            self._at += len(char)
            take(char)
            if depth == 0 and not in_string and char in '"}]':
                break
        return "".join(parts)

    # ── output ──────────────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """Hold the text that is read from now on: it may turn out to be content."""
        self._held = self._at

    def give_up(self) -> None:
        """Emit the held text as content."""
        if self._held is not None:
            self._sink(self._text[self._held : self._at])
            self._held = None

    def drop(self) -> None:
        """Drop the held text, which is not content."""
        self._held = None

    def emit_text(self, text: str) -> None:
        self._emit(ContentDelta, text)

    def emit_reasoning(self, text: str) -> None:
        self._emit(ReasoningDelta, text)

    def _emit(self, kind: Callable[[str], Delta], text: str) -> None:
        """Emit text. Consecutive texts of the same kind become one delta."""
        if kind != self._kind:
            self._flush_runs()
            self._kind = kind
        if text:
            self._runs.append(text)

    def _flush_runs(self) -> None:
        if self._runs:
            self._deltas.append(self._kind("".join(self._runs)))
            self._runs.clear()


@cache
def _first_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the first character of any of the texts."""
    return re.compile(f"[{re.escape(''.join(text[0] for text in texts))}]")


@cache
def _before_tags(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns for optional white space before a possible tag or the end of the text:
    one to match at a position, one to search. The search finds white space only from its beginning,
    so that long white space is scanned once."""
    space = rf"[{SPACE}]*(?=[{re.escape(''.join(tag[0] for tag in tags))}]|\Z)"
    return re.compile(space), re.compile(rf"(?<![{SPACE}]){space}")
