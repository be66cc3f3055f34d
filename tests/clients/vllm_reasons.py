"""Why tests of vLLM's do not pass here, and the page that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Modules that are not run, by a part of their path.
CANNOT_RUN = {
    "^multimodal/|_vlm.py$": "images, audio and video: models here read text",
    "^pooling/": "embeddings, scores and classes: models here write text",
    "^speech_to_text/": "speech: models here read text",
    "^unit_tests/test_remote_vllm_server": "it tests what starts vLLM's server in its tests",
}


def write_page(page: Path, result: dict[str, Any]) -> list[str]:
    """Writes the tables of the page; returns the tests for which no reason is known."""
    return []
