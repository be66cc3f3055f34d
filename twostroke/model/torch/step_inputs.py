"""The inputs of the decoder for one step: one flat run of tokens, decode rows and chunks.

    tokens   [ decode rows, each with its queries │ chunk 0 │ chunk 1 │ … │ padding ]

A sequence is identified by its row in the block tables. Lengths, starts and slots count entries of
the cache, and are given for each KV group. Positions are the input of rope, and are the same for
all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twostroke.kernels.records import DecodeWork, KVView, PrefillWork

KV = tuple[torch.Tensor, torch.Tensor]  # the cached keys and values of a layer


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens whose last hidden states the step returns. The last layer handles them like decode
    rows, because their keys and values are in the cache already."""

    tokens: torch.Tensor  # [S] int64
    work: Sequence[DecodeWork]  # per KV group


@dataclass(frozen=True, slots=True)
class StepInputs:
    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T] int64
    slots: Sequence[torch.Tensor]  # per KV group: [T] int64, where keys and values go; -1: nowhere
    tables: Sequence[torch.Tensor]  # per KV group: [rows, blocks] int32
    decode: Sequence[DecodeWork]  # per KV group; empty: no decode rows
    prefill: Sequence[PrefillWork]  # per KV group; empty: no chunks
    kept: KeptTokens | None  # None: all tokens

    @property
    def only_decodes(self) -> bool:
        return bool(self.decode) and not self.prefill

    @property
    def num_decode_tokens(self) -> int:
        """The number of tokens of the decode rows; the tokens of the chunks follow."""
        return self.decode[0].num_tokens if self.decode else 0

    def view(self, group: int, cache: KV, tokens: int | None = None) -> KVView:
        """Return this step's view of the cache of a layer of the group. `tokens`: the view has the
        slots of only the first `tokens` tokens."""
        slots = self.slots[group]
        own = slots if tokens is None else slots[:tokens]
        return KVView(*cache, self.tables[group], own)
