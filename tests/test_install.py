"""The package installs with its native kernels where there is a compiler, and without where not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from twostroke.kernels import cpu

ROOT = Path(__file__).parents[1]
ASK = "from twostroke.kernels import cpu; print(cpu.available())"


def run(command: list[str | Path], **env: str) -> str:
    """With this environment alone, away from the sources."""
    found = subprocess.run(
        command,
        env=env,
        cwd="/",
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert found.returncode == 0, found.stdout
    return found.stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler, so no kernels are expected")
def test_this_installation_has_the_kernels() -> None:
    """What failed to compile would else be left out, and what tests it skipped."""
    assert cpu.available()
    assert "portable" in cpu.module().isas()


@pytest.mark.network
@pytest.mark.skipif(os.name != "posix", reason="has /bin/false")
@pytest.mark.parametrize("compiler", ["fails", "absent"])
def test_without_a_compiler_it_installs_and_says_so(compiler: str, tmp_path: Path) -> None:
    source, venv = tmp_path / "source", tmp_path / "venv"
    for name in ("twostroke", "native"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    # One that somebody built by hand is not of this installation.
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (source / "twostroke" / f"_native{suffix}").write_bytes(b"")
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if compiler == "fails":
        own |= {"CXX": "/bin/false", "CC": "/bin/false"}
    else:
        own |= {"PATH": str(venv / "bin")}
        own.pop("CXX", None)

    pip = [python, "-m", "pip", "install", "--no-deps", "--verbose"]
    assert "without its native kernels" in run([*pip, source], **own)

    purelib = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **own)
    installed = Path(purelib.strip()) / "twostroke"
    assert (installed / "llm.py").is_file()
    assert not list(installed.glob("_native*.so"))
    assert run([python, "-c", ASK], **own) == "False\n"
