"""The attention of a layer: from the output of its norm to the input of its output projection.

Workspace           memory for the inputs and outputs of attention, shared by all layers
Attention           the interface that the decoder calls, the same for all layers
HeadsAttention      attention that caches the keys and values of heads
latent.py           attention that caches latents, from which it computes keys and values
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.kernels.records import AttentionRule, DecodeWork, Rope, StepContext
from twostroke.kernels.reference import Attend, Kernels
from twostroke.model.describe.spec import AttentionSpec, ModelSpec
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.meta import fields_to_meta
from twostroke.model.torch.step_inputs import KV, KeptTokens, StepInputs


class Workspace:
    """Memory for the inputs and the output of attention. All layers use the same memory, so that
    the launches of two layers differ only in the cache."""

    def __init__(
        self, spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = [layer.attention for layer in spec.layers]
        qkv_size = max(_qkv_size(layer) for layer in layers)
        q_size = max(layer.output_size for layer in layers)
        self.residual, self._qkv, self._attended = (
            torch.empty(tokens, size, dtype=dtype, device=device)
            for size in (spec.hidden_size, qkv_size, q_size)
        )

    def zero(self) -> None:
        for part in (self.residual, self._qkv, self._attended):
            part.zero_()

    def first(self, tokens: int) -> Workspace:
        """Return the part of the workspace that belongs to the first `tokens` tokens."""
        other = copy(self)
        other.residual = self.residual[:tokens]
        other._qkv, other._attended = self._qkv[:tokens], self._attended[:tokens]
        return other

    def qkv(self, spec: AttentionSpec) -> torch.Tensor:
        """Return queries, keys and values, [T, (H + 2K) · D]; for a layer with latents its queries,
        latents and rope keys."""
        tokens, size = len(self._qkv), _qkv_size(spec)
        return self._qkv.view(-1)[: tokens * size].view(tokens, size)

    def attended(self, spec: AttentionSpec) -> torch.Tensor:
        """Return the output of attention, [T, H, D]."""
        tokens, size = len(self._attended), spec.output_size
        flat = self._attended.view(-1)[: tokens * size]
        return flat.view(tokens, spec.num_heads, spec.value_dim)


def _qkv_size(spec: AttentionSpec) -> int:
    """Return the elements of a token's queries, keys and values (or queries, latent, rope key)."""
    return spec.q_size + (2 * spec.kv_size if spec.latent is None else spec.cached_shape[1])


class Attention(ABC):
    """The attention of one layer. Layers of one kind differ only in their weights and their cache.
    In a step, `bind` is called for the first layer of a kind, and its result for all of them."""

    spec: AttentionSpec

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        """Return the type that an input of `rows` rows is quantised to; None if it is not."""
        return None

    def to_meta(self) -> Any:
        """Return the same attention without memory, for compiling kernels ahead."""
        return fields_to_meta(self)

    @abstractmethod
    def project(
        self,
        normed: Activations,
        inputs: StepInputs,
        cache: KV,
        work: Workspace,
        context: StepContext,
    ) -> None:
        """Write queries to the workspace, and keys and values to the workspace and the cache."""

    @abstractmethod
    def bind(self, inputs: StepInputs, cache: KV, work: Workspace) -> Callable[[Any, KV], None]:
        """Return `attend(attention of a layer, its cache)`. It computes the attention of the step's
        decode rows and chunks from the output of `project`, and writes to the workspace."""

    @abstractmethod
    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        """Return the attention of the kept tokens only, [S, H, value]."""

    @abstractmethod
    def decode(
        self, normed: Activations, inputs: StepInputs, cache: KV, context: StepContext
    ) -> torch.Tensor:
        """Project and attend in a step that only decodes, with one token for each row. Return [T,
        H, value]; the tokens after the rows are padding."""


@dataclass(slots=True)
class HeadsAttention(Attention):
    spec: AttentionSpec
    group: int  # KV group
    rule: AttentionRule
    rope: Rope  # with the norms over each head
    qkv: Linear
    q_norm: torch.Tensor | None  # norms over all heads
    k_norm: torch.Tensor | None
    norm_all_heads: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    kernels: Kernels

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return self.qkv.quantised_dtype(rows)

    def project(
        self,
        normed: Activations,
        inputs: StepInputs,
        cache: KV,
        work: Workspace,
        context: StepContext,
    ) -> None:
        qkv, view = self._qkv(normed, context, work.qkv(self.spec)), inputs.view(self.group, cache)
        self.kernels.rope_store(qkv, self.rope, inputs.positions, view, context)

    def bind(
        self, inputs: StepInputs, cache: KV, work: Workspace
    ) -> Callable[[HeadsAttention, KV], None]:
        launches = list(self._bind_lists(inputs, cache, work))

        def attend(layer: HeadsAttention, cache: KV) -> None:
            for launch in launches:
                launch(*cache, layer.rule.sinks)

        return attend

    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        queries = self._heads(work)[:, : self.spec.num_heads].index_select(0, kept.tokens)
        attended = torch.empty_like(queries)
        rows = kept.work[self.group]
        self._bind_rows(queries, attended, inputs, rows, cache)(*cache, self.rule.sinks)
        return attended

    def decode(
        self, normed: Activations, inputs: StepInputs, cache: KV, context: StepContext
    ) -> torch.Tensor:
        work, qkv = inputs.decode[self.group], self._qkv(normed, context)
        rows = work.num_tokens
        attended = qkv.new_empty(len(qkv), self.spec.num_heads, self.spec.head_dim)
        self.kernels.rope_decode_attention(
            qkv[:rows],
            self.rope,
            inputs.positions[:rows],
            inputs.view(self.group, cache, rows),
            self.rule,
            work,
            context,
            out=attended[:rows],
        )
        return attended

    def _qkv(
        self, normed: Activations, context: StepContext, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [T, (H + 2K) · D], after the norms over all heads if the layer has them."""
        spec, qkv = self.spec, self.qkv.product(normed, context, out=out)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qkv[:, : spec.q_size], qkv[:, spec.q_size : spec.q_size + spec.kv_size]
            for side, weight in ((q, self.q_norm), (k, self.k_norm)):
                side.copy_(self.norm_all_heads(side.contiguous(), weight, self.rope.norm_eps))
        return qkv

    def _heads(self, work: Workspace) -> torch.Tensor:
        spec = self.spec
        return work.qkv(spec).view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)

    def _bind_lists(self, inputs: StepInputs, cache: KV, work: Workspace) -> Iterator[Attend]:
        """Bind the launches of the decode rows and of the chunks."""
        qkv, out, heads = self._heads(work), work.attended(self.spec), self.spec.num_heads
        first = inputs.num_decode_tokens
        if inputs.decode:
            rows = inputs.decode[self.group]
            yield self._bind_rows(qkv[:first, :heads], out[:first], inputs, rows, cache)
        if inputs.prefill:
            chunks = inputs.prefill[self.group]
            tokens = slice(first, first + chunks.num_tokens)
            yield self.kernels.bind_prefill_attention(
                qkv[tokens, :heads],
                inputs.view(self.group, cache),
                self.rule,
                chunks,
                out=out[tokens],
                chunk_kv=qkv[tokens, heads:],
            )

    def _bind_rows(
        self,
        queries: torch.Tensor,
        out: torch.Tensor,
        inputs: StepInputs,
        rows: DecodeWork,
        cache: KV,
    ) -> Attend:
        view = inputs.view(self.group, cache)
        return self.kernels.bind_decode_attention(queries, view, self.rule, rows, out=out)
