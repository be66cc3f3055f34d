"""Corrections of Triton's interpreter, and a faster patch of Triton's names.

Triton decides at its import whether it interprets kernels. The import of this module applies the
corrections in a process that interprets.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED and importlib.util.find_spec("triton"):
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
        """Patch as Triton does. Triton sorts all names of `package` in each call of a function."""
        if package not in builtins:
            names = [name for name in dir(package) if hasattr(package, name)]
            builtins[package] = [n for n in names if tl.core.is_builtin(getattr(package, n))]
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):  # not yet patched
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
