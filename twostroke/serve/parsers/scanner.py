"""`Scanner`: a model's text as it comes, for parsers that are written as if all of it were there.

A parser is a generator (`read`). Where it needs a character that has not come yet it yields, and it
goes on when more text has come. It never asks how much has come, so that where the text is cut
makes no difference. It never goes back further than a tag is long, so that a text takes time in
proportion to its length, whatever is in it.

    held ──────────────┬──────── at ─────────┬── end of what has come
    may yet be content │ read, no call yet   │ looked at, not read
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import cache
from typing import Final, TypeVar

from twostroke.serve.parsers.deltas import ContentDelta, Delta, ReasoningDelta

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields for more text, returns what was read
SPACE: Final = " \t\r\n"
_IN_STRING: Final = re.compile(r'["\\]')
_IN_VALUE: Final = re.compile(r'["{}\[\],\s]')


class Scanner(ABC):
    """Text as it comes → deltas. Where the text is cut makes no difference."""

    thinking = False  # what is read now is reasoning

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._held: int | None = None
        self._ended = False
        self._deltas: list[Delta] = []
        self._kind: Callable[[str], Delta] = ContentDelta
        self._runs: list[str] = []  # of that kind, not yet among the deltas
        self._sink: Callable[[str], None] = self.emit_text
        self._reader = self._read_all()

    @abstractmethod
    def read(self) -> Steps[None]:
        """Reads the text; what it leaves is content."""

    def push(self, text: str) -> list[Delta]:
        """What is new. Text that may turn out to be something else is held back."""
        keep = self._at if self._held is None else self._held
        self._text = self._text[keep:] + text
        self._at -= keep
        self._held = None if self._held is None else 0
        next(self._reader)
        return self._take()

    def flush(self) -> list[Delta]:
        """What was held back: the text has ended."""
        self._ended = True
        for _ in self._reader:
            pass
        return self._take()

    @property
    def looks_ahead(self) -> bool:
        """Some of the text may be the beginning of a tag."""
        return self._at < len(self._text)

    def _read_all(self) -> Steps[None]:
        yield from self.read()
        self.give_up()
        while (yield from self.peek()):
            self._sink(self._text[self._at :])
            self._at = len(self._text)

    def _take(self) -> list[Delta]:
        self._settle()
        deltas, self._deltas = self._deltas, []
        return deltas

    # ── reading ─────────────────────────────────────────────────────────────────────────────

    def peek(self, ahead: int = 0) -> Steps[str]:
        """A character that comes, unread; "" if the text ends before it."""
        while self._at + ahead >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at + ahead]

    def space(self, chars: str = SPACE) -> Steps[None]:
        """Reads over white space."""
        while (char := (yield from self.peek())) and char in chars:
            self._at += 1

    def accept(self, *texts: str, after: str = "") -> Steps[str]:
        """Whichever of the texts comes next, read; "" and nothing read if none does. Characters of
        `after` may come before it, and are read with it."""
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
        """Emits text up to one of the tags, which is returned; "" if the text ends first. The tag
        and the white space before it are held."""
        firsts = {tag[0] for tag in tags}
        here, later = _before_tags(tags)
        while True:
            # Whatever does not stand at the end of what has come, or before what may be a tag.
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
        self, *tags: str, most: int | None = None, sink: Callable[[str], None] | None = None
    ) -> Steps[tuple[str, str]]:
        """Text up to one of the tags, and that tag, which is read; "" for it if the text ends first
        or has more than `most` characters. With `sink` the text goes there, as it comes."""
        pattern = _first_of(tags)
        parts: list[str] = []
        size = 0
        take = sink or parts.append
        while most is None or size <= most:
            found = pattern.search(self._text, self._at)
            stop = found.start() if found else len(self._text)
            if most is not None:  # no more is read because more has come
                stop = min(stop, self._at + most + 1 - size)
            run = self._text[self._at : stop]
            self._at = stop
            size += len(run)
            if run:
                take(run)
            if most is not None and size > most:
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
        """One JSON value as it is written, as its brackets and strings bound it; "" if none begins
        here. With `sink` it goes there, as it comes."""
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

    # ── what comes out ──────────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """What is read from here on may turn out to be content."""
        self._held = self._at

    def give_up(self) -> None:
        """What is held is content."""
        if self._held is not None:
            self._sink(self._text[self._held : self._at])
            self._held = None

    def drop(self) -> None:
        """What is held is no content."""
        self._held = None

    def emit_text(self, text: str) -> None:
        self._emit(ContentDelta, text)

    def emit_reasoning(self, text: str) -> None:
        self._emit(ReasoningDelta, text)

    def _emit(self, kind: Callable[[str], Delta], text: str) -> None:
        """Texts of a kind that follow each other become one delta."""
        if kind != self._kind:
            self._settle()
            self._kind = kind
        if text:
            self._runs.append(text)

    def _settle(self) -> None:
        if self._runs:
            self._deltas.append(self._kind("".join(self._runs)))
            self._runs.clear()


@cache
def _first_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """The first character of one of the texts."""
    return re.compile(f"[{re.escape(''.join(text[0] for text in texts))}]")


@cache
def _before_tags(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """White space, or none, before what may be a tag or at the end: that begins here, or that is to
    be searched for (of a run of it only the beginning, so that long runs are passed over once)."""
    run = rf"[{SPACE}]*(?=[{re.escape(''.join(tag[0] for tag in tags))}]|\Z)"
    return re.compile(run), re.compile(rf"(?<![{SPACE}]){run}")
