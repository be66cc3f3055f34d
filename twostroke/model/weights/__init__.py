"""Weight sources: one interface with three implementations (safetensors, gguf, dummy).

The sources do not import torch. `tensors.py` makes tensors of their weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import AlternativeSpecs
from twostroke.model.gguf.block_types import BlockType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as (out, bytes of a row). A row is a whole number of blocks of `type`."""

    type: BlockType
    shape: tuple[int, int]
    rows: Bytes


class WeightSource(Protocol):
    """Weights under the canonical names of `ModelSpec.weight_shapes`.

    `shape` reads headers only, so that a file is checked before memory is allocated. `floats`
    returns a copy of some rows of a weight. Matrices are (out, in); the rows of q and k are in the
    order that pairs the channels i and i + dim/2 for rope.
    """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the stored shape of a weight; None if the source has no such weight."""
        ...

    def fused_with(self, name: str) -> Sequence[str]:
        """Return the weights that share a stored tensor with this weight, itself included."""
        ...

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats: ...

    def stored_type(self, name: str) -> BlockType | None:
        """Return the block type of a weight in its file; None for floats, which may be converted to
        any dtype."""
        ...

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix | None:
        """Return some rows of a matrix in blocks of its `stored_type`; None if it has none."""
        ...

    def label(self, name: str) -> str:
        """Return the file and the tensor name of a weight, for a message."""
        ...

    def forget(self, name: str) -> None:
        """Release the memory of a weight that has been read."""
        ...


def check_weights(
    spec: ModelSpec,
    source: WeightSource,
    where: str,
    description: str = "its description",
    fields: Mapping[str, str] = {},
    variants: AlternativeSpecs = tuple,
) -> None:
    """Refuse a model whose tensors contradict its description, before memory is allocated.

    `description`: the file of the spec. `fields`: field of the spec → its name in that file.
    `variants`: specs with one field changed. A variant that fits the tensor names the wrong field.
    """
    for name, expected in spec.weight_shapes().items():
        found = source.shape(name)
        if found == expected:
            continue
        shaped_by = [field for other in source.fused_with(name) for field in spec.shaped_by(other)]
        deciding = [fields.get(n, n) for n in ("family", *shaped_by)]
        deciding += [one.field for one in variants() if one.spec.weight_shapes().get(name) == found]
        decides = ", ".join(dict.fromkeys(deciding))
        if found is None:
            raise ModelError(
                f"{where}: the weight {name!r} is missing. {description} asks for it with shape "
                f"{expected} (by {decides}); the file is incomplete or belongs to another model."
            )
        raise ModelError(
            f"{where}: the weight {name!r} has shape {found}, but {description} asks for "
            f"{expected} (by {decides}). They belong to different models."
        )


def all_finite(data: npt.NDArray[np.uint8], type: str) -> bool:
    """Return whether all stored floats are finite: NaN and infinity have the largest exponent.

    The maximum of the bits as signed integers is the largest positive float, the maximum as
    unsigned integers the largest negative one. Two maxima suffice and need no memory.
    """
    width, exponent = _EXPONENTS[type]
    sign = 1 << (8 * width - 1)
    signed, bits = data.view(f"<i{width}"), data.view(f"<u{width}")
    return bool(signed.max() < exponent and bits.max() < exponent | sign)


# Type → bytes of a number, and the bits of infinity.
_EXPONENTS = {"F64": (8, 0x7FF << 52), "F32": (4, 0xFF << 23)}
_EXPONENTS |= {"F16": (2, 0x1F << 10), "BF16": (2, 0xFF << 7)}


def not_finite(source: WeightSource, name: str) -> ModelError:
    """Return the error for a weight with NaN or infinity, which makes every output nonsense."""
    return ModelError(
        f"{source.label(name)} holds NaN or infinity. The file is damaged, or its conversion "
        "failed; download it again, or use another one."
    )
