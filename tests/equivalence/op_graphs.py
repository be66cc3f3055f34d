"""`OpGraph`: a CUDA graph as a CPU can have one. It records which operations ran on which tensors,
and replays those: on the same memory, and without the Python that called them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from twostroke.exec.graphs import Run, Stretch
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.tensor_parallel import Ranks

LAUNCHES = (
    "rope_store",
    "rope_decode_attention",
    "decode_attention",
    "prefill_attention",
    "route",
    "experts",
    "sample",
)


class OpGraph(TorchDispatchMode):
    def __init__(self, kernels: RecordedKernels) -> None:
        super().__init__()
        self._ops: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._kernels = kernels
        kernels.graph = self
        self.__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            found = func(*args, **kwargs)
        self._ops.append((func, args, kwargs, found))
        return found

    def capture_end(self) -> None:
        self._kernels.graph = None
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, found in self._ops:
            again = func(*args, **kwargs)
            if isinstance(found, torch.Tensor):
                again, found = [again], [found]
            for new, old in zip(again or (), found or (), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class RecordedKernels(Kernels):
    """Each kernel that looks at values is one operation, as a launch is."""

    def __init__(self) -> None:
        self.graph: OpGraph | None = None
        for name in LAUNCHES:
            setattr(self, name, partial(self._launch, getattr(self, name)))

    def _launch(self, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        graph, self.graph = self.graph, None  # one kernel may call another
        try:
            return kernel(*args, **kwargs) if graph is None else graph.run(kernel, args, kwargs)
        finally:
            self.graph = graph


class OpRecorder:
    """What `CudaRecorder` does, on such graphs."""

    def __init__(self, kernels: RecordedKernels, ranks: Ranks) -> None:
        self._kernels, self._ranks = kernels, ranks
        self.runs: list[list[Run]] = []

    def __call__(self, pieces: Callable[[], Iterator[object]]) -> list[Run]:
        count, running = sum(1 for _ in pieces()), pieces()
        begin = partial(OpGraph, self._kernels)
        runs = [Stretch(begin, self._ranks).record(partial(next, running)) for _ in range(count)]
        self.runs.append(runs)
        return runs
