"""Reads the fields that all `quantization_config`s of compressed-tensors share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn, TypeVar

from twostroke.errors import ModelError
from twostroke.model.fields import Fields, shown

log = logging.getLogger(__name__)

INSTEAD = "Use the unquantised model, or a GGUF of it."

Config = TypeVar("Config")


def read_single_group(fields: Fields, read: Callable[[Fields, Fields], Config]) -> Config:
    """Return the configuration that `read` makes of a group of layers and its weights.

    All groups must give the same configuration.
    """
    for name in ("sparsity_config", "transform_config"):
        if fields.value(name) and fields.nested(name).value("format") != "dense":
            refuse(fields, name, "supported: dense weights")
    if fields.value("kv_cache_scheme"):
        log.info("%s: kv_cache_scheme is ignored; see --kv-cache-dtype", fields.where)
    groups = fields.nested("config_groups")
    found = {_read(groups.nested(name), read) for name in groups.names()}
    if len(found) != 1:
        raise ModelError(
            f"{fields.where}: config_groups has {len(found)} kinds of quantisation; exactly one is "
            f"supported. {INSTEAD}"
        )
    return found.pop()


def _read(group: Fields, read: Callable[[Fields, Fields], Config]) -> Config:
    weights = group.nested("weights")
    if weights.boolean("dynamic", False):
        refuse(weights, "dynamic", "scales of weights are stored")
    if group.value("output_activations"):
        refuse(group, "output_activations", "leave it out")
    return read(group, weights)


def refuse(fields: Fields, name: str, instead: str) -> NoReturn:
    raise ModelError(
        f"{fields.where}: {name} = {shown(fields.value(name))} is not supported ({instead}). "
        f"{INSTEAD}"
    )
