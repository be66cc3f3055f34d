"""Weights from a GGUF file, as floats or as the packed rows the file holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.block_types import BlockType
from twostroke.model.dequant import dequantize
from twostroke.model.gguf import GGUFFile, TensorInfo
from twostroke.model.gguf_config import tensor_name
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import ALL_ROWS, Floats, PackedMatrix


class GGUFWeights:
    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._spec = spec
        # Conversions to the llama architecture reorder q and k so that rope's pairs are neighbours.
        self._pairs_are_neighbours = file.metadata.get("general.architecture") == "llama"

    def shape(self, name: str) -> tuple[int, ...] | None:
        info = self._file.tensors.get(tensor_name(name))
        return None if info is None else info.shape

    def stored_type(self, name: str) -> BlockType:
        return self._info(name).type

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        info = self._info(name)
        if len(info.shape) == 1:
            values = dequantize(self._file.raw(info.name), info.type, info.shape)
            order = self._row_order(name)
            return (values if order is None else values[order])[rows]
        matrix = self.packed(name, rows)
        return dequantize(matrix.rows, matrix.type, matrix.shape)

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix:
        """A matrix in its blocks: a read-only view of the file, or a copy if rows had to move."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise ModelError(
                f"{self._file.path}: the tensor {info.name!r} has shape {info.shape}, "
                "expected a matrix. The file is damaged or belongs to another model."
            )
        stored = np.frombuffer(self._file.raw(info.name), np.uint8).reshape(info.shape[0], -1)
        order = self._row_order(name)
        found = stored[rows] if order is None else stored[order[rows]]
        return PackedMatrix(info.type, (len(found), info.shape[1]), found)

    def label(self, name: str) -> str:
        return f"{self._file.path}: the tensor {tensor_name(name)!r}"

    def forget(self, name: str) -> None:
        self._file.forget(self._info(name).name)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(tensor_name(name))
        if info is None:
            raise ModelError(
                f"{self._file.path}: the tensor {tensor_name(name)!r} is missing. The file is "
                "incomplete or belongs to another model."
            )
        return info

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Which row of the file each of our rows is, or None if they stand as they should."""
        part = name.rpartition(".")[2]
        if not self._pairs_are_neighbours or part not in ("q", "k", "q_bias", "k_bias"):
            return None
        spec = self._spec
        num_heads = spec.num_heads if part.startswith("q") else spec.num_kv_heads
        return halves_from_neighbours(num_heads, spec.head_dim, spec.rope.dim)


def halves_from_neighbours(num_heads: int, head_dim: int, rope_dim: int) -> npt.NDArray[np.intp]:
    """Row order that takes rope's pairs from (2i, 2i + 1) to (i, i + rope_dim/2) in each head."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    rotated, rest = rows[:, :rope_dim], rows[:, rope_dim:]
    return np.concatenate([rotated[:, 0::2], rotated[:, 1::2], rest], axis=1).reshape(-1)
