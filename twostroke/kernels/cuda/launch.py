"""Launches of kernels, without Triton's dispatch where the same launch was made before.

    the first of its kind    kernel[grid](…)      Triton looks at every argument, and compiles
    the others               compiled.run(…)      the compiled kernel, with these pointers

Triton's dispatch looks at every argument, which takes longer than many kernels run. Here a key has
everything that the dispatch would find: the constants, the types, and the numbers that a kernel may
be specialised on. Launches with unaligned pointers, launches of the interpreter, and launches of a
Triton version that was not tested always go through Triton's dispatch.

Compiled kernels belong to their `Variant`, as Triton's own cache belongs to the kernel: they depend
on the key alone, so that engines of one process may share them. Compiling ahead affects only the
thread that asked for it; other threads launch meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver

from twostroke.kernels.cuda.dependent_launch import CONSTANT, OPTIONS
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext

# Versions of Triton whose compiled kernels take the arguments given here: `test_cuda_launch.py`
# passes with each.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
ALIGNED = 16  # bytes: what Triton specialises on
FIRST = 9  # of the arguments of `run`: where the kernel's own begin

Tensors = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

# Inside `compile_ahead`: what was asked for, by variant and key. Outside: None.
_ahead: ContextVar[dict[object, Any] | None] = ContextVar("compile_ahead", default=None)


def compile_ahead(run: Callable[[], object], key: object) -> None:
    """Compile the kernels that `run` would launch, many at a time. None of them is launched, so its
    tensors need no memory. A launch that differs from them after all compiles on its own.

    `key`: everything that decides which kernels these are. Once they are compiled a file in
    Triton's cache says so, and the next start loads each kernel where it is first launched."""
    mark = _mark(key)
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
    """Hold back the garbage collector while threads parse. Before Python 3.13 a parser fails if
    another thread's parser interrupts it, because both count their depth in one place ("AST
    constructor recursion depth mismatch"). Only the garbage collector interrupts a parser, where a
    callback in Python follows a collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled_by(threads: ThreadPoolExecutor) -> AbstractContextManager[object]:
    """Return a context in which `threads` compile the kernels that Triton is asked for. A kernel
    that fails to compile fails again where it is launched, and the error is raised there."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # one after another then
        return nullcontext()
    mode: AbstractContextManager[object] = AsyncCompileMode(threads, ignore_errors=True)
    return mode


def _mark(key: object) -> Path:
    digest = sha256(repr((key, triton.__version__, driver.active.get_current_target())).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / f"twostroke-{digest.hexdigest()}"


def _build_launcher(asked: Any) -> bool:
    """Build the launcher of a kernel and return True if both are there now. Triton has a C compiler
    build a function for each signature; that takes as long as a kernel, and the first launch finds
    it on disk."""
    with suppress(Exception):
        compiled = asked.result() if hasattr(asked, "result") else asked
        driver.active.launcher_cls(compiled.src, compiled.metadata)
        return True
    return False


def is_tested() -> bool:
    """Return True if launches by `run` were tested with this version of Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in TESTED


class Variant:
    """A kernel with its constants and options, and what Triton has compiled of it.

    The arguments of a kernel are tensors, or None; then what differs from launch to launch (numbers
    that the kernel is not specialised on, tensor descriptors); then other numbers; then the
    constants. The step context of a call decides whether the launch is a dependent one.
    """

    def __init__(self, kernel: Any, **given: Any) -> None:
        if CONSTANT in kernel.arg_names:
            given = {CONSTANT: False} | given
        self.kernel, self.given = kernel, given
        self.constants = [given[name] for name in kernel.arg_names if name in given]
        self.can_repeat = is_tested() and hasattr(kernel, "params")  # else it is interpreted
        params = kernel.params if self.can_repeat else ()
        self.aligned = [not param.do_not_specialize_on_alignment for param in params]
        # By device and all else, beside the constants, that decides what Triton compiles.
        self.compiled: dict[tuple[object, ...], Any] = {}

    @cached_property
    def dependent(self) -> Variant:
        """The same kernel for dependent launches; itself, if the kernel cannot wait."""
        return Variant(self.kernel, **self.given | OPTIONS) if CONSTANT in self.given else self

    def for_context(self, context: StepContext) -> Variant:
        return self.dependent if context.dependent_launch else self

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Tensors,
        varying: tuple[Any, ...] = (),
        fixed: Numbers = (),
        context: StepContext = DEFAULT_CONTEXT,
    ) -> None:
        """Launch the kernel."""
        Launch(self.for_context(context), grid, tensors, varying, fixed)()


class Launch:
    """One launch of a variant, on the stream that is current when the object is made."""

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
        """Launch over the cache of another layer, of the same layout as the first, and with that
        layer's sinks, whose alignment does not matter."""
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
        """Launch over the same keys and values, with the sinks of another layer."""
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
