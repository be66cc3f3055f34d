"""Where weights come from: one small interface, three sources (safetensors, gguf, dummy)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from twostroke.errors import ModelError
from twostroke.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """Weights under the canonical names of `ModelSpec.weight_shapes`.

    `shape` reads headers only, so that a file can be checked before any memory is taken.
    `read` gives a dense tensor of its own memory, matrices as (out, in), q and k in the row order
    that pairs rope's halves (i, i + dim/2).
    """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape stored for a canonical name, or None if the source has no such weight."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...


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
