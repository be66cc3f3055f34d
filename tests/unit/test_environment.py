"""Only `twostroke/environment.py` reads settings from environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "twostroke"
USE = re.compile(r"\b(os\.environb?|getenv|putenv)\b")
# Modules that use the environment on behalf of another program, and that program.
FOR_OTHER_PROGRAMS = {
    "child_process.py": "a child process inherits the environment",
    "commands/serve_settings.py": "huggingface_hub reads HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE",
    "exec/nccl_log.py": "NCCL reads NCCL_DEBUG and NCCL_DEBUG_FILE",
    "kv/nixl.py": "NIXL reads NIXL_LOG_LEVEL",
    "model/find/packaged.py": "pip inherits the environment, with a TMPDIR of its own",
    "sandbox.py": "a sandboxed process inherits a few variables",
}


def users(package: Path) -> set[str]:
    """Return the files of a package that use the environment."""
    return {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if USE.search(path.read_text(encoding="utf-8"))
    }


def test_settings_are_read_from_the_environment_in_one_file() -> None:
    found = users(PACKAGE) - {"environment.py"}
    assert found == FOR_OTHER_PROGRAMS.keys()


@pytest.mark.parametrize("line", ["os.environ['X']", "from os import getenv", "os.environb"])
def test_a_module_that_uses_the_environment_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    (tmp_path / "other.py").write_text("environment = dict()")
    assert users(tmp_path) == {"module.py"}
