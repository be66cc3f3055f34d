"""Scripts in bench/ do not hide modules of the standard library, whose names Python finds later."""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPTS = sorted(path.stem for path in Path("bench").glob("*.py"))


def test_no_script_has_the_name_of_a_standard_module() -> None:
    assert "scheduler" in SCRIPTS
    assert not set(SCRIPTS) & sys.stdlib_module_names
