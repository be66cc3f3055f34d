"""The output of a benchmark script: one JSON line, and a file if `--json FILE` is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(result: Any, path: Path | str | None, indent: int | None = None) -> None:
    """Print the result as one JSON line, and write it to `path` with `indent`."""
    print(json.dumps(result))
    if path:
        Path(path).write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")
