"""What can go wrong because of an input, said to the person who gave it.

Every message says what was wrong, what was expected and what to do. Anything else that is raised
is a bug of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TwostrokeError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(TwostrokeError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class ModelError(TwostrokeError, ValueError):
    """A model cannot be found, read, or run by this version."""


class RequestError(TwostrokeError, ValueError):
    """A request is refused; no other request is affected."""


class EngineError(TwostrokeError, RuntimeError):
    """The engine failed while it was running a step."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or nothing if nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
