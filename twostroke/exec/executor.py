"""The seam between planning and computing: `forward(plan)`, then `sample(handle, masks)`.

Two calls, so that grammar masks can be made while the forward runs: the forward of step n + 1 may
be asked for before step n is waited for, and its samples after that. A synchronous executor has
finished when `sample` returns; an asynchronous one when `Pending.wait` does, and may be given
`max_in_flight` plans before the first is waited for.

Executors: `native.py` (no torch), `torch_executor.py` (any torch device), `ranks.py` (several of
the latter, each with a part of the model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from twostroke.exec.token_mask import Mask
from twostroke.plan import Pending, StepPlan

Handle = TypeVar("Handle")
Masks = Mapping[int, Mask]  # what grammars allow, by index into the samples of a step
# The position of the first line, and logits of successive positions of a chunk: [n, vocabulary].
ChunkLogits = Callable[[int, npt.NDArray[np.float32]], None]


class Executor(Protocol[Handle]):
    max_in_flight: int
    # Hears of the logits of all positions of every chunk, a slice at a time. Not of several ranks.
    on_chunk_logits: ChunkLogits | None

    def forward(self, plan: StepPlan) -> Handle: ...

    def sample(self, handle: Handle, masks: Masks | None = None) -> Pending: ...

    def reset(self) -> None:
        """A step has failed and every row has been given up: start from no rows."""
        ...
