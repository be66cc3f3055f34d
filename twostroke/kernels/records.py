"""The records that kernels are called with: the same for the reference, Triton and the tests.

    per layer               Rope · AttentionRule · RoutingRule · ExpertWeights
    per step                StepContext · DrawParams
    per step and KV group   DecodeWork · PrefillWork
    per layer and step      KVView

Shapes: T tokens in a step, B decode rows, C prefill chunks, H query heads, K key/value heads of D
channels, latents of R channels. A CUDA launcher unpacks the records next to its kernel; nothing
here computes anything.
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
    """Settings of the launches of a step. Every kernel of a layer takes them: a value that a new
    feature needs per step, row or token becomes a field here."""

    # Programmatic dependent launch (PDL): a launch may be set up before the previous one has ended.
    dependent_launch: bool = False


DEFAULT_CONTEXT = StepContext()


# ── attention ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Rope:
    """The norm, rotation and scale of the queries and keys of a layer, before attention."""

    cos: Tensor  # [max_len, dim / 2] in fp32
    sin: Tensor
    query_scales: Tensor | None = None  # [max_len]: factor of the rotated queries at a position
    q_norm: Tensor | None = None  # [D], a norm over each head
    k_norm: Tensor | None = None  # [D]; in a layer with latents [R], over the latent
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The attention rule of one layer."""

    scale: float
    window: int | None = None
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [H] in fp32: one more score in the softmax of each head


@dataclass(frozen=True, slots=True)
class KVView:
    """The paged KV cache of one layer, as one step sees it."""

    keys: Tensor  # [blocks, block_size, K, D]; latents: [blocks, block_size, 1, R + rope]
    values: Tensor  # as the keys; in a layer with latents a view of them
    tables: Tensor  # [rows, blocks] int32: the blocks of each sequence in order; block 0 is null
    slots: Tensor  # [T]: where new entries go, block · block_size + offset; -1: nowhere


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """The decode rows of a step in one KV group: `queries` tokens a row, one after another."""

    rows: Tensor  # [B] int32, rows of the block tables
    lengths: Tensor  # [B] int32: cache entries, those of all queries included; 0: a padding row
    queries: int
    splits: int  # parts that each context is cut into
    scratch: Any  # memory for merging the splits, of the type that the kernels allocate

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.queries


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """The prefill chunks of a step in one KV group: chunk c is tokens [cu_tokens[c],
    cu_tokens[c + 1]) of the chunks' tokens."""

    rows: Tensor  # [C] int32, rows of the block tables
    starts: Tensor  # [C] int32: the index in the cache of each chunk's first token
    cu_tokens: Tensor  # [C + 1] int32
    num_tokens: int
    max_first: int  # tokens of the largest chunk that begins its sequence; 0: there is none
    max_continued: int  # tokens of the largest other chunk
    spans: Sequence[tuple[int, int]]  # on the host: start and end of each chunk in the cache


# ── experts ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The rule that chooses the experts of a token: see `RoutingSpec`."""

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

    gate_up: Tensor  # gates first, then ups; ups alone if not gated
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: Activation
    gated: bool


# ── sampling ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DrawParams(Generic[Array]):
    """Sampling parameters, one value for each row of logits."""

    temperature: Array  # 0: greedy
    top_k: Array  # 0: no limit
    top_p: Array  # 1: no limit
    min_p: Array  # 0: no limit
    key0: Array  # `stream_key` of the row's seed and the token's position
    key1: Array
