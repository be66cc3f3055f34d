"""The native kernels, where the package was built with them."""

from __future__ import annotations

from typing import Any

try:
    from twostroke import _native as native
except ImportError:  # no compiler at the installation, or run from the folder: torch's paths remain
    native = None

ISAS = ("auto", "avx512", "avx2", "neon", "portable")


def available() -> bool:
    return native is not None


def module() -> Any:
    assert native is not None
    return native
