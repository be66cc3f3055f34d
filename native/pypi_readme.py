"""The README for PyPI: relative links to files become links to the repository."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """scikit-build-core asks for this (`tool.dynamic-metadata` in pyproject.toml)."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = absolute(text, project["urls"]["Repository"])
    return {"readme": {"content-type": "text/markdown", "text": text}}


def absolute(text: str, repository: str) -> str:
    def link(found: re.Match[str]) -> str:
        image, label, path = found.groups()
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/main/{path})"

    return LINK.sub(link, text)
