"""What the decoder is given for one step: one flat run of tokens, and the two lists."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The first `rows` tokens of the step: one query each."""

    rows: int
    tables: list[torch.Tensor]  # per KV group: [rows, blocks]
    lengths: torch.Tensor  # [rows]: cached positions, the query's own included
    longest: int


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """Tokens [first, first + size) of the step: positions [start, start + size) of one row."""

    first: int
    size: int
    start: int
    tables: list[torch.Tensor]  # per KV group: [blocks]


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [T]: decode slots first, then the chunks
    positions: torch.Tensor  # [T]
    slots: list[torch.Tensor]  # per KV group: [T], where keys and values go
    decode: DecodeInputs | None
    prefill: list[ChunkInputs]
    sampled: torch.Tensor  # [S]: tokens of the step whose logits are sampled
    sampled_rows: list[int]
    sampled_positions: list[int]  # where each sampled token will stand
