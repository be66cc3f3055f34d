"""Weights from a GGUF file, as floats or as the packed rows the file holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.describe.gguf_config import names_in_gguf
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import Place
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.gguf.gguf_file import GGUFFile, TensorInfo
from twostroke.model.weights import ALL_ROWS, Bytes, Floats, PackedMatrix


class GGUFWeights:
    def __init__(self, file: GGUFFile, spec: ModelSpec) -> None:
        self._file = file
        self._names = names_in_gguf(file)
        self._places = self._names.places(spec)

    def shape(self, name: str) -> tuple[int, ...] | None:
        info = self._file.tensors.get(self._names.tensor(name))
        return None if info is None else self._places[name].weight_shape(info.shape)

    def stored_type(self, name: str) -> BlockType:
        return self._info(name).type

    def fused_with(self, name: str) -> Sequence[str]:
        return self._places[name].weights

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        info, place = self._info(name), self._places[name]
        if place.dims == 1:
            values = dequantize(self._part(info, place), info.type, place.expert_shape(info.shape))
            found: Floats = place.select_rows(values.reshape(-1), rows)
            return found
        matrix = self.packed(name, rows)
        return dequantize(matrix.rows, matrix.type, matrix.shape)

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix:
        """Return a matrix in blocks: a read-only view of the file, or a copy of reordered rows."""
        info, place = self._info(name), self._places[name]
        shape = place.expert_shape(info.shape)
        if len(shape) != 2:
            raise ModelError(
                f"{self.label(name)} has shape {info.shape}, expected a matrix. "
                "The file is damaged or belongs to another model."
            )
        stored = self._part(info, place).reshape(shape[0], -1)
        found = place.select_rows(stored, rows)
        return PackedMatrix(info.type, (len(found), shape[1]), found)

    def label(self, name: str) -> str:
        tensor = self._names.tensor(name)
        return f"{self._file.path_of(tensor)}: the tensor {tensor!r}"

    def release(self, name: str) -> None:
        self._file.release(self._info(name).name)

    def _part(self, info: TensorInfo, place: Place) -> Bytes:
        return place.expert_bytes(np.frombuffer(self._file.raw(info.name), np.uint8))

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(self._names.tensor(name))
        if info is None:
            raise ModelError(
                f"{self._file.path}: the tensor {self._names.tensor(name)!r} is missing. The file "
                "is incomplete or belongs to another model."
            )
        return info
