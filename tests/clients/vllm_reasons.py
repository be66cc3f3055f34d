"""Why tests of vLLM's do not pass here, and the page that says so."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

# Modules that are not run, by a part of their path.
CANNOT_RUN = {
    "^multimodal/|_vlm.py$|_multimodal": "images, audio and video: models here read text",
    "^pooling/": "embeddings, scores and classes: models here write text",
    "^speech_to_text/": "speech: models here read text",
    "^unit_tests/test_remote_vllm_server": "it tests what starts vLLM's server in its tests",
}

# By a part of "module::test" and by a part of what was said; the first that fits.
REASONS: list[tuple[str, str, str]] = []

BEGIN, END = "<!-- vllm_tests begin -->", "<!-- vllm_tests end -->"
COUNTED = ("passed", "different", "missing")
TITLES = {
    "missing": ("### Missing", "what is missing"),
    "different": ("### Different", "why"),
    "cannot run": ("### Cannot be run", "why"),
}


def write_page(page: Path, result: dict[str, Any]) -> list[str]:
    """Writes the tables of the page; returns the tests for which no reason is known."""
    found = [
        (module, name, outcome, said)
        for module, run in result["modules"].items()
        for name, (outcome, said) in run["tests"].items()
    ]
    unknown = []
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module, name, outcome, said in found:
        if outcome not in (*TITLES, "not finished", "not collected"):
            continue
        reason = said if outcome == "cannot run" else _reason(f"{module}::{name}", said)
        if reason is None:
            unknown.append(f"{module}::{name} ({outcome}): {said}")
        groups.setdefault((outcome, reason or "not looked into"), []).append((module, name))
    counts = Counter(outcome for _, _, outcome, _ in found)
    lines = [f"| {' | '.join(COUNTED)} |", "|---|---|---|"]
    lines.append(f"| {' | '.join(str(counts[name]) for name in COUNTED)} |")
    for outcome, (title, column) in TITLES.items():
        rows = [(reason, tests) for (kind, reason), tests in groups.items() if kind == outcome]
        if rows:
            lines += ["", title, "", f"| tests | in | {column} |", "|---|---|---|"]
            rows.sort(key=lambda row: -len(row[1]))
            lines += [f"| {len(tests)} | {_where(tests, found)} | {why} |" for why, tests in rows]
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))
    return unknown


def _reason(test: str, said: str) -> str | None:
    for in_test, in_said, reason in REASONS:
        if re.search(in_test, test) and re.search(in_said, said):
            return reason
    return None


def _where(tests: list[tuple[str, str]], found: list[tuple[str, str, str, str]]) -> str:
    """Modules, each with the names of its tests if they are not all that ask the server."""
    counted = Counter(module for module, _, outcome, _ in found if outcome in COUNTED)
    by_module: dict[str, list[str]] = {}
    for module, name in tests:
        by_module.setdefault(module, []).append(name)
    parts = []
    for module, names in by_module.items():
        short = sorted({name.partition("[")[0].rpartition("::")[2] for name in names})
        is_all = len(names) >= counted[module]
        parts.append(f"`{module}`" + ("" if is_all else f": {', '.join(f'`{s}`' for s in short)}"))
    return "; ".join(parts)
