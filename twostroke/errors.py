"""The errors whose messages are for users. Every message says what was wrong, what was expected and
what to do. Any other exception is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sized


class TwostrokeError(Exception):
    """The base class of errors whose messages are for the user."""


class ConfigError(TwostrokeError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ModelError(TwostrokeError, ValueError):
    """A model cannot be found, read, or run by this version."""


class RequestError(TwostrokeError, ValueError):
    """A request is refused. No other request is affected. `param` and `code` are fields of an error
    in OpenAI's API."""

    def __init__(
        self, message: str = "", *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(TwostrokeError, RuntimeError):
    """An engine could not start, failed or was closed."""


MAX_SHOWN_CHARS = 100  # characters of a user's value in a message
MAX_SHOWN_ENTRIES = 16


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return the text, without the middle of a long text."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    return f"{text[:head]} … {text[head - max_chars :]}"


def shown(value: object) -> str:
    """Return a short form of a user's value for a message."""
    if isinstance(value, str):
        return repr(shortened(value))
    if isinstance(value, Sized) and len(value) > MAX_SHOWN_ENTRIES:
        return f"a {type(value).__name__} of {len(value)}"
    try:
        return shortened(repr(value))
    except (ValueError, RecursionError):  # a number with thousands of digits, or deep nesting
        return f"this {type(value).__name__}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for a misspelt name; an empty text if no known name is close."""
    if len(name) > MAX_SHOWN_CHARS:
        return ""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
