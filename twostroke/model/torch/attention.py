"""What a layer does between the norm in front of its attention and its output projection.

Workspace           what layers leave for their attention, and attention for them
Attention           what the decoder asks of any layer
HeadsAttention      keys and values of heads, which are cached as they are
latent.py           keys and values made from a latent, which is what is cached
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from twostroke.kernels.reference import Attend, Kernels
from twostroke.model.describe.spec import AttentionSpec, ModelSpec
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.step_inputs import DecodeInputs, KeptTokens, StepInputs

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer


class Rope(NamedTuple):
    cos: torch.Tensor  # [max_len, dim / 2]
    sin: torch.Tensor
    query_scales: torch.Tensor | None = None  # [max_len]


class Workspace:
    """What a layer leaves for its attention, and attention for the rest of the layer: the same
    place for every layer, so that their attention differs in the cache alone."""

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = [layer.attention for layer in spec.layers]
        qkv_size = max(_qkv_size(part) for part in parts)
        q_size = max(part.output_size for part in parts)
        self.residual, self._qkv, self._attended = (
            torch.empty(tokens, size, dtype=dtype, device=device)
            for size in (spec.hidden_size, qkv_size, q_size)
        )

    def zero(self) -> None:
        for part in (self.residual, self._qkv, self._attended):
            part.zero_()

    def of(self, tokens: int) -> Workspace:
        """The first tokens of it."""
        other = copy(self)
        other.residual = self.residual[:tokens]
        other._qkv, other._attended = self._qkv[:tokens], self._attended[:tokens]
        return other

    def qkv(self, part: AttentionSpec) -> torch.Tensor:
        """[T, (H + 2K) · D], or what a layer with latents has in its place."""
        tokens, size = len(self._qkv), _qkv_size(part)
        return self._qkv.view(-1)[: tokens * size].view(tokens, size)

    def attended(self, part: AttentionSpec) -> torch.Tensor:
        """[T, H, D]"""
        tokens, size = len(self._attended), part.output_size
        flat = self._attended.view(-1)[: tokens * size]
        return flat.view(tokens, part.num_heads, part.value_dim)


def _qkv_size(part: AttentionSpec) -> int:
    """What a token's queries, keys and values (or its latent and rope key) take."""
    return part.q_size + (2 * part.kv_size if part.latent is None else part.cached[1])


class Attention(ABC):
    """One layer's. `bind` is called for the first layer of a kind in a step, and what it returns
    for every layer of that kind: they differ in their weights and their cache alone."""

    part: AttentionSpec

    def a8_type(self, rows: int) -> torch.dtype | None:
        """What it has its input quantised to, of so many rows; None: as it is."""
        return None

    @abstractmethod
    def project(
        self, normed: Activations, inputs: StepInputs, cache: KV, work: Workspace, pdl: bool
    ) -> None:
        """Leave queries in the workspace, and keys and values there and in the cache."""

    @abstractmethod
    def bind(self, inputs: StepInputs, cache: KV, work: Workspace) -> Callable[[Any, KV], None]:
        """`attend(attention of a layer, its cache)` over what `project` has left, for both lists
        of the step, to the workspace."""

    @abstractmethod
    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        """The same for the tokens that are kept, alone: [S, H, value]."""

    @abstractmethod
    def decode(
        self,
        normed: Activations,
        inputs: StepInputs,
        decode: DecodeInputs,
        cache: KV,
        pdl: bool,
    ) -> torch.Tensor:
        """All of it, of a step that only decodes, a token a row: [T, H, value]. What comes after
        the rows is padding."""


@dataclass(slots=True)
class HeadsAttention(Attention):
    part: AttentionSpec
    group: int  # KV group
    rope: Rope
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None  # [H] in fp32
    norm_eps: float
    norm_all_heads: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    kernels: Kernels

    def a8_type(self, rows: int) -> torch.dtype | None:
        return self.qkv.a8_type(rows)

    def project(
        self, normed: Activations, inputs: StepInputs, cache: KV, work: Workspace, pdl: bool
    ) -> None:
        self.kernels.rope_store(
            self._product(normed, pdl, work.qkv(self.part)),
            *self._head_norms,
            self.norm_eps,
            self.rope.cos,
            self.rope.sin,
            inputs.positions,
            inputs.slots[self.group],
            *cache,
            self.part.num_heads,
            self.part.num_kv_heads,
            pdl=pdl,
            query_scales=self.rope.query_scales,
        )

    def bind(
        self, inputs: StepInputs, cache: KV, work: Workspace
    ) -> Callable[[HeadsAttention, KV], None]:
        launches = list(self._bind_lists(inputs, cache, work))

        def attend(layer: HeadsAttention, cache: KV) -> None:
            for launch in launches:
                launch(*cache, layer.sinks)

        return attend

    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        queries = self._heads(work)[:, : self.part.num_heads].index_select(0, kept.tokens)
        attended = torch.empty_like(queries)
        self._bind_rows(queries, attended, inputs, kept.rows, cache)(*cache, self.sinks)
        return attended

    def decode(
        self,
        normed: Activations,
        inputs: StepInputs,
        decode: DecodeInputs,
        cache: KV,
        pdl: bool,
    ) -> torch.Tensor:
        part, group, rows = self.part, self.group, decode.num_tokens
        qkv = self._product(normed, pdl)
        attended = qkv.new_empty(len(qkv), part.num_heads, part.head_dim)
        self.kernels.rope_decode_attention(
            qkv[:rows],
            *self._head_norms,
            self.norm_eps,
            self.rope.cos,
            self.rope.sin,
            inputs.positions[:rows],
            inputs.slots[group][:rows],
            *cache,
            inputs.tables[group],
            decode.rows,
            decode.lengths[group],
            part.scale,
            part.window,
            part.softcap,
            decode.splits[group],
            decode.scratch[group],
            out=attended[:rows],
            pdl=pdl,
            sinks=self.sinks,
            query_scales=self.rope.query_scales,
        )
        return attended

    @property
    def _head_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Norms over each head, which kernels apply beside rope."""
        if self.part.qk_norm != "head":
            return None, None
        return self.q_norm, self.k_norm

    def _product(
        self, normed: Activations, pdl: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, (H + 2K) · D], after a norm over all heads where the layer has one."""
        part, qkv = self.part, self.qkv.product(normed, pdl=pdl, out=out)
        if part.qk_norm == "full" and self.q_norm is not None and self.k_norm is not None:
            q, k = qkv[:, : part.q_size], qkv[:, part.q_size : part.q_size + part.kv_size]
            for side, weight in ((q, self.q_norm), (k, self.k_norm)):
                side.copy_(self.norm_all_heads(side.contiguous(), weight, self.norm_eps))
        return qkv

    def _heads(self, work: Workspace) -> torch.Tensor:
        part = self.part
        return work.qkv(part).view(-1, part.num_heads + 2 * part.num_kv_heads, part.head_dim)

    def _bind_lists(self, inputs: StepInputs, cache: KV, work: Workspace) -> Iterator[Attend]:
        """The two lists, a launch each."""
        part, decode, prefill = self.part, inputs.decode, inputs.prefill
        qkv, out, heads = self._heads(work), work.attended(part), part.num_heads
        first = 0 if decode is None else decode.num_tokens
        if decode is not None:
            yield self._bind_rows(qkv[:first, :heads], out[:first], inputs, decode, cache)
        if prefill is not None:
            tokens = slice(first, first + prefill.num_tokens)
            yield self.kernels.bind_prefill_attention(
                qkv[tokens, :heads],
                *cache,
                inputs.tables[self.group],
                prefill.rows,
                prefill.starts[self.group],
                prefill.cu_tokens,
                prefill.max_continued,
                part.scale,
                part.window,
                part.softcap,
                out=out[tokens],
                chunk_kv=qkv[tokens, heads:],
                max_first=prefill.max_first,
                sinks=self.sinks,
            )

    def _bind_rows(
        self,
        queries: torch.Tensor,
        out: torch.Tensor,
        inputs: StepInputs,
        decode: DecodeInputs,
        cache: KV,
    ) -> Attend:
        part, group = self.part, self.group
        return self.kernels.bind_decode_attention(
            queries,
            *cache,
            inputs.tables[group],
            decode.rows,
            decode.lengths[group],
            part.scale,
            part.window,
            part.softcap,
            decode.splits[group],
            decode.scratch[group],
            out=out,
            queries=decode.queries,
            sinks=self.sinks,
        )
