"""Installation with the native kernels. Without a compiler the build downloads one; if the download
fails, the package installs without the kernels."""

from __future__ import annotations

import os
import re
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
    """Run a command outside the sources, with only these environment variables."""
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
    """Without this test, kernels that do not compile would only skip their tests."""
    assert cpu.available()
    assert "portable" in cpu.module().isas()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy the sources, because a build writes files beside them."""
    source = tmp_path / "source"
    for name in ("twostroke", "native"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, source)
    # A module that was built before does not belong to the installation.
    for built in (source / "twostroke").glob("_native*"):
        built.unlink()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (source / "twostroke" / f"_native{suffix}").write_bytes(b"")
    return source


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return the Python of a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    return tmp_path / "venv" / "bin" / "python"


def own_environment(**changes: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own.pop("CXX", None)
    return own | changes


def install(python: Path, source: Path, own: dict[str, str], *settings: str) -> tuple[str, Path]:
    """Install the package with settings of the build. Return pip's output and the package's
    folder."""
    words = [word for setting in settings for word in ("-C", setting)]
    command = [python, "-m", "pip", "install", "--no-deps", "--verbose", *words, source]
    said = run(command, **own)
    purelib = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **own)
    return said, Path(purelib.strip()) / "twostroke"


@pytest.mark.full
@pytest.mark.network
@pytest.mark.skipif(os.name != "posix", reason="has /bin/false")
def test_where_the_compiler_fails_it_installs_and_says_so(source: Path, python: Path) -> None:
    own = own_environment(CXX="/bin/false", CC="/bin/false")
    said, installed = install(python, source, own)
    assert "without its native kernels" in said
    assert (installed / "llm.py").is_file()
    assert not list(installed.glob("_native*.so"))
    assert run([python, "-c", ASK], **own) == "False\n"


ZIG_IS_USED = pytest.mark.skipif(
    sysconfig.get_platform() not in ("linux-x86_64", "linux-aarch64"), reason="zig is not used"
)


@pytest.fixture
def without_compiler(python: Path, tmp_path: Path) -> dict[str, str]:
    """Only a shell and the tools of CMake are on PATH. The build downloads 100 MB, once."""
    path, wheels = tmp_path / "path", tmp_path / "wheels"
    path.mkdir()
    for name in ("sh", "uname"):
        if found := shutil.which(name):
            (path / name).symlink_to(found)
    own = own_environment(PATH=str(path))
    # The version of the build backend, so that the test downloads the same file.
    (requirement,) = re.findall(r'^ZIG = "(.*)"$', (ROOT / "native/backend.py").read_text(), re.M)
    fetch = [python, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels, requirement]
    if subprocess.run(fetch, env=own, cwd="/", check=False, capture_output=True).returncode != 0:
        pytest.skip("the ziglang package cannot be fetched")
    own["PIP_FIND_LINKS"] = " ".join(filter(None, [own.get("PIP_FIND_LINKS"), str(wheels)]))
    return own


@pytest.mark.full
@pytest.mark.network
@ZIG_IS_USED
def test_without_a_compiler_zig_is_fetched_and_compiles(
    source: Path, python: Path, without_compiler: dict[str, str]
) -> None:
    """The sources with Python's headers and of one instruction set compile. The long suite also
    links them, for which zig compiles its C++ library for minutes."""
    kernels = "kernels_neon" if "aarch64" in sysconfig.get_platform() else "kernels_avx2"
    objects = [f"CMakeFiles/_native.dir/src/{name}.cpp.o" for name in ("module", kernels)]
    targets = "build.targets=" + ";".join(objects)
    only = ("wheel.cmake=true", targets, "install.components=nothing")
    said, _ = install(python, source, without_compiler, *only)
    assert "The CXX compiler identification is Clang" in said
    for name in objects:
        assert f"Building CXX object {name}" in said
    assert not re.search(r"Linking CXX", said)


@pytest.mark.long
@pytest.mark.network
@pytest.mark.timeout(1800)  # zig compiles libc++: a minute on two free cores
@ZIG_IS_USED
def test_without_a_compiler_the_kernels_are_built_with_zig(
    source: Path, python: Path, without_compiler: dict[str, str]
) -> None:
    own = without_compiler
    said, installed = install(python, source, own)
    assert "without its native kernels" not in said
    (module,) = installed.glob("_native*.so")
    assert run([python, "-c", ASK], **own) == "True\n"
    listed = run([python, "-m", "pip", "list"], **own)
    assert "twostroke" in listed
    assert "ziglang" not in listed

    # These kernels pass the tests of this installation's kernels.
    shutil.copy(module, source / "twostroke")
    shutil.copytree(ROOT / "tests", source / "tests")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/kernels/test_native.py",
    ]
    checked = subprocess.run(
        words,
        cwd=source,
        env=own_environment(PYTHONPATH=str(source)),
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert checked.returncode == 0, checked.stdout
    assert "skipped" not in checked.stdout.splitlines()[-1]
