"""axe-core, which checks a page's accessibility. Its package is fetched from npm's index for the
tests and is no part of this one."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.server.browser import Page

PACKAGE = "axe-core@4.14.0"


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


def findings(page: Page, axe: str) -> list[str]:
    """The serious and critical findings: rule, and the elements that break it."""
    page.value(f"{axe}; null")
    run = "axe.run({resultTypes: ['violations']}).then(found => found.violations)"
    return [
        f"{one['id']}: {node['target']}: {node['failureSummary']}"
        for one in page.resolved(run)
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
