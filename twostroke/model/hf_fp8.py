"""What a config.json says of weights in fp8 (`quantization_config`); the rest is refused by name.

    quant_method        weights                                   activations
    fp8                 a scale a tensor, or `weight_block_size`  dynamic, or static (`input_scale`)
    compressed-tensors  float of 8 bits: tensor, channel, block   dynamic, static, or none

Static scales of activations are left out: a token's own scale is nearer to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from twostroke.errors import ModelError
from twostroke.model.fields import Fields, shown

log = logging.getLogger(__name__)

INSTEAD = "Use the unquantised model, or a GGUF of it."
FORMATS = ("float-quantized", "naive-quantized")


class Fp8Config(NamedTuple):
    block: tuple[int, int] | None = None  # rows and columns that share a scale, if they do so
    weight_only: bool = False  # activations stay as they are

    @property
    def name(self) -> str:
        """As a message calls it."""
        return "fp8"


def fp8_config(config: Mapping[str, Any], where: str) -> Fp8Config | None:
    """None if the model is not quantised."""
    fields = Fields(where, config)
    if not fields.value("quantization_config"):
        return None
    fields = fields.nested("quantization_config")
    method = fields.value("quant_method")
    if method == "fp8":
        return _plain(fields)
    if method == "compressed-tensors":
        return _compressed(fields)
    raise ModelError(
        f"{where}: weights quantised by {shown(method)} (quantization_config) are not supported "
        f"with this model_type: fp8, gptq, awq and compressed-tensors are. {INSTEAD}"
    )


def _plain(fields: Fields) -> Fp8Config:
    """As vLLM, DeepSeek and Qwen write it."""
    if fields.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static":
        _log_static(fields)
    if str(fields.value("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(fields, "fmt", "e4m3 is what there is")
    block = fields.value("weight_block_size")
    return Fp8Config(None if block is None else _block(fields, "weight_block_size"))


def _compressed(fields: Fields) -> Fp8Config:
    """Of one group of layers, or of several that agree."""
    fields.choice("format", FORMATS, FORMATS[0])
    for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if fields.value(name):
            if name == "kv_cache_scheme":
                log.info("%s: kv_cache_scheme is left out; see --kv-cache-dtype", fields.where)
            elif fields.nested(name).value("format") != "dense":
                _refuse(fields, name, "dense weights in fp8 are what there is")
    groups = fields.nested("config_groups")
    found = {_group(groups.nested(name)) for name in groups.names()}
    if len(found) != 1:
        raise ModelError(
            f"{fields.where}: config_groups has {len(found)} kinds of quantisation, and one is "
            f"supported. {INSTEAD}"
        )
    return found.pop()


def _group(fields: Fields) -> Fp8Config:
    weights = fields.nested("weights")
    if weights.value("type") != "float" or weights.value("num_bits") != 8:
        _refuse(weights, "num_bits", f"with type {shown(weights.value('type'))}: float of 8 is")
    if not weights.boolean("symmetric", True):
        _refuse(weights, "symmetric", "fp8 has no zero points")
    if weights.boolean("dynamic", False):
        _refuse(weights, "dynamic", "scales of weights are stored")
    strategy = weights.value("strategy")
    if strategy not in ("tensor", "channel", "block"):
        _refuse(weights, "strategy", "tensor, channel and block are")
    if fields.value("output_activations"):
        _refuse(fields, "output_activations", "leave it out")
    activations = fields.nested("input_activations")
    weight_only = not fields.value("input_activations")
    if not weight_only:
        if activations.value("type") != "float" or activations.value("num_bits") != 8:
            _refuse(activations, "num_bits", "float of 8 is")
        if activations.value("dynamic") is not True:
            _log_static(fields)
    block = _block(weights, "block_structure") if strategy == "block" else None
    return Fp8Config(block, weight_only)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.value(name)
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    sizes = (16, 32, 64, 128, 256, 512, 1024)
    if not isinstance(value, list) or len(value) != 2 or any(size not in sizes for size in value):
        fields.refuse(name, "two of 16, 32, 64, … 1024, such as [128, 128]")
    return value[0], value[1]


def _refuse(fields: Fields, name: str, instead: str) -> NoReturn:
    raise ModelError(
        f"{fields.where}: {name} = {shown(fields.value(name))} is not supported ({instead}). "
        f"{INSTEAD}"
    )


def _log_static(fields: Fields) -> None:
    log.info("%s: static scales of activations are left out: each token has its own", fields.where)
