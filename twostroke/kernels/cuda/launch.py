"""Launches of kernels that Triton has prepared before.

    the first of its kind    kernel[grid](…)      Triton looks at every argument, and compiles
    the others               compiled.run(…)      what it came to, with these pointers

To look at every argument takes Triton longer than many a kernel runs. Here what it would find is a
key: the constants, the types, the numbers that a kernel may be specialised on. Pointers that are
not aligned, the interpreter, and a Triton whose launches were not tested, go Triton's way always.

What is compiled belongs to its `Variant`, as Triton's own cache does to the kernel: it depends on
the key alone, so that engines of one process may share it. Compiling ahead is of the thread that
asked for it; others launch meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver

# Versions of Triton whose compiled kernels take the arguments given here: `test_cuda_launch.py`
# passes with each.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
ALIGNED = 16  # bytes: what Triton specialises on
FIRST = 9  # of the arguments of `run`: where the kernel's own begin

Tensors = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

# Inside `compile_ahead`: what was asked for, by variant and key. Outside: None.
_ahead: ContextVar[dict[object, Any] | None] = ContextVar("compile_ahead", default=None)


def compile_ahead(run: Callable[[], object], of: object) -> None:
    """Compile the kernels that `run` would launch, many at a time; none of them is launched, so its
    tensors need no memory. A launch that differs from them after all compiles on its own.

    `of`: all that decides what those are. Once that is compiled a file beside Triton's own says so,
    and the next start loads each kernel where it is first launched."""
    mark = _mark(of)
    if mark.exists():
        return
    asked: dict[object, Any] = {}
    with _without_collections(), ThreadPoolExecutor() as threads:
        with _compiled_by(threads):
            token = _ahead.set(asked)
            try:
                run()
            finally:
                _ahead.reset(token)
        done = list(threads.map(_build_launcher, asked.values()))
    if not all(done):
        return
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Threads that parse fail each other if one is interrupted by another, as before Python 3.13
    they count their depth in one place ("AST constructor recursion depth mismatch"). Parsers are
    interrupted by the garbage collector alone, where something in Python follows it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled_by(threads: ThreadPoolExecutor) -> AbstractContextManager[object]:
    """What Triton is asked to compile in here, `threads` compile; what goes wrong there goes wrong
    again where it is launched, and is told there."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # one after another then
        return nullcontext()
    mode: AbstractContextManager[object] = AsyncCompileMode(threads, ignore_errors=True)
    return mode


def _mark(of: object) -> Path:
    digest = sha256(repr((of, triton.__version__, driver.active.get_current_target())).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / f"twostroke-{digest.hexdigest()}"


def _build_launcher(asked: Any) -> bool:
    """Triton has a C compiler build a function for each signature, which takes as long as a kernel,
    and finds it on disk at the first launch. Whether that and the kernel are there now."""
    with suppress(Exception):
        compiled = asked.result() if hasattr(asked, "result") else asked
        driver.active.launcher_cls(compiled.src, compiled.metadata)
        return True
    return False


def is_tested() -> bool:
    """Whether the `run` of what this Triton compiles takes what it is given here."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in TESTED


class Variant:
    """A kernel with its constants and options, and what was compiled of it.

    Its arguments are tensors, or None; then what differs from launch to launch (numbers that it is
    not specialised on, tensor descriptors); then other numbers; then the constants.
    """

    def __init__(self, kernel: Any, **given: Any) -> None:
        self.kernel, self.given = kernel, given
        self.constants = [given[name] for name in kernel.arg_names if name in given]
        self.can_repeat = is_tested() and hasattr(kernel, "params")  # else it is interpreted
        params = kernel.params if self.can_repeat else ()
        self.aligned = [not param.do_not_specialize_on_alignment for param in params]
        # By device and all else, beside the constants, that decides what Triton compiles.
        self.compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], tensors: Tensors, varying: tuple[Any, ...], fixed: Numbers
    ) -> None:
        Launch(self, grid, tensors, varying, fixed)()


class Launch:
    """One launch of a variant, on the stream that is the current one when this is made."""

    __slots__ = ("_args", "_grid", "_key", "_numbers", "_run", "_tensors", "_variant")

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
        self._key: tuple[object, ...] | None = None  # of what is compiled; None: ask Triton
        self._run: Any = None  # is called with `_args`, once something is compiled
        if variant.can_repeat:
            self._prepare(fixed)

    def __call__(self) -> None:
        if self._run is not None:
            self._run(*self._args)
        else:
            self._dispatch(self._tensors, self._key)

    def over(
        self, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """The same over the cache of another layer, like the one that it was made with, and with
        that layer's sinks, of which alignment does not matter."""
        first, second = keys.data_ptr(), values.data_ptr()
        is_aligned = (first | second) % ALIGNED == 0
        if self._run is not None and is_aligned:
            self._args[FIRST + 1], self._args[FIRST + 2] = first, second
            if sinks is not None:
                self._args[FIRST + 3] = sinks.data_ptr()
            self._run(*self._args)
        else:
            query, _, _, _, *others = self._tensors
            self._dispatch((query, keys, values, sinks, *others), self._key if is_aligned else None)

    def with_sinks(self, sinks: torch.Tensor | None) -> None:
        """The same over its own keys and values, with the sinks of another layer."""
        _, keys, values, *_ = self._tensors
        if sinks is None or keys is None or values is None:
            self()
        else:
            self.over(keys, values, sinks)

    def _prepare(self, fixed: Numbers) -> None:
        pointers: list[int | None] = []
        kinds: list[torch.dtype | None] = []
        bits, variant = 0, self._variant
        for tensor, aligned in zip(self._tensors, variant.aligned, strict=False):
            if tensor is None:
                pointers.append(None)
                kinds.append(None)
                continue
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            kinds.append(tensor.dtype)
            if aligned:
                bits |= pointer
        if bits % ALIGNED:
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        own = (*pointers, *self._numbers, *variant.constants)
        self._args = [*(*self._grid, 1, 1)[:3], stream, None, None, None, None, None, *own]
        self._key = (device, fixed, *kinds)
        compiled = variant.compiled.get(self._key)
        if compiled is not None and _ahead.get() is None:
            self._repeat(compiled)

    def _repeat(self, compiled: Any) -> None:
        # After these two come hooks, which are for profilers of Triton's own: there are none.
        self._args[4:6] = compiled.function, compiled.packed_metadata
        self._run = compiled.run

    def _dispatch(self, tensors: Tensors, key: tuple[object, ...] | None) -> None:
        variant, given = self._variant, (*tensors, *self._numbers)
        asked = _ahead.get()
        if asked is not None:
            if key is None or (variant, key) not in asked:
                compiled = variant.kernel.run(*given, grid=self._grid, warmup=True, **variant.given)
                asked[variant, key] = compiled
            return
        compiled = variant.kernel[self._grid](*given, **variant.given)
        if key is not None and compiled is not None:
            variant.compiled[key] = compiled
            self._repeat(compiled)
