"""The build backend: scikit-build-core's, except that what cannot be built is left out.

Without a compiler (or CMake) the package installs without the native kernels, and CPUs compute with
torch. `pip install -C wheel.cmake=true .` insists on the kernels, `=false` does without. pip shows
what is printed here with `-v` alone, so the engine says it once more when it starts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Callable

from scikit_build_core import build as core
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

Settings = dict[str, list[str] | str]

# Not prepare_metadata_*: what a wheel is called is known once it is built.
__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

CHOICE = "wheel.cmake"
WITHOUT = (
    "\n*** twostroke is installed without its native kernels ({reason}): on a CPU it will be slow. "
    "For the kernels install a C++ compiler, and then twostroke again.\n"
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
    """CMake and Ninja, unless they would be of no use."""
    return ask(settings) if CHOICE in (settings or {}) or _finds_compiler() else []


def _finds_compiler() -> bool:
    own = os.environ.get("CXX")
    names = [own] if own else [sysconfig.get_config_var("CXX"), "c++", "g++", "clang++", "cl"]
    return any(shutil.which(shlex.split(name)[0]) for name in names if name)


def _build(
    build: Callable[[str, Settings | None], str], folder: str, settings: Settings | None
) -> str:
    if CHOICE in (settings or {}):
        return build(folder, settings)
    try:
        return build(folder, settings)
    except (Exception, SystemExit) as error:  # it leaves with a status when CMake fails
        name = build(folder, {**(settings or {}), CHOICE: "false"})
        failed = "they could not be built" if isinstance(error, SystemExit) else error
        reason = failed if _finds_compiler() else "no C++ compiler was found"
        print(WITHOUT.format(reason=reason), flush=True)
        return name
