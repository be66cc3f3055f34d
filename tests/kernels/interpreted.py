"""Triton decides at its import whether it interprets: tests of interpreted kernels run in a pytest
of their own, which a test of the same file starts. There, the interpreter is mended and made
faster by the import of this module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]

if INTERPRETED:
    import numpy as np
    import torch
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def with_bounds_that_numpy_takes(tensor: Any, scope: Any) -> None:
        """Triton 3.6 calls int() on arrays of one element for a loop's bounds; numpy 2.4 won't."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_bounds_that_numpy_takes

    convert_float = interpreter._convert_float
    FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def rounded_to_nearest(given: Any, kind: Any, to: Any, mode: Any) -> Any:
        """Triton's interpreter loses the carry where rounding up to fp8 ends in a power of two."""
        if to.name not in FP8 or kind.name not in ("fp16", "fp32"):
            return convert_float(given, kind, to, mode)
        wide = torch.from_numpy(np.ascontiguousarray(given))
        return wide.to(FP8[to.name]).view(torch.uint8).numpy()

    interpreter._convert_float = rounded_to_nearest

    builtins: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        """As Triton does, which sorts all names of `package` in every call of a device function."""
        if package not in builtins:
            names = [name for name in dir(package) if hasattr(package, name)]
            builtins[package] = [n for n in names if tl.core.is_builtin(getattr(package, n))]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not yet patched
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def crossed(first: Sequence[Any], second: Sequence[Any], most: int) -> list[Any]:
    """Parameters: each of `first` with each of `second`, tuples joined. `most` of `second`, others
    for each of `first` in turn, are run always; the rest is of the long suite."""
    found = []
    for row, left in enumerate(first):
        for column, right in enumerate(second):
            each = [value if isinstance(value, tuple) else (value,) for value in (left, right)]
            long = (row + column) % len(second) >= most
            found.append(pytest.param(*each[0], *each[1], marks=pytest.mark.long if long else ()))
    return found


def run_interpreted(file: str, marked: str = "not long") -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", marked, file]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
