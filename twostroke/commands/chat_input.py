"""Messages of `twostroke chat`: lines from a terminal with a stored history, or from a pipe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

MAX_HISTORY = 1000  # messages


class History:
    """The messages of earlier conversations for the arrow keys. The file has a JSON string on each
    line, because a message may have several lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._readline = _import_readline()
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines()[-MAX_HISTORY:]:
                self._readline.add_history(str(json.loads(line)))

    def add(self, message: str) -> None:
        if self._readline is None:
            return
        self._readline.add_history(message)
        with contextlib.suppress(OSError):  # a conversation continues without its history
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message) + "\n")
            self._path.chmod(0o600)


def read_turns(lines: Iterator[str | None], keep: Callable[[str], None]) -> Iterator[str]:
    """Yield messages, after `keep` has stored each of them. A line that ends with a backslash
    continues on the next line. None drops the lines of the present message. Empty messages are
    left out."""
    parts: list[str] = []
    for line in lines:
        if line is None:
            parts = []
            continue
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            if message := "\n".join(parts).strip():
                keep(message)
                yield message
            parts = []
    if message := "\n".join(parts).strip():
        keep(message)
        yield message


def terminal_lines() -> Iterator[str | None]:
    prompt = "> "
    while True:
        line: str | None = None
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # drop the message, as a shell does
            print()
        yield line
        prompt = "… " if line is not None and line.endswith("\\") else "> "


def piped_lines() -> Iterator[str | None]:
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _import_readline() -> ModuleType | None:
    """Return the module that adds editing to `input`; None if Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
