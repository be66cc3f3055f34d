"""Where weights come from: one small interface, three sources (safetensors, gguf, dummy).

The sources know no torch; `tensors.py` makes tensors of what they hold.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.spec import ModelSpec

Floats = npt.NDArray[np.float32]
ALL_ROWS = slice(None)


class WeightSource(Protocol):
    """Weights under the canonical names of `ModelSpec.weight_shapes`.

    `shape` reads headers only, so that a file can be checked before any memory is taken.
    `floats` gives some rows of a weight in memory of its own, matrices as (out, in), q and k in
    the row order that pairs rope's halves (i, i + dim/2).
    """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape stored for a canonical name, or None if the source has no such weight."""
        ...

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats: ...

    def forget(self, name: str) -> None:
        """The weight has been read: what is kept of it in memory may go."""
        ...


def check_weights(spec: ModelSpec, source: WeightSource, where: str) -> None:
    """Refuse a model whose tensors contradict its description, before any memory is taken."""
    for name, expected in spec.weight_shapes().items():
        found = source.shape(name)
        if found is None:
            raise ModelError(
                f"{where}: the weight {name!r} is missing. The model's description asks for it "
                f"with shape {expected}; the file is incomplete or belongs to another model."
            )
        if found != expected:
            raise ModelError(
                f"{where}: the weight {name!r} has shape {found}, but the model's description "
                f"asks for {expected}. The description and the weights are not of one model."
            )
