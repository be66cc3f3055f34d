"""What can go wrong because of an input, said to the person who gave it.

Every message says what was wrong, what was expected and what to do. Anything else that is raised
is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sized


class TwostrokeError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(TwostrokeError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ModelError(TwostrokeError, ValueError):
    """A model cannot be found, read, or run by this version."""


class RequestError(TwostrokeError, ValueError):
    """A request is refused; no other request is affected.

    `param` and `code` are what OpenAI's API says of it besides the message.
    """

    def __init__(
        self, message: str = "", *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(TwostrokeError, RuntimeError):
    """The engine failed while it was running a step."""


MAX_SHOWN_CHARS = 100  # of what a user gave, in a message
MAX_SHOWN_ENTRIES = 16


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The text, without its middle if it is long."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    return f"{text[:head]} … {text[head - max_chars :]}"


def shown(value: object) -> str:
    """What a user gave, as a message may repeat it: short, and found quickly."""
    if isinstance(value, str):
        return repr(shortened(value))
    if isinstance(value, Sized) and len(value) > MAX_SHOWN_ENTRIES:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"this {type(value).__name__}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or nothing if nothing is near."""
    if len(name) > MAX_SHOWN_CHARS:
        return ""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
