"""Launches of kernels that Triton has prepared before.

    the first of its kind    kernel[grid](…)      Triton looks at every argument, and compiles
    the others               compiled.run(…)      what it came to, with these pointers

To look at every argument takes Triton longer than many a kernel runs. Here what it would find is a
key: the constants, the types, the numbers that a kernel may be specialised on. Pointers that are
not aligned, the interpreter, and a Triton that launches in another way, go Triton's way always.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.runtime import driver

ALIGNED = 16  # bytes: what Triton specialises on
CACHE = slice(1, 3)  # keys and values among the tensors of a kernel that attends

Tensors = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

# By variant, device and all else that decides what Triton compiles.
_compiled: dict[tuple[object, ...], Any] = {}


def _is_known() -> bool:
    """Whether the `run` of what this Triton compiles takes what it is given here."""
    major, minor = triton.__version__.split(".")[:2]
    return (3, 3) <= (int(major), int(minor)) < (4, 0)


class Variant:
    """A kernel with its constants and options.

    Its arguments are tensors, or None; then what differs from launch to launch (numbers that it is
    not specialised on, tensor descriptors); then other numbers; then the constants.
    """

    def __init__(self, kernel: Any, **given: Any) -> None:
        self.kernel, self.given = kernel, given
        self.constants = [given[name] for name in kernel.arg_names if name in given]
        self.can_repeat = _is_known() and hasattr(kernel, "params")  # else it is interpreted
        params = kernel.params if self.can_repeat else ()
        self.aligned = [not param.do_not_specialize_on_alignment for param in params]

    def __call__(
        self, grid: tuple[int, ...], tensors: Tensors, varying: tuple[Any, ...], fixed: Numbers
    ) -> None:
        Launch(self, grid, tensors, varying, fixed)()


class Launch:
    """One launch of a variant, on the stream that is the current one when this is made."""

    __slots__ = ("_args", "_first", "_grid", "_key", "_numbers", "_run", "_tensors", "_variant")

    def __init__(
        self,
        variant: Variant,
        grid: tuple[int, ...],
        tensors: Tensors,
        varying: tuple[Any, ...],
        fixed: Numbers,
    ) -> None:
        self._variant, self._grid, self._tensors = variant, grid, tensors
        self._numbers = varying + fixed
        self._key = self._key_of(fixed) if variant.can_repeat else None
        self._run: Any = None  # what is called with `_args`
        self._prepare()

    def __call__(self) -> None:
        if self._run is not None:
            self._run(*self._args)
        else:
            self._dispatch(self._tensors, self._key)

    def over(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The same over the cache of another layer, like the one that it was made with."""
        first, second = keys.data_ptr(), values.data_ptr()
        is_aligned = (first | second) % ALIGNED == 0
        if self._run is not None and is_aligned:
            self._args[self._first] = first
            self._args[self._first + 1] = second
            self._run(*self._args)
        else:
            tensors = (*self._tensors[: CACHE.start], keys, values, *self._tensors[CACHE.stop :])
            self._dispatch(tensors, self._key if is_aligned else None)

    def _key_of(self, fixed: Numbers) -> tuple[object, ...] | None:
        """None where a pointer is not aligned."""
        kinds, bits = [], 0
        for tensor, aligned in zip(self._tensors, self._variant.aligned, strict=False):
            kinds.append(None if tensor is None else tensor.dtype)
            if aligned and tensor is not None:
                bits |= tensor.data_ptr()
        if bits % ALIGNED:
            return None
        return self._variant, driver.active.get_current_device(), fixed, *kinds

    def _prepare(self) -> None:
        compiled = None if self._key is None else _compiled.get(self._key)
        if compiled is None:
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        head = [*(*self._grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata]
        head += [None] * 3  # no hooks: those are for profilers of Triton's own
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self._tensors]
        self._args = [*head, *pointers, *self._numbers, *self._variant.constants]
        self._first = len(head) + CACHE.start
        self._run = compiled.run

    def _dispatch(self, tensors: Tensors, key: tuple[object, ...] | None) -> None:
        variant = self._variant
        compiled = variant.kernel[self._grid](*tensors, *self._numbers, **variant.given)
        if key is not None and compiled is not None:
            _compiled[key] = compiled
            self._prepare()
