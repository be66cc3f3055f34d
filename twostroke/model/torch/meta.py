"""`to_meta`: layers whose tensors have no memory, to compile the kernels that they launch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from twostroke.kernels.records import AttentionRule, ExpertWeights, Rope
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks

RECORDS = (AttentionRule, ExpertWeights, Rope)

Dataclass = TypeVar("Dataclass")


def fields_to_meta(part: Dataclass) -> Dataclass:
    """Return a dataclass with `to_meta` applied to each field."""
    values = {field.name: to_meta(getattr(part, field.name)) for field in fields(part)}  # type: ignore[arg-type]
    return replace(part, **values)  # type: ignore[type-var]


def to_meta(part: Any) -> Any:
    """Return a tensor, a record or a layer without memory; any other value unchanged."""
    if isinstance(part, torch.Tensor):
        return part.to("meta")
    if isinstance(part, Ranks):
        return ONE_RANK
    if isinstance(part, RECORDS):
        return fields_to_meta(part)
    return part.to_meta() if hasattr(part, "to_meta") else part
