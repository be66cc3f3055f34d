"""The native module, if the package was installed with it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pkgutil import extend_path
from types import ModuleType
from typing import Any

ISAS = ("auto", "amx", "avx512", "avx512bw", "avx2", "neon", "portable")


def _load() -> ModuleType | None:
    """Return the native module, or None if the installation could not build it."""
    try:
        from twostroke import _native
    except ImportError:
        return _load_installed()
    return _native


def _load_installed() -> ModuleType | None:
    """Return the module of the installed package. Needed if a source folder hides it."""
    spec = PathFinder.find_spec("twostroke._native", extend_path([], "twostroke"))
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


native = _load()


def available() -> bool:
    return native is not None


def module() -> Any:
    assert native is not None
    return native
