"""Matrices of checkpoints in fp8 (e4m3) or int8: values in one tensor, scales in another."""

from __future__ import annotations

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.weights import Bytes, Floats

Block = tuple[int, int]  # rows and columns that share a scale

W8_TYPES = {"fp8": "F8_E4M3", "int8": "I8"}  # name in config.json → dtype of the tensor
W8_SCALES = ("_scale", "_scale_inv")  # name of a weight + suffix: its scales, both to multiply by
SCALE_TYPES = ("F32", "F16", "BF16")
# Suffixes of the static scales of activations, which are not read: the scale of each token is
# computed at run time.
STATIC_SCALES = (
    *(".input_scale", ".activation_scale"),  # the input of a linear, as in vLLM and transformers
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)


def scales_per_row(
    label: str, dtype: str, stored: tuple[int, ...], shape: tuple[int, ...], block: Block | None
) -> int:
    """Return how many scales a row of a matrix of `shape` has. Refuse scales that do not fit.

    `label`, `dtype` and `stored` are the name, dtype and shape of the tensor of scales.
    """
    if dtype not in SCALE_TYPES:
        raise ModelError(
            f"{label} is of type {dtype}, expected one of {', '.join(SCALE_TYPES)}. Use another "
            "conversion of the model."
        )
    rows, columns = shape
    if block is None:
        groups, fits = 1, stored in ((), (1,), (1, 1), (rows,), (rows, 1))
        expected = f"{(rows, 1)} or ()"
    else:
        groups = -(-columns // block[1])
        wanted = (-(-rows // block[0]), groups)
        fits, expected = stored == wanted, str(wanted)
    if not fits:
        raise ModelError(
            f"{label} has shape {stored}, but a matrix of {shape} and config.json "
            f"(quantization_config) ask for {expected}. They belong to different models."
        )
    if block is not None and columns % block[1]:
        raise ModelError(
            f"{label} has scales for blocks of {block[1]} columns, but the {columns} columns of "
            "its matrix are not a multiple of that; this is not supported. Use the unquantised "
            "model."
        )
    return groups


def row_scales(
    data: Bytes, dtype: str, stored: tuple[int, ...], rows: int, block: Block | None
) -> Floats:
    """Return the scales as [rows, groups], repeated for the rows that share one."""
    values = dequantize(data, BlockType(dtype), stored)
    if block is not None:
        return np.repeat(values, block[0], axis=0)[:rows]
    return np.broadcast_to(values.reshape(-1, 1), (rows, 1))


def dequantize_w8(bits: Bytes, scales: Floats, type: str) -> Floats:
    """Dequantise a matrix. `type`: fp8 or int8."""
    values = E4M3_VALUES[bits] if type == "fp8" else bits.view(np.int8).astype(np.float32)
    grouped = values.reshape(len(bits), scales.shape[1], -1)
    result: Floats = (grouped * scales[:, :, None]).reshape(bits.shape)
    return result


def w8_is_finite(bits: Bytes, type: str) -> bool:
    """Return whether all values are finite. In e4m3, NaN is all ones after the sign, and there is
    no infinity."""
    return type != "fp8" or not bool((bits & 0x7F == 0x7F).any())


def _e4m3_values() -> Floats:
    """Return the value of each bit pattern. The patterns of NaN are never looked up."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(exponent, 2.0 ** (exponent - 7) * (1 + mantissa / 8), mantissa * 2.0**-9)
    return np.where(bits & 128, -sizes, sizes).astype(np.float32)


E4M3_VALUES = _e4m3_values()
