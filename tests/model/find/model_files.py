"""What the tests of the places that models come from share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import ModelError
from twostroke.model.find.hub import resolve

GGUF = b"GGUF" + bytes(range(256)) * 2000  # what a whole file looks like from outside


def refusal(*args: Any, **kwargs: Any) -> str:
    """What `resolve` says when it refuses."""
    with pytest.raises(ModelError) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
