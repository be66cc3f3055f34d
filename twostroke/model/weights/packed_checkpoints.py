"""Matrices of 4 or 8 bits in checkpoints: codes in 32-bit words, scales and zeros in other tensors.

gptq        qweight [in / n, out], n codes of one output a word, lowest first; scales
            [groups, out], qzeros [groups, out / n], g_idx [in]: the group of each input
awq         qweight [in, out / n] and qzeros [groups, out / n], n outputs a word in the order
            0 2 4 6 1 3 5 7; scales [groups, out]
compressed  weight_packed [out, in / n], weight_scale [out, groups], weight_zero_point
            [out / n, groups], weight_g_idx, weight_shape
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import ModelError
from twostroke.model.describe.hf_packed import PackedConfig
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.weights import Bytes, Floats

Words = npt.NDArray[np.uint32]
AWQ_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # positions of eight outputs in a word
SCALE_TYPES = ("F32", "F16", "BF16")
KERNEL_GROUPS = (128, 64, 32, 16)


class Endings(NamedTuple):
    """The suffixes of a module's name in the names of its tensors."""

    codes: str
    scales: str
    zeros: str
    groups: str  # the group of each input, if groups are not of neighbours
    others: tuple[str, ...] = ()  # ignored tensors


GPTQ = Endings(".qweight", ".scales", ".qzeros", ".g_idx")
ENDINGS = {
    "gptq": GPTQ,
    "awq": GPTQ,
    "compressed": Endings(
        ".weight_packed",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_g_idx",
        (".weight_shape", ".input_scale", ".k_scale", ".v_scale"),
    ),
}


class Tensor(Protocol):
    type: str
    shape: tuple[int, ...]
    data: Bytes


class Module(NamedTuple):
    """The tensors of one matrix, each with its label for messages."""

    config: PackedConfig
    codes: tuple[str, Any]
    scales: tuple[str, Any] | None
    zeros: tuple[str, Any] | None
    groups: tuple[str, Any] | None

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, (out, in)."""
        label, found = self.codes
        each, layout = 32 // self.config.bits, self.config.layout
        if found.type != "I32" or len(found.shape) != 2:
            raise ModelError(
                f"{label} is {found.type} {found.shape}; expected are codes in a matrix of I32. "
                "Use another conversion of the model."
            )
        first, second = found.shape
        if layout == "gptq":
            return second, first * each
        return (second * each, first) if layout == "awq" else (first, second * each)

    @property
    def group(self) -> int:
        return self.config.group or self.shape[1]

    def check(self) -> None:
        """Refuse scales and zeros that are missing or do not fit the codes."""
        (rows, columns), each = self.shape, 32 // self.config.bits
        if columns % self.group:
            raise ModelError(
                f"{self.codes[0]} has {columns} inputs, which groups of {self.group} "
                "(quantization_config) do not divide. Use the unquantised model."
            )
        groups, by_row = columns // self.group, self.config.layout == "compressed"
        expected = {"scales": (rows, groups) if by_row else (groups, rows)}
        expected["zeros"] = (-(-rows // each), groups) if by_row else (groups, rows // each)
        for kind, types in (("scales", SCALE_TYPES), ("zeros", ("I32",))):
            found = getattr(self, kind)
            if found is None:
                if kind == "zeros" and not self.config.zeros:
                    continue
                raise ModelError(
                    f"{self.codes[0]} is in {self.config.name}, and its {kind} are missing. The "
                    "model is incomplete; download the folder again."
                )
            label, tensor = found
            if tensor.shape != expected[kind] or tensor.type not in types:
                raise ModelError(
                    f"{label} is {tensor.type} {tensor.shape}, but codes of {self.shape} and "
                    f"config.json (quantization_config: groups of {self.group}) ask for "
                    f"{expected[kind]} of {' or '.join(types)}. They belong to different models."
                )

    def is_ordered(self) -> bool:
        """Return whether groups consist of neighbours."""
        return self.order() is None

    def order(self) -> npt.NDArray[np.int32] | None:
        """Return the group of each input; None if groups consist of neighbours."""
        if self.groups is None:
            return None
        label, found = self.groups
        columns = self.shape[1]
        if found.type != "I32" or found.shape != (columns,):
            raise ModelError(
                f"{label} is {found.type} {found.shape}; expected is the group of each of the "
                f"{columns} inputs (I32). Use another conversion of the model."
            )
        groups = found.data.view(np.int32)
        if (groups == -1).all() or np.array_equal(groups, np.arange(columns) // self.group):
            return None
        if groups.min() < 0 or groups.max() >= columns // self.group:
            raise ModelError(f"{label} names groups that do not exist. Download the model again.")
        return groups

    def read(self, rows: npt.NDArray[np.intp]) -> tuple[Bytes, Floats, Bytes | None]:
        """Return codes [rows, in], scales [rows, groups], and zeros; None if all zeros are in the
        middle of the codes."""
        self.check()
        bits, layout = self.config.bits, self.config.layout
        words = _words(self.codes[1])
        assert self.scales is not None
        label, found = self.scales
        scales = dequantize(found.data, BlockType(found.type), found.shape)
        if not np.isfinite(scales).all():
            raise ModelError(f"{label} holds NaN or infinity. Download the model again.")
        if layout == "compressed":
            codes, scales = _along(words[rows], bits), scales[rows]
        else:
            scales = np.ascontiguousarray(scales[:, rows].T)
            if layout == "gptq":
                codes = _along(np.ascontiguousarray(words[:, rows].T), bits)
            else:
                codes = _of_outputs(words, rows, bits, AWQ_PLACES).T
        return np.ascontiguousarray(codes), scales, self._zeros(rows)

    def _zeros(self, rows: npt.NDArray[np.intp]) -> Bytes | None:
        if self.zeros is None:
            return None
        bits, layout, found = self.config.bits, self.config.layout, _words(self.zeros[1])
        if layout == "compressed":
            zeros = _of_outputs(np.ascontiguousarray(found.T), rows, bits).T
        else:
            zeros = _of_outputs(found, rows, bits, AWQ_PLACES if layout == "awq" else None).T
        zeros = (zeros + np.uint8(self.config.zero_shift)) & np.uint8((1 << bits) - 1)
        middle = 1 << (bits - 1)
        return None if (zeros == middle).all() else np.ascontiguousarray(zeros)

    def floats(self, rows: npt.NDArray[np.intp]) -> Floats:
        codes, scales, zeros = self.read(rows)
        middle = np.float32(1 << (self.config.bits - 1))
        taken = np.full(scales.shape, middle) if zeros is None else zeros.astype(np.float32)
        order = self.order()
        if order is not None:
            found: Floats = (codes - taken[:, order]) * scales[:, order]
            return found
        grouped = codes.reshape(len(codes), scales.shape[1], -1) - taken[:, :, None]
        return (grouped * scales[:, :, None]).reshape(codes.shape)


def kernel_group(group: int) -> int:
    """Return the largest group size of the kernels that divides `group`; 0 if none does."""
    return next((size for size in KERNEL_GROUPS if group % size == 0), 0)


def _words(tensor: Any) -> Words:
    found: Words = tensor.data.view(np.uint32).reshape(tensor.shape)
    return found


def _along(words: Words, bits: int) -> Bytes:
    """Unpack [n, words] → [n, codes], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def _of_outputs(words: Words, rows: npt.NDArray[np.intp], bits: int, places: Any = None) -> Bytes:
    """Unpack [n, words of outputs] → [n, rows]."""
    each = 32 // bits
    within = rows % each
    shifts = (bits * (within if places is None else places[within])).astype(np.uint32)
    codes = words[:, rows // each] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8)
