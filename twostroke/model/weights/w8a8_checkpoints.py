"""Matrices in fp8 (e4m3) or int8 as checkpoints have them: bits, and scales in another tensor."""

from __future__ import annotations

import numpy as np

from twostroke.errors import ModelError
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.weights import Bytes, Floats

Block = tuple[int, int]  # rows and columns that share a scale

W8_TYPES = {"fp8": "F8_E4M3", "int8": "I8"}  # of the tensor, by a config's word for it
W8_SCALES = ("_scale", "_scale_inv")  # after a weight's name: what its values are multiplied by
SCALE_TYPES = ("F32", "F16", "BF16")
# Beside such weights: what activations, keys and values are divided by where that is fixed.
STATIC_SCALES = (
    *(".input_scale", ".activation_scale"),  # of the same, by vLLM's name and by transformers'
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)


def scales_of_a_row(
    label: str, type: str, stored: tuple[int, ...], shape: tuple[int, ...], block: Block | None
) -> int:
    """How many there are of a matrix of `shape`; refuses scales that do not fit it. `label`, `type`
    and `stored` are those of the tensor that holds them."""
    if type not in SCALE_TYPES:
        raise ModelError(
            f"{label} is of type {type}, expected one of {', '.join(SCALE_TYPES)}. Use another "
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
            f"(quantization_config) ask for {expected}. The two are not of one model."
        )
    if block is not None and columns % block[1]:
        raise ModelError(
            f"{label} has scales for blocks of {block[1]} columns, which do not divide the "
            f"{columns} of its matrix; this is not supported. Use the unquantised model."
        )
    return groups


def row_scales(
    data: Bytes, type: str, stored: tuple[int, ...], rows: int, block: Block | None
) -> Floats:
    """[rows, groups], however many rows share one in the file."""
    values = dequantize(data, BlockType(type), stored)
    if block is not None:
        return np.repeat(values, block[0], axis=0)[:rows]
    return np.broadcast_to(values.reshape(-1, 1), (rows, 1))


def dequantise_w8(bits: Bytes, scales: Floats, type: str) -> Floats:
    values = E4M3_VALUES[bits] if type == "fp8" else bits.view(np.int8).astype(np.float32)
    grouped = values.reshape(len(bits), scales.shape[1], -1)
    found: Floats = (grouped * scales[:, :, None]).reshape(bits.shape)
    return found


def w8_is_finite(bits: Bytes, type: str) -> bool:
    """e4m3 has no infinity; NaN is all ones, with either sign."""
    return type != "fp8" or not bool((bits & 0x7F == 0x7F).any())


def _e4m3_values() -> Floats:
    """By their bits. Those of NaN are never looked up."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    sizes = np.where(exponent, 2.0 ** (exponent - 7) * (1 + mantissa / 8), mantissa * 2.0**-9)
    return np.where(bits & 128, -sizes, sizes).astype(np.float32)


E4M3_VALUES = _e4m3_values()
