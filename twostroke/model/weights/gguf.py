"""Weights from a GGUF file, as floats or as the packed rows the file holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.block_types import BlockType
from twostroke.model.dequant import dequantize
from twostroke.model.gguf import GGUFFile, TensorInfo
from twostroke.model.gguf_config import ARCHITECTURES
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import ALL_ROWS, Floats, PackedMatrix


class GGUFWeights:
    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._layers = spec.layers
        arch = ARCHITECTURES[file.metadata["general.architecture"]]
        self._names, self._places = arch.names, arch.names.places(spec)
        self._rope_neighbours = arch.rope_neighbours

    def shape(self, name: str) -> tuple[int, ...] | None:
        info = self._file.tensors.get(self._names.tensor(name))
        return None if info is None else self._places[name].shape_in(info.shape)

    def stored_type(self, name: str) -> BlockType:
        return self._info(name).type

    def beside(self, name: str) -> Sequence[str]:
        return self._places[name].weights

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
        info, place = self._info(name), self._places[name]
        if len(info.shape) != 2:
            raise ModelError(
                f"{self.label(name)} has shape {info.shape}, expected a matrix. "
                " The file is damaged or belongs to another model."
            )
        stored = np.frombuffer(self._file.raw(info.name), np.uint8).reshape(info.shape[0], -1)
        num_rows, _ = place.shape_in(info.shape)
        stored = stored[place.first_row : place.first_row + num_rows]
        order = self._row_order(name)
        found = stored[rows] if order is None else stored[order[rows]]
        return PackedMatrix(info.type, (len(found), info.shape[1]), found)

    def label(self, name: str) -> str:
        tensor = self._names.tensor(name)
        return f"{self._file.path_of(tensor)}: the tensor {tensor!r}"

    def forget(self, name: str) -> None:
        self._file.forget(self._info(name).name)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(self._names.tensor(name))
        if info is None:
            raise ModelError(
                f"{self._file.path}: the tensor {self._names.tensor(name)!r} is missing. The file "
                "is incomplete or belongs to another model."
            )
        return info

    def _row_order(self, name: str) -> npt.NDArray[np.intp] | None:
        """Which row of the file each of our rows is, or None if they stand as they should."""
        part = name.rpartition(".")[2]
        if not self._rope_neighbours or part not in ("q", "k", "q_bias", "k_bias"):
            return None
        attention = self._layers[int(name.split(".")[1])].attention
        num_heads = attention.num_heads if part.startswith("q") else attention.num_kv_heads
        return halves_from_neighbours(num_heads, attention.head_dim, attention.rope.dim)


def halves_from_neighbours(num_heads: int, head_dim: int, rope_dim: int) -> npt.NDArray[np.intp]:
    """Row order that takes rope's pairs from (2i, 2i + 1) to (i, i + rope_dim/2) in each head."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    rotated, rest = rows[:, :rope_dim], rows[:, rope_dim:]
    return np.concatenate([rotated[:, 0::2], rotated[:, 1::2], rest], axis=1).reshape(-1)
