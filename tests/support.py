"""What several test modules share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from twostroke.model import hub


@cache
def default_model_path() -> Path:
    """The default model's GGUF file, fetched on the first use on a machine."""
    return hub.resolve(None).path
