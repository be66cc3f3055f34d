"""What the decoder is given for one step: one flat run of tokens, and the two lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


# ── the same for fused kernels: one launch a list, sequences named by their row ─────────────


@dataclass(frozen=True, slots=True)
class FusedDecode:
    """The first tokens of the step: one query each."""

    rows: torch.Tensor  # [B] int32
    lengths: torch.Tensor  # [B] int32: cached positions, the query's own included; 0: padding
    splits: int
    scratch: Any  # the kernels' own


@dataclass(frozen=True, slots=True)
class FusedPrefill:
    """The tokens after those: chunk c is tokens [cu_tokens[c], cu_tokens[c + 1]) of them."""

    rows: torch.Tensor  # [C] int32
    starts: torch.Tensor  # [C] int32
    cu_tokens: torch.Tensor  # [C + 1] int32
    tokens: int
    max_fresh: int  # tokens of the largest chunk that begins its sequence, 0 if there is none
    max_later: int  # of the largest other one


@dataclass(frozen=True, slots=True)
class FusedWanted:
    """The tokens whose last hidden state somebody wants. The last layer attends with them as with
    decode slots: their keys and values are in the cache by then."""

    tokens: torch.Tensor  # [S] int64
    slots: FusedDecode


@dataclass(frozen=True, slots=True)
class FusedInputs:
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] int64
    slots: Sequence[torch.Tensor]  # per KV group: [T] int64, where keys and values go; -1: nowhere
    tables: Sequence[torch.Tensor]  # per KV group: [rows, blocks] int32
    decode: FusedDecode | None
    prefill: FusedPrefill | None
    wanted: FusedWanted | None  # None: all tokens
