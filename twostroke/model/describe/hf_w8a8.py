"""Reads the settings of weights in fp8 or int8 from config.json (`quantization_config`). Other
settings are refused by name.

    quant_method        weights                                   activations
    fp8                 a scale a tensor, or `weight_block_size`  dynamic, or static (`input_scale`
                                                                  or `activation_scale`)
    compressed-tensors  float of 8 bits: tensor, channel, block   dynamic, static, or none
    compressed-tensors  int of 8 bits: tensor, channel            dynamic, static, or none

Static scales of activations are ignored: a scale per token is more precise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.errors import ModelError
from twostroke.model.describe.hf_compressed import INSTEAD, read_single_group, refuse
from twostroke.model.fields import Fields, shown

log = logging.getLogger(__name__)

# A weight type of compressed-tensors → our name; a format → the weight types that it may have.
TYPES = {"float": "fp8", "int": "int8"}
FORMATS = {
    "float-quantized": ("float",),
    "int-quantized": ("int",),
    "naive-quantized": ("float", "int"),
}
STRATEGIES = {"fp8": ("tensor", "channel", "block"), "int8": ("tensor", "channel")}


class W8Config(NamedTuple):
    type: str = "fp8"  # or int8
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    weight_only: bool = False  # activations are not quantised

    @property
    def name(self) -> str:
        """The name for messages."""
        return self.type


def w8_config(config: Mapping[str, Any], where: str) -> W8Config | None:
    """Return the configuration; None if the model is not quantised."""
    fields = Fields(where, config)
    if not fields.value("quantization_config"):
        return None
    fields = fields.nested("quantization_config")
    method = fields.value("quant_method")
    if method == "fp8":
        return _plain(fields)
    if method == "compressed-tensors":
        known = FORMATS[fields.choice("format", tuple(FORMATS), "float-quantized")]
        return read_single_group(fields, lambda group, weights: _group(group, weights, known))
    raise ModelError(
        f"{where}: weights quantised by {shown(method)} (quantization_config) are not supported "
        f"with this model_type. Supported: fp8, gptq, awq, compressed-tensors. {INSTEAD}"
    )


def _plain(fields: Fields) -> W8Config:
    """Read the layout of vLLM, DeepSeek and Qwen."""
    if fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
        _log_static(fields)
    if str(fields.value("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        refuse(fields, "fmt", "supported: e4m3")
    block = fields.value("weight_block_size")
    return W8Config(block=None if block is None else _block(fields, "weight_block_size"))


def _group(group: Fields, weights: Fields, known: tuple[str, ...]) -> W8Config:
    kind = weights.value("type")
    if kind not in known or weights.value("num_bits") != 8:
        supported = f"supported: {' and '.join(known)} of 8 bits"
        refuse(weights, "num_bits", f"with type {shown(kind)}; {supported}")
    type = TYPES[kind]
    if not weights.boolean("symmetric", True):
        refuse(weights, "symmetric", f"weights in {type} have no zero points")
    strategy, strategies = weights.value("strategy"), STRATEGIES[type]
    if strategy not in strategies:
        refuse(weights, "strategy", f"supported for {type}: {', '.join(strategies)}")
    weight_only = not group.value("input_activations")
    if not weight_only:
        _check_activations(group.nested("input_activations"), kind)
    block = _block(weights, "block_structure") if strategy == "block" else None
    return W8Config(type, block, weight_only)


def _check_activations(fields: Fields, kind: str) -> None:
    if fields.value("type") != kind or fields.value("num_bits") != 8:
        given = shown(fields.value("type"))
        supported = f"supported with such weights: {kind} of 8 bits"
        refuse(fields, "num_bits", f"with type {given}; {supported}")
    if kind == "int":
        if not fields.boolean("symmetric", True):
            refuse(fields, "symmetric", "activations in int8 have no zero points")
        if fields.value("strategy") not in (None, "token", "tensor"):
            refuse(fields, "strategy", "supported: token, tensor")
    if fields.value("dynamic") is not True:
        _log_static(fields)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.value(name)
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    sizes = (16, 32, 64, 128, 256, 512, 1024)
    if not isinstance(value, list) or len(value) != 2 or any(size not in sizes for size in value):
        fields.refuse(name, "two of 16, 32, 64, … 1024, such as [128, 128]")
    return value[0], value[1]


def _log_static(fields: Fields) -> None:
    log.info("%s: static scales are ignored: each token has its own scale", fields.where)
