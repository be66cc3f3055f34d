"""Weight sources: one interface with three implementations (safetensors, gguf, dummy).

The sources do not import torch and return numpy arrays. `tensors.py` converts the arrays to torch
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import SpecVariants
from twostroke.model.gguf.block_types import BlockType

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
ALL_ROWS = slice(None)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in a block format. Each row is a whole number of blocks of `type`."""

    type: BlockType
    shape: tuple[int, int]  # (out, in)
    rows: Bytes  # [out, bytes of a row]


class WeightSource(Protocol):
    """Weights under the canonical names of `ModelSpec.weight_shapes`.

    To check a file before memory is allocated, `shape` reads headers only. `floats` returns a copy
    of some rows of a weight. Matrices are (out, in). Rope rotates the channels i and i + dim/2 of q
    and k together, and the rows of q and k are in that order.
    """

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the stored shape of a weight; None if the source has no such weight."""
        ...

    def fused_with(self, name: str) -> Sequence[str]:
        """Return all weights in the stored tensor of this weight, including this weight."""
        ...

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats: ...

    def stored_type(self, name: str) -> BlockType | None:
        """Return the block type of a weight in its file; None for floats."""
        ...

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix | None:
        """Return some rows of a matrix in blocks of its `stored_type`; None if that is None."""
        ...

    def label(self, name: str) -> str:
        """Return the file and the tensor name of a weight, for a message."""
        ...

    def release(self, name: str) -> None:
        """Release the memory of a weight that has been read."""
        ...


def check_weights(
    spec: ModelSpec,
    source: WeightSource,
    where: str,
    description: str = "its description",
    fields: Mapping[str, str] = {},
    variants: SpecVariants = tuple,
) -> None:
    """Refuse a model whose tensors contradict its description, before memory is allocated.

    The other arguments are for the message. `where`: the path of the weights. `description`: the
    file that the spec was read from. `fields`: field of the spec → name of the field in that file.
    `variants`: specs with one boolean field changed. If a variant has the shape that the tensor
    has, the message names the variant's field.
    """
    for name, expected in spec.weight_shapes().items():
        found = source.shape(name)
        if found == expected:
            continue
        causes = [
            "family",
            *(field for fused in source.fused_with(name) for field in spec.shaped_by(fused)),
        ]
        causes = [fields.get(field, field) for field in causes]
        causes += [v.field for v in variants() if v.spec.weight_shapes().get(name) == found]
        listed = ", ".join(dict.fromkeys(causes))
        if found is None:
            raise ModelError(
                f"{where}: the weight {name!r} is missing. {description} asks for it with shape "
                f"{expected} (by {listed}); the file is incomplete or belongs to another model."
            )
        raise ModelError(
            f"{where}: the weight {name!r} has shape {found}, but {description} asks for "
            f"{expected} (by {listed}). They belong to different models."
        )


def all_finite(data: npt.NDArray[np.uint8], dtype: str) -> bool:
    """Return whether all floats in `data` are finite. `dtype`: as safetensors names it.

    The bits of NaN and infinity, without the sign, are at least the bits of infinity. Read as
    signed integers, the largest bits are those of a positive float; read as unsigned integers, the
    largest bits are those of a negative float. Comparing these two maxima needs no copy of the
    data.
    """
    width, exponent = _EXPONENTS[dtype]
    sign = 1 << (8 * width - 1)
    signed, bits = data.view(f"<i{width}"), data.view(f"<u{width}")
    return bool(signed.max() < exponent and bits.max() < exponent | sign)


# dtype → bytes of an element, and the bits of infinity.
_EXPONENTS = {"F64": (8, 0x7FF << 52), "F32": (4, 0xFF << 23)}
_EXPONENTS |= {"F16": (2, 0x1F << 10), "BF16": (2, 0xFF << 7)}


def not_finite_error(source: WeightSource, name: str) -> ModelError:
    """Return the error for a weight with NaN or infinity."""
    return ModelError(
        f"{source.label(name)} holds NaN or infinity. The file is damaged, or its conversion "
        "failed; download it again, or use another conversion."
    )
