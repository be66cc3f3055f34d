"""The interface between planning and computing: `forward(plan)`, then `sample(handle, masks)`.

Grammar masks are computed while the forward runs: the forward of step n + 1 may be launched before
step n is waited for, and step n + 1 is sampled afterwards. A synchronous executor has finished when
`sample` returns. An asynchronous executor has finished when `Pending.wait` returns, and accepts
`max_in_flight` plans before the first is waited for.

Executors: `native_executor.py` (no torch), `torch_executor.py` (any torch device) and
`ranks_executor.py` (several torch executors, each with a shard of the model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from twostroke.exec.token_mask import Mask
from twostroke.plan import Pending, StepPlan

Handle = TypeVar("Handle")
Masks = Mapping[int, Mask]  # the tokens that a grammar allows, by index of the sample in the step
# Called with the position of the first row, and the logits of n consecutive positions of a chunk,
# [n, vocabulary].
ChunkLogits = Callable[[int, npt.NDArray[np.float32]], None]


class Executor(Protocol[Handle]):
    max_in_flight: int
    # Receives the logits of all positions of every chunk, in slices. Unsupported with several
    # ranks.
    on_chunk_logits: ChunkLogits | None

    def forward(self, plan: StepPlan) -> Handle: ...

    def sample(self, handle: Handle, masks: Masks | None = None) -> Pending: ...

    def reset(self) -> None:
        """Forget all rows, after a failed step whose requests have been aborted."""
        ...
