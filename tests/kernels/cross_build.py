"""A sysroot and a build of the native kernels for the other architecture, Arm or x86.

A sysroot consists of Debian packages and Python wheels. Making it needs no root and changes nothing
of the system. A cache folder (`TWOSTROKE_TEST_CACHE`) keeps sysroots and builds.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("TWOSTROKE_TEST_CACHE") or "~/.cache/twostroke-tests")
CACHE = CACHE.expanduser().resolve()
PACKAGES = ("python3", "libpython3-dev", "libstdc++6")
NANOBIND = "nanobind>=2.4"
TEST_PACKAGES = ("gguf", "jinja2", "numpy", "pytest", "safetensors", "tokenizers")
TEST_WHEELS = tuple(f"{name}=={version(name)}" for name in TEST_PACKAGES)
GLIBCS = ("manylinux2014", "manylinux_2_27", "manylinux_2_28")
QEMU_WITH_AVX2 = (7, 2)


class MissingError(Exception):
    """A tool or a network that the check needs and this machine has not."""


@dataclass(frozen=True)
class Architecture:
    machine: str  # as `uname -m` prints it
    debian: str
    isas: tuple[str, ...]  # the instruction sets that the module is compiled for

    @property
    def compiler(self) -> str:
        return f"{self.machine}-linux-gnu-g++"

    @property
    def emulator(self) -> str:
        return f"qemu-{self.machine}"


X86 = Architecture("x86_64", "amd64", ("amx", "avx512", "avx512bw", "avx2", "portable"))
ARM = Architecture("aarch64", "arm64", ("neon", "portable"))
THIS, OTHER = (X86, ARM) if platform.machine() == X86.machine else (ARM, X86)


@functools.cache
def require_tools() -> None:
    if sys.platform != "linux" or platform.machine() != THIS.machine:
        raise MissingError("the other architecture is known for Linux on x86_64 and aarch64 only")
    packages = {"apt-get": "apt", "dpkg-deb": "dpkg", "cmake": "cmake", "ninja": "ninja-build"}
    packages |= {one.emulator: "qemu-user" for one in (THIS, OTHER)}
    packages |= {THIS.compiler: "g++"}
    packages |= {OTHER.compiler: f"g++-{OTHER.machine.replace('_', '-')}-linux-gnu"}
    missing = {package for tool, package in packages.items() if shutil.which(tool) is None}
    if missing:
        raise MissingError(f"missing Debian packages: {' '.join(sorted(missing))}")
    if importlib.util.find_spec("pip") is None:
        raise MissingError("this Python has no pip: python -m ensurepip")
    if emulator_version() < QEMU_WITH_AVX2:
        raise MissingError("QEMU emulates AVX2 from 7.2 on: install a newer qemu-user")


@functools.cache
def emulator_version() -> tuple[int, ...]:
    found = re.search(r"version (\d+)\.(\d+)", run(OTHER.emulator, "--version"))
    assert found
    return tuple(map(int, found.groups()))


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        line = " ".join(map(str, command))
        raise RuntimeError(f"{line}: exit status {done.returncode}\n{done.stdout[-5000:]}")
    return done.stdout


def fetch(*command: str | Path) -> None:
    """Run a command that needs a network."""
    try:
        run(*command)
    except RuntimeError as error:
        raise MissingError(f"no packages could be fetched: {error}") from error


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time has the lock. The system frees the lock of a process that ends."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache. `make` fills a folder of another name, which is renamed at
    the end: a folder with the right name is complete."""
    folder, partial = CACHE / name, CACHE / f"{name}.partial"
    with locked(name):
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


# The sysroot


def sysroot() -> Path:
    """Return the sysroot of the other architecture."""
    release = platform.freedesktop_os_release()
    key = digest(release["ID"], release.get("VERSION_ID"), PACKAGES)
    return make_once(f"sysroot-{OTHER.machine}-{key}", _make_sysroot)


def _make_sysroot(folder: Path) -> None:
    for name in ("bin", "lib", "lib64", "sbin"):  # packages may still put files into /lib
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for package in _fetch_packages(folder / "apt"):
        unpack = 'dpkg-deb --fsys-tarfile "$1" | tar --extract --keep-directory-symlink -C "$2"'
        run("bash", "-o", "pipefail", "-c", unpack, "unpack", package, folder)
    shutil.rmtree(folder / "apt")
    for link in folder.rglob("*"):
        if link.is_symlink() and link.readlink().is_absolute():
            target = folder / link.readlink().relative_to("/")
            link.unlink()
            link.symlink_to(os.path.relpath(target, link.parent.resolve()))


def _fetch_packages(folder: Path) -> list[Path]:
    """Return the files of `PACKAGES` and of all packages that they depend on. apt-get has lists, a
    cache and a package database of its own; sources, keys and proxies are the system's."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Architecture": OTHER.debian,
        "APT::Architectures": OTHER.debian,
        "APT::Sandbox::User": "root",  # the user _apt may not read the folder
        "Acquire::Languages": "none",
        "Acquire::http::Timeout": "20",
        "Dir::Cache": folder,
        "Dir::State": folder,
        "Dir::State::status": folder / "status",
    }
    hooks = ("APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success", "DPkg::Post-Invoke")
    lines = [f"#clear {hook};" for hook in hooks]
    lines += [f'{name} "{value}";' for name, value in settings.items()]
    (folder / "apt.conf").write_text("\n".join(lines) + "\n")
    apt = ("apt-get", "-c", folder / "apt.conf")
    fetch(*apt, "update")
    fetch(*apt, "install", "--yes", "--download-only", "--no-install-recommends", *PACKAGES)
    return sorted((folder / "archives").glob("*.deb"))


def python_of(folder: Path) -> Path:
    """Return the Python of a sysroot."""
    (python,) = (folder / "usr/bin").glob("python3.[0-9]*[0-9]")
    return python


def wheels(*requirements: str) -> Path:
    """Return a folder with Python packages for the sysroot's Python."""
    python = python_of(sysroot()).name.removeprefix("python")

    def install(folder: Path) -> None:
        platforms = [f"--platform={glibc}_{OTHER.machine}" for glibc in GLIBCS]
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        pip += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        fetch(*pip, *platforms, f"--target={folder}", *requirements)

    return make_once(f"wheels-{OTHER.machine}-{digest(python, requirements)}", install)


# The build


def build(architecture: Architecture) -> Path:
    """Return a folder with the module `_native` and the program `kernels_check`."""
    kinds = (".cpp", ".h", ".txt")
    sources = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in kinds)
    content = [(str(path.relative_to(ROOT)), path.read_bytes()) for path in sources]
    tools = run(architecture.compiler, "--version"), sys.version, sysroot().name
    work = CACHE / f"work-{architecture.machine}-{digest(tools)}"

    def compile_to(folder: Path) -> None:
        with locked(work.name):
            _copy_changed(content, work)
            _compile(architecture, work)
            for path in [*(work / "build").glob("_native*.so"), work / "build/kernels_check"]:
                shutil.copy2(path, folder)

    return make_once(f"build-{architecture.machine}-{digest(content, tools)}", compile_to)


def _copy_changed(content: Sequence[tuple[str, bytes]], work: Path) -> None:
    """Copy files that differ. Ninja compiles what is newer than its object file: a file that goes
    back to an older version must be newer, too."""
    wanted = {work / name: data for name, data in content}
    for path in (work / "native").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for path, data in wanted.items():
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _compile(architecture: Architecture, work: Path) -> None:
    """Compile as `pip install` does: a Release build."""
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": architecture.compiler,
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": wheels(NANOBIND) / "nanobind/cmake",
    }
    if architecture is OTHER:
        # CMake asks the emulated Python for its headers and for the name of a module.
        python = work / "python"
        emulator = f'{OTHER.emulator} -L "{sysroot()}" "{python_of(sysroot())}"'
        python.write_text(f'#!/bin/sh\nexec {emulator} "$@"\n')
        python.chmod(0o755)
        options |= {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": OTHER.machine,
            "CMAKE_CXX_FLAGS": f"-idirafter '{sysroot() / 'usr/include'}'",
            "Python_EXECUTABLE": python,
        }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    run("cmake", "-G", "Ninja", "-S", work / "native", "-B", work / "build", *defined)
    run("cmake", "--build", work / "build", "--target", "_native", "kernels_check")
