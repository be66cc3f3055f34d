"""axe-core, which checks a page's accessibility. Its package is fetched from npm's index for the
tests and is no part of this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.server.browser import Page

PACKAGE = "axe-core@4.14.0"
SERIOUS = ("serious", "critical")
# Rules that read colours. A theme changes colours alone.
COLOUR_RULES = ["color-contrast", "link-in-text-block"]


def fetch_axe(folder: Path) -> str:
    """The source of axe-core; the test is skipped where it cannot be fetched."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "pack", "--silent", PACKAGE]
    if subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode != 0:
        pytest.skip("the axe-core package cannot be fetched")
    (package,) = folder.glob("axe-core-*.tgz")
    with tarfile.open(package) as files:
        source = files.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


class AxeCheck:
    """Checks a page in both themes at one width: every rule in the light theme, and the rules that
    read colours in the dark theme.

    check = AxeCheck(page, axe, width=1200)
    check("the first state")
    """

    def __init__(self, page: Page, axe: str, width: int) -> None:
        self._page, self._axe, self._width = page, axe, width

    def __call__(self, state: str) -> None:
        for theme, rules in (("light", None), ("dark", COLOUR_RULES)):
            self._page.look(self._width, 800, theme)
            found = self.findings(rules)
            assert not found, (state, theme, found)

    def findings(self, rules: list[str] | None = None) -> list[str]:
        """The serious and critical findings: rule, and the elements that break it."""
        if not self._page.value("'axe' in window"):
            self._page.value(f"{self._axe}; null")
        only = f"runOnly: {json.dumps(rules)}," if rules else ""
        options = f"{{{only} resultTypes: ['violations']}}"
        found = self._page.resolved(f"axe.run({options}).then(found => found.violations)")
        return [
            f"{one['id']}: {node['target']}: {node['failureSummary']}"
            for one in found
            if one["impact"] in SERIOUS
            for node in one["nodes"]
        ]
