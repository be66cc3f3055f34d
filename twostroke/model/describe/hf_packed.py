"""Reads the settings of weights of 4 or 8 bits from config.json (`quantization_config`). Other
settings are refused by name.

    quant_method        layout of the codes                    each group has a zero point
    gptq                `qweight` [in / 8, out], v1 and v2      unless `sym`
    awq                 `qweight` [in, out / 8], version gemm   if `zero_point`
    compressed-tensors  `weight_packed` [out, in / 8]           unless `symmetric`

Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from twostroke.model.describe.hf_compressed import read_single_group, refuse
from twostroke.model.fields import Fields


class PackedConfig(NamedTuple):
    layout: str  # gptq, awq, compressed
    bits: int
    group: int  # numbers of a row that share a scale; 0: all of them
    zeros: bool  # each group has a zero point
    zero_shift: int = 0  # added to a stored zero

    @property
    def name(self) -> str:
        """The name for messages."""
        return f"int{self.bits}"


def packed_config(config: Mapping[str, Any], where: str) -> PackedConfig | None:
    """Return the configuration; None for a model in another format."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    fields = Fields(where, config).nested("quantization_config")
    method = fields.value("quant_method")
    if method == "gptq":
        return _gptq(fields)
    if method == "awq":
        return _awq(fields)
    if method == "compressed-tensors" and fields.value("format") == "pack-quantized":
        return read_single_group(fields, _compressed)
    return None


def _gptq(fields: Fields) -> PackedConfig:
    bits = _bits(fields, "bits")
    layout = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    zeros = not fields.boolean("sym", True)
    # Version 1 stores each zero minus one, also in symmetric files.
    return PackedConfig("gptq", bits, _group(fields), zeros, int(layout == "gptq"))


def _awq(fields: Fields) -> PackedConfig:
    version = str(fields.value("version") or "gemm").lower()
    if version != "gemm":
        refuse(fields, "version", "supported: gemm")
    bits = _bits(fields, "bits", (4,))
    return PackedConfig("awq", bits, _group(fields), fields.boolean("zero_point", True))


def _compressed(group: Fields, weights: Fields) -> PackedConfig:
    if weights.value("type") != "int":
        refuse(weights, "type", "packed weights are of type int")
    if group.value("input_activations"):
        refuse(group, "input_activations", "activations of packed weights are not quantised")
    strategy = weights.value("strategy")
    if strategy not in ("group", "channel"):
        refuse(weights, "strategy", "supported: group, channel")
    size = _group(weights) if strategy == "group" else 0
    bits, zeros = _bits(weights, "num_bits"), not weights.boolean("symmetric", True)
    return PackedConfig("compressed", bits, size, zeros)


def _bits(fields: Fields, name: str, known: tuple[int, ...] = (4, 8)) -> int:
    bits = fields.value(name)
    if isinstance(bits, bool) or bits not in known:
        refuse(fields, name, f"supported: {' and '.join(map(str, known))} bits")
    return int(bits)


def _group(fields: Fields) -> int:
    value = fields.value("group_size")
    if value == -1:
        return 0
    return int(fields.integer("group_size", 16, 1 << 20))
