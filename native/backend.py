"""The build backend: scikit-build-core, with a compiler for machines that have none.

If no C++ compiler is found, the build requires the ziglang package and compiles with its clang. If
the package is not available or fails, the package is installed without the native kernels. With
`pip install -C wheel.cmake=true .` the build fails instead; `=false` builds no kernels. pip shows
the output of this module only with `-v`, so the engine repeats the message at start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from scikit_build_core import build as core
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

Settings = dict[str, list[str] | str]

# Not prepare_metadata_*: the name of a wheel is known only after the build.
__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

CHOICE = "wheel.cmake"
# The tested version: its kernels pass all tests, and their speed is within 5% of GCC's. zig changes
# its command line between versions (before 1.0), so test another version before using it.
ZIG = "ziglang==0.17.*"
ZIG_PLATFORMS = {"linux-x86_64": "x86_64", "linux-aarch64": "aarch64"}
WITHOUT = (
    "\n*** twostroke is installed without its native kernels, which compute on a CPU: {reason}. "
    "{advice}, and install twostroke again. Until then it computes with torch, slowly: "
    "pip install 'twostroke[reference]'\n"
)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return _requires(core.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return _requires(core.get_requires_for_build_editable, config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _build(core.build_wheel, wheel_directory, config_settings)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    return _build(core.build_editable, wheel_directory, config_settings)


def _requires(ask: Callable[[Settings | None], list[str]], settings: Settings | None) -> list[str]:
    """Return the build requirements: CMake and Ninja, and zig if there is no compiler; none if the
    kernels cannot be built."""
    choice = (settings or {}).get(CHOICE)
    if choice is not None and str(choice).lower() in ("", "0", "false", "no", "off"):
        return ask(settings)
    if _finds_compiler():
        return ask(settings)
    if _has_headers() and sysconfig.get_platform() in ZIG_PLATFORMS:
        return [*ask(settings), ZIG]
    return [] if choice is None else ask(settings)


def _finds_compiler() -> bool:
    own = os.environ.get("CXX")
    names = [own] if own else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++", "cl"]
    return any(shutil.which(shlex.split(name)[0]) for name in names if name)


def _has_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def _build(
    build: Callable[[str, Settings | None], str], folder: str, settings: Settings | None
) -> str:
    settings = settings or {}
    zig = None if _finds_compiler() else _find_zig()
    try:
        with contextlib.nullcontext() if zig is None else _compiling_with(zig):
            return build(folder, settings)
    except (Exception, SystemExit) as error:  # scikit-build-core exits if CMake fails
        if CHOICE in settings:
            raise
        name = build(folder, {**settings, CHOICE: "false"})
        failed = "they could not be built" if isinstance(error, SystemExit) else str(error)
        print(_without(failed, zig), flush=True)
        return name


def _without(failed: str, zig: Path | None) -> str:
    advice = "Install a C++ compiler (Debian, Ubuntu: apt install g++)"
    if not _has_headers():
        reason, advice = "Python's headers are missing", "Install them (Debian: python3-dev)"
    elif zig is not None:
        reason = f"there is no C++ compiler, and with zig {failed}"
    elif _finds_compiler():
        reason, advice = failed, "See above what the compiler said (pip install -v), mend it"
    else:
        reason = "no C++ compiler was found"
    return WITHOUT.format(reason=reason, advice=advice)


def _find_zig() -> Path | None:
    """Return the path of zig in the ziglang package, if the package is installed and the platform
    is supported."""
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None or sysconfig.get_platform() not in ZIG_PLATFORMS:
        return None
    return Path(found.origin).with_name("zig")


@contextlib.contextmanager
def _compiling_with(zig: Path) -> Iterator[None]:
    """Put zig's `c++`, `ar` and `ranlib` first on the PATH, and set CXX to its `c++`."""
    # An explicit target means the baseline of the architecture, not the processor of this machine,
    # and a libc that is old enough for all machines that install current wheels. `-idirafter`:
    # Debian's pyconfig.h includes another pyconfig.h by its path under /usr/include.
    libc = "gnu.2.17" if platform.libc_ver()[0] == "glibc" else "musl"
    target = f"{ZIG_PLATFORMS[sysconfig.get_platform()]}-linux-{libc}"
    arguments = {
        "c++": f"c++ -target {target} -g0 -idirafter /usr/include",
        "ar": "ar",
        "ranlib": "ranlib",
    }
    own = os.environ.get("CMAKE_ARGS", "")
    with tempfile.TemporaryDirectory(prefix="twostroke-zig-") as folder:
        for name, words in arguments.items():
            script = Path(folder, name)
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(zig))} {words} "$@"\n')
            script.chmod(0o755)
        changed = {
            "CXX": str(Path(folder, "c++")),
            # With a given target, CMake tests the compiler without linking. To link, zig would
            # first build its C++ library.
            "CMAKE_ARGS": f"{own} -DCMAKE_CXX_COMPILER_TARGET={target}",
            "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)]),
            "ZIG_GLOBAL_CACHE_DIR": str(Path(folder, "cache")),
            "ZIG_LOCAL_CACHE_DIR": str(Path(folder, "cache")),
        }
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
