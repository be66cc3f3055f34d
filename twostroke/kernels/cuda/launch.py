"""Kernel launches that bypass Triton's dispatch if an equal launch was made before.

    first launch for a key   kernel[grid](…)      Triton inspects every argument, and compiles
    later launches           compiled.run(…)      the compiled kernel, with the new pointers

Triton's dispatch inspects every argument, which takes longer than many kernels run. Here a key
contains everything that determines the compiled kernel: the constants, the dtypes, and the numbers
that the kernel may be specialised on. Launches with unaligned pointers, launches with the
interpreter, and launches with an untested version of Triton always use Triton's dispatch.

A `Variant` caches its compiled kernels. They depend on the key alone, so engines in one process may
share them. `compile_ahead` affects only the thread that calls it; other threads launch as usual.
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

# Versions of Triton with which `test_cuda_launch.py` passes: the arguments of a compiled kernel may
# differ in other versions.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
ALIGNED = 16  # bytes: Triton specialises kernels on pointers with this alignment
FIRST = 9  # index of the kernel's first own argument among the arguments of `run`

Tensors = tuple[torch.Tensor | None, ...]
Numbers = tuple[int | float, ...]

# Inside `compile_ahead`: the requested kernels, by variant and key. Outside: None.
_ahead: ContextVar[dict[object, Any] | None] = ContextVar("compile_ahead", default=None)


def compile_ahead(run: Callable[[], object], key: object) -> None:
    """Compile the kernels that `run` would launch, many at a time. No kernel is launched, so the
    tensors need no memory. A later launch of another kernel compiles that kernel.

    `key`: everything that determines the kernels. A file in Triton's cache marks that all of them
    have been compiled. The next start then compiles nothing, and loads a kernel at its first
    launch."""
    mark = _mark(key)
    if mark.exists():
        return
    requested: dict[object, Any] = {}
    with _without_collections(), ThreadPoolExecutor() as threads:
        with _compiled_by(threads):
            token = _ahead.set(requested)
            try:
                run()
            finally:
                _ahead.reset(token)
        done = list(threads.map(_build_launcher, requested.values()))
    if not all(done):
        return
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable the garbage collector while threads parse source code. Before Python 3.13 all threads
    share the parser's depth counter, and a parser that another thread's parser interrupts fails
    ("AST constructor recursion depth mismatch"). Only Python callbacks of the garbage collector can
    interrupt a parser."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compiled_by(threads: ThreadPoolExecutor) -> AbstractContextManager[object]:
    """Return a context in which `threads` compile kernels. Errors are ignored here: a kernel that
    does not compile raises the error at its launch."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # compile one after another
        return nullcontext()
    mode: AbstractContextManager[object] = AsyncCompileMode(threads, ignore_errors=True)
    return mode


def _mark(key: object) -> Path:
    digest = sha256(repr((key, triton.__version__, driver.active.get_current_target())).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / f"twostroke-{digest.hexdigest()}"


def _build_launcher(requested: Any) -> bool:
    """Build the launcher of a compiled kernel. Return True if kernel and launcher exist. A launcher
    is a C function for one signature; compiling it takes as long as compiling a kernel. The first
    launch finds it in Triton's cache on disk."""
    with suppress(Exception):
        compiled = requested.result() if hasattr(requested, "result") else requested
        driver.active.launcher_cls(compiled.src, compiled.metadata)
        return True
    return False


def is_tested() -> bool:
    """Return True if bypassing the dispatch was tested with this version of Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) in TESTED


class Variant:
    """A kernel with its constants and options, and its compiled forms.

    A kernel's arguments have this order: tensors (or None); arguments that differ from launch to
    launch (numbers that the kernel is not specialised on, tensor descriptors); other numbers; the
    constants. The step context of a call determines whether it is a dependent launch.
    """

    def __init__(self, kernel: Any, **given: Any) -> None:
        if CONSTANT in kernel.arg_names:
            given = {CONSTANT: False} | given
        self.kernel, self.given = kernel, given
        self.constants = [given[name] for name in kernel.arg_names if name in given]
        # An interpreted kernel has no `params`.
        self.can_repeat = is_tested() and hasattr(kernel, "params")
        params = kernel.params if self.can_repeat else ()
        self.aligned = [not param.do_not_specialize_on_alignment for param in params]
        # By device and everything else, except the constants, that determines the compiled kernel.
        self.compiled: dict[tuple[object, ...], Any] = {}

    @cached_property
    def dependent(self) -> Variant:
        """The variant for dependent launches; this variant, if the kernel does not support them."""
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
    """A launch of a variant, on the stream that is current when the object is created."""

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
        self._key: tuple[object, ...] | None = None  # of `variant.compiled`; None: use the dispatch
        self._run: Any = None  # called with `_args`; None: not compiled yet
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
        """Launch with the keys, values and sinks of another layer. Keys and values must have the
        layout of the first layer; the sinks may have any alignment."""
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
        """Launch with the same keys and values, and the sinks of another layer."""
        _, keys, values, *_ = self._tensors
        if sinks is None or keys is None or values is None:
            self()
        else:
            self.over(keys, values, sinks)

    def _prepare(self, fixed: Numbers) -> None:
        pointers: list[int | None] = []
        dtypes: list[torch.dtype | None] = []
        bits, variant = 0, self._variant
        for tensor, aligned in zip(self._tensors, variant.aligned, strict=False):
            if tensor is None:
                pointers.append(None)
                dtypes.append(None)
                continue
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            dtypes.append(tensor.dtype)
            if aligned:
                bits |= pointer
        if bits % ALIGNED:
            return
        device = driver.active.get_current_device()
        stream = driver.active.get_current_stream(device)
        own = (*pointers, *self._numbers, *variant.constants)
        self._args = [*(*self._grid, 1, 1)[:3], stream, None, None, None, None, None, *own]
        self._key = (device, fixed, *dtypes)
        compiled = variant.compiled.get(self._key)
        if compiled is not None and _ahead.get() is None:
            self._repeat(compiled)

    def _repeat(self, compiled: Any) -> None:
        # The arguments after these two are hooks for Triton's profilers, which are not used.
        self._args[4:6] = compiled.function, compiled.packed_metadata
        self._run = compiled.run

    def _dispatch(self, tensors: Tensors, key: tuple[object, ...] | None) -> None:
        variant, given = self._variant, (*tensors, *self._numbers)
        requested = _ahead.get()
        if requested is not None:
            if key is None or (variant, key) not in requested:
                compiled = variant.kernel.run(*given, grid=self._grid, warmup=True, **variant.given)
                requested[variant, key] = compiled
            return
        compiled = variant.kernel[self._grid](*given, **variant.given)
        if key is not None and compiled is not None:
            variant.compiled[key] = compiled
            self._repeat(compiled)
