"""What the decoder is given for one step: one flat run of tokens, and the two lists.

    tokens   [ decode rows, each with its queries │ chunk 0 │ chunk 1 │ … │ padding ]

Sequences are named by their row in the block tables. What counts entries of the cache (lengths,
starts, slots) is given for each KV group; positions are what rope sees, and are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The first tokens of the step: `queries` a row, one after another."""

    rows: torch.Tensor  # [B] int32
    lengths: Sequence[torch.Tensor]  # per KV group: [B] int32, all queries included; 0: padding
    queries: int
    splits: Sequence[int]  # per KV group: parts of a context
    scratch: Sequence[Any]  # per KV group: the kernels' own

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.queries


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The tokens after those: chunk c is tokens [cu_tokens[c], cu_tokens[c + 1]) of them."""

    rows: torch.Tensor  # [C] int32
    starts: Sequence[torch.Tensor]  # per KV group: [C] int32
    cu_tokens: torch.Tensor  # [C + 1] int32
    num_tokens: int
    max_first: int  # tokens of the largest chunk that begins its sequence, 0 if there is none
    max_continued: int  # of the largest other one
    # Per KV group, on the host: from where to where each chunk lies in the cache
    spans: Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens whose last hidden state somebody wants. The last layer attends with them as with
    decode rows: their keys and values are in the cache by then."""

    tokens: torch.Tensor  # [S] int64
    rows: DecodeInputs


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] int64
    slots: Sequence[torch.Tensor]  # per KV group: [T] int64, where keys and values go; -1: nowhere
    tables: Sequence[torch.Tensor]  # per KV group: [rows, blocks] int32
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    kept: KeptTokens | None  # None: all tokens

    @property
    def only_decodes(self) -> bool:
        return self.decode is not None and self.prefill is None
