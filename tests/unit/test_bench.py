"""Scripts are run from their folder's path: none may stand in the way of the standard library."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = sorted(path.stem for path in Path("bench").glob("*.py"))


def test_no_script_is_named_like_a_module_of_the_library() -> None:
    assert "scheduler" in SCRIPTS
    assert not set(SCRIPTS) & sys.stdlib_module_names
