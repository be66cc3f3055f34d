"""The records that are the arguments of kernels. The reference kernels, the Triton kernels and the
tests take the same records.

    per layer               Rope · AttentionRule · RoutingRule · ExpertWeights
    per step                StepContext · DrawParams
    per step and KV group   DecodeWork · PrefillWork
    per layer and step      KVView

Shapes: T tokens in a step, B decode rows, C prefill chunks, H query heads, K key/value heads of D
channels, latents of R channels. The launcher of a Triton kernel unpacks the records. This module
only defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twostroke.kernels.activations import Activation

if TYPE_CHECKING:
    from torch import Tensor

Array = TypeVar("Array")  # a tensor, or a numpy array on the host


@dataclass(frozen=True, slots=True)
class StepContext:
    """Settings of the kernel launches of a step. Every kernel of a layer takes this record. If a
    new feature needs a value for each step, row or token, add a field here."""

    # Programmatic dependent launch (PDL): a kernel may start before the previous kernel has ended.
    dependent_launch: bool = False


DEFAULT_CONTEXT = StepContext()


# ── attention ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rope:
    """The operations on the queries and keys of a layer before attention: norm, rope, scale."""

    cos: Tensor  # [max_len, dim / 2] in fp32
    sin: Tensor
    query_scales: Tensor | None = None  # [max_len]: factor of the rotated queries, by position
    q_norm: Tensor | None = None  # [D], a norm over each head
    k_norm: Tensor | None = None  # [D]; with latents [R], a norm over the latent
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The properties of a layer that change its attention scores."""

    scale: float
    window: int | None = None
    softcap: float = 0.0  # 0: no softcap
    sinks: Tensor | None = None  # [H] in fp32: an additional score in the softmax of each head


@dataclass(frozen=True, slots=True)
class KVView:
    """The paged KV cache of one layer in one step."""

    keys: Tensor  # [blocks, block_size, K, D]; latents: [blocks, block_size, 1, R + rope]
    values: Tensor  # the shape of the keys; with latents a view of the keys
    tables: Tensor  # [rows, blocks] int32: the blocks of each sequence in order; block 0 is unused
    slots: Tensor  # [T]: block · block_size + offset of the new entry; -1: no entry is stored


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The decode rows of a step in one KV group. Each row has `queries` consecutive tokens."""

    rows: Tensor  # [B] int32, rows of the block tables
    lengths: Tensor  # [B] int32: cache entries, including the queries' own; 0: a padding row
    queries: int
    splits: int  # number of parts of each context that are computed in parallel
    scratch: Any  # memory for merging the splits; the type depends on the backend

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.queries


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefill chunks of a step in one KV group. The tokens of all chunks follow one another;
    chunk c has the tokens from `cu_tokens[c]` to `cu_tokens[c + 1]`."""

    rows: Tensor  # [C] int32, rows of the block tables
    starts: Tensor  # [C] int32: the index in the cache of each chunk's first token
    cu_tokens: Tensor  # [C + 1] int32: cumulated token counts, as `cu_seqlens` of FlashAttention
    num_tokens: int
    max_first: int  # tokens of the largest chunk at position 0; 0: no such chunk
    max_continued: int  # tokens of the largest chunk at a later position; 0: no such chunk
    spans: Sequence[tuple[int, int]]  # on the host: start and end of each chunk in the cache


# ── experts ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that chooses the experts of a token. `RoutingSpec` explains the fields."""

    experts_per_token: int
    scoring: str  # "softmax" or "sigmoid"
    normalised: bool
    scale: float
    num_groups: int
    groups_used: int
    group_score: str  # "max" or "top2_sum"


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer, stacked: [experts, out, in], biases [experts, out]."""

    gate_up: Tensor  # rows of gate, then rows of up; only up if `gated` is False
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: Activation
    gated: bool


# ── sampling ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DrawParams(Generic[Array]):
    """Sampling parameters, one value for each row of logits."""

    temperature: Array  # 0: greedy sampling
    top_k: Array  # 0: no limit
    top_p: Array  # 1: no limit
    min_p: Array  # 0: no limit
    key0: Array  # `stream_key` of the row's seed and the token's position
    key1: Array
