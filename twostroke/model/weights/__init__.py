"""Where weights come from: one small interface, three sources (safetensors, gguf, dummy).

The sources know no torch; `tensors.py` makes tensors of what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import Variants
from twostroke.model.gguf.block_types import BlockType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix as (out, bytes of a row); a row is a whole number of blocks of `type`."""

    type: BlockType
    shape: tuple[int, int]
    rows: Bytes


class WeightSource(Protocol):
    """Weights under the canonical names of `ModelSpec.weight_shapes`.

    `shape` reads headers only, so that a file can be checked before any memory is taken.
    `floats` gives some rows of a weight in memory of its own, matrices as (out, in), q and k in
    the row order that pairs rope's halves (i, i + dim/2).
    """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape stored for a canonical name, or None if the source has no such weight."""
        ...

    def beside(self, name: str) -> Sequence[str]:
        """The weights that are stored in one tensor with this one, itself included."""
        ...

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats: ...

    def stored_type(self, name: str) -> BlockType | None:
        """The type that a weight is to be kept in, since its file has it in that; None: floats,
        which may be kept in the dtype that is asked for."""
        ...

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix | None:
        """Some rows of a matrix in blocks of its `stored_type`; None if it has none."""
        ...

    def label(self, name: str) -> str:
        """The weight as a message calls it: the file, and its name there."""
        ...

    def forget(self, name: str) -> None:
        """The weight has been read: what is kept of it in memory may go."""
        ...


def check_weights(
    spec: ModelSpec,
    source: WeightSource,
    where: str,
    description: str = "its description",
    fields: Mapping[str, str] = {},
    variants: Variants = tuple,
) -> None:
    """Refuse a model whose tensors contradict its description, before any memory is taken.

    `description` is what has been read into the spec; `fields` has its names for the spec's
    fields; `variants` with which the weight would be as it is found tell which field is to blame.
    """
    for name, expected in spec.weight_shapes().items():
        found = source.shape(name)
        if found == expected:
            continue
        shaped_by = [field for other in source.beside(name) for field in spec.shaped_by(other)]
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
            f"{expected} (by {decides}). The two are not of one model."
        )


def all_finite(data: npt.NDArray[np.uint8], type: str) -> bool:
    """Whether stored floats are numbers: NaN and infinity are those with the largest exponent.

    Of the bits read as a signed number the positive ones are the greatest, and of the same bits
    without a sign the negative ones: two maxima are all it takes, and no memory.
    """
    width, exponent = _EXPONENTS[type]
    sign = 1 << (8 * width - 1)
    signed, bits = data.view(f"<i{width}"), data.view(f"<u{width}")
    return bool(signed.max() < exponent and bits.max() < exponent | sign)


# Type → bytes of a number, and its bits with the largest exponent: infinity.
_EXPONENTS = {"F64": (8, 0x7FF << 52), "F32": (4, 0xFF << 23)}
_EXPONENTS |= {"F16": (2, 0x1F << 10), "BF16": (2, 0xFF << 7)}


def not_finite(source: WeightSource, name: str) -> ModelError:
    """A NaN or an infinity in a weight makes every text of the model nonsense."""
    return ModelError(
        f"{source.label(name)} holds NaN or infinity. The file is damaged, or its conversion "
        "failed; download it again, or use another one."
    )
