"""The requirements and the compiler of a build, with and without a compiler on the machine.

The build backend is real. A fake replaces scikit-build-core, which configures and compiles.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BACKEND = Path(__file__).parents[2] / "native" / "backend.py"
TOOLS = ["cmake>=3.20", "ninja>=1.5"]


class Builder(SimpleNamespace):
    """scikit-build-core: writes down what it was asked, and fails to compile if told to."""

    def __init__(self, failure: BaseException | None = None) -> None:
        super().__init__(failure=failure, asked=[])

    def requires(self, settings: Any = None) -> list[str]:
        return list(TOOLS)

    def build(self, folder: str, settings: dict[str, str]) -> str:
        names = ("CMAKE_ARGS", "CXX", "PATH", "ZIG_GLOBAL_CACHE_DIR")
        environment = {name: os.environ.get(name) for name in names}
        scripts = {path.name: path.read_text() for path in self._scripts(environment["CXX"])}
        self.asked.append((dict(settings), environment, scripts))
        if self.failure is not None and settings.get("wheel.cmake") != "false":
            raise self.failure
        return "twostroke.whl"

    @staticmethod
    def _scripts(compiler: str | None) -> list[Path]:
        return sorted(Path(compiler).parent.iterdir()) if compiler else []


class Machine:
    """The backend on a machine of our choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self._monkeypatch, self.path = monkeypatch, tmp_path / "bin"
        self.path.mkdir()
        self.builder = Builder()
        monkeypatch.setenv("PATH", str(self.path))
        monkeypatch.delenv("CXX", raising=False)
        self.backend = self._load()
        self.platform("linux-x86_64")
        self.headers(True)
        self.zig = tmp_path / "ziglang" / "zig"

    def _load(self) -> ModuleType:
        core = ModuleType("scikit_build_core.build")
        for name in ("build_wheel", "build_editable", "build_sdist"):
            setattr(core, name, lambda *words: self.builder.build(*words))
        for name in ("wheel", "editable", "sdist"):
            setattr(core, f"get_requires_for_build_{name}", lambda s: self.builder.requires(s))
        package = ModuleType("scikit_build_core")
        package.build = core  # type: ignore[attr-defined]
        self._monkeypatch.setitem(sys.modules, "scikit_build_core", package)
        self._monkeypatch.setitem(sys.modules, "scikit_build_core.build", core)
        spec = importlib.util.spec_from_file_location("backend_under_test", BACKEND)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def platform(self, name: str) -> None:
        self._monkeypatch.setattr(self.backend.sysconfig, "get_platform", lambda: name)
        self._monkeypatch.setattr(self.backend.platform, "libc_ver", lambda: ("glibc", "2.36"))

    def headers(self, there: bool) -> None:
        self._monkeypatch.setattr(self.backend, "_has_headers", lambda: there)

    def install_compiler(self, name: str) -> None:
        (self.path / name).write_text("#!/bin/sh\n")
        (self.path / name).chmod(0o755)

    def install_zig(self) -> None:
        found = SimpleNamespace(origin=str(self.zig.with_name("__init__.py")))
        self._monkeypatch.setattr(self.backend.importlib.util, "find_spec", lambda name: found)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    if os.name != "posix":
        pytest.skip("its scripts are for a shell")
    with monkeypatch.context() as patches:
        yield Machine(patches, tmp_path)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_zig_is_required_only_where_there_is_no_compiler(kind: str, machine: Machine) -> None:
    ask = getattr(machine.backend, f"get_requires_for_build_{kind}")
    assert ask() == [*TOOLS, machine.backend.ZIG]
    machine.install_compiler("c++")
    assert ask() == TOOLS


def test_the_compiler_named_in_the_environment_is_the_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_compiler("our-c++")
    assert machine.backend.get_requires_for_build_wheel() == [*TOOLS, machine.backend.ZIG]
    monkeypatch.setenv("CXX", "our-c++ -stdlib=libc++")
    assert machine.backend.get_requires_for_build_wheel() == TOOLS


@pytest.mark.parametrize("platform", ["linux-riscv64", "linux-armv7l", "macosx-14.0-arm64"])
def test_zig_is_not_required_where_it_was_not_tried(platform: str, machine: Machine) -> None:
    """A requirement that has no wheel would fail the whole installation."""
    machine.platform(platform)
    assert machine.backend.get_requires_for_build_wheel() == []
    machine.install_zig()
    assert machine.backend.build_wheel("dist") == "twostroke.whl"
    ((_, environment, _),) = machine.builder.asked
    assert environment["CXX"] is None


def test_nothing_is_fetched_that_would_be_of_no_use(machine: Machine) -> None:
    ask = machine.backend.get_requires_for_build_wheel
    for choice in ("false", "0", "OFF"):
        assert ask({"wheel.cmake": choice}) == TOOLS
    assert ask({"wheel.cmake": "true"}) == [*TOOLS, machine.backend.ZIG]
    machine.headers(False)  # of Python: without them no compiler helps
    assert ask() == []


def test_zig_compiles_for_every_machine_of_the_architecture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_zig()
    monkeypatch.setenv("CMAKE_ARGS", "-DOURS=1")
    before = dict(os.environ)
    assert machine.backend.build_wheel("dist") == "twostroke.whl"
    ((settings, environment, scripts),) = machine.builder.asked
    assert settings == {}
    folder = Path(environment["CXX"]).parent
    assert environment["PATH"] == f"{folder}{os.pathsep}{machine.path}"
    assert environment["ZIG_GLOBAL_CACHE_DIR"] == str(folder / "cache")
    target = "x86_64-linux-gnu.2.17"
    assert environment["CMAKE_ARGS"] == f"-DOURS=1 -DCMAKE_CXX_COMPILER_TARGET={target}"
    assert sorted(scripts) == ["ar", "c++", "ranlib"]
    assert f"exec {machine.zig} c++ -target {target} " in scripts["c++"]
    assert f'exec {machine.zig} ar "$@"' in scripts["ar"]
    assert not folder.exists()  # nor what zig kept there
    assert dict(os.environ) == before


def test_zig_is_left_alone_where_there_is_a_compiler(machine: Machine) -> None:
    machine.install_zig()
    machine.install_compiler("g++")
    machine.backend.build_wheel("dist")
    ((_, environment, scripts),) = machine.builder.asked
    assert environment["CXX"] is None
    assert not scripts


@pytest.mark.parametrize(
    ("zig", "compiler", "headers", "says"),
    [
        (True, False, True, "there is no C++ compiler, and with zig they could not be built. Inst"),
        (False, False, True, "no C++ compiler was found. Install a C++ compiler (Debian, Ubuntu:"),
        (False, True, True, "they could not be built. See above what the compiler said"),
        (False, True, False, "Python's headers are missing. Install them (Debian: python3-dev)"),
    ],
)
def test_what_cannot_be_built_is_left_out_with_what_to_do(
    zig: bool,
    compiler: bool,
    headers: bool,
    says: str,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if zig:
        machine.install_zig()
    if compiler:
        machine.install_compiler("c++")
    machine.headers(headers)
    machine.builder.failure = SystemExit(1)  # as scikit-build-core leaves when CMake fails
    assert machine.backend.build_wheel("dist") == "twostroke.whl"
    assert [asked[0] for asked in machine.builder.asked] == [{}, {"wheel.cmake": "false"}]
    printed = capsys.readouterr().out
    assert "twostroke is installed without its native kernels" in printed
    assert says in printed
    assert "pip install 'twostroke[reference]'" in printed


def test_who_insists_on_the_kernels_hears_of_the_failure(machine: Machine) -> None:
    machine.install_zig()
    machine.builder.failure = SystemExit(1)
    before = dict(os.environ)
    with pytest.raises(SystemExit):
        machine.backend.build_wheel("dist", {"wheel.cmake": "true"})
    assert len(machine.builder.asked) == 1
    assert dict(os.environ) == before
