"""`LatentAttention`: the attention of a layer whose cache holds latents (`LatentSpec`), for torch.

prefill   expands the latents that a chunk attends to into keys and values of every head
decode    multiplies queries and outputs by the rows of kv_b, and reads the latents as they are
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    KVView,
    PrefillWork,
    Rope,
    StepContext,
)
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import AttentionSpec, LatentSpec
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.attention import Attention, Workspace
from twostroke.model.torch.step_inputs import KV, KeptTokens, StepInputs


@dataclass(slots=True)
class LatentAttention(Attention):
    spec: AttentionSpec
    latent: LatentSpec
    group: int  # KV group
    rule: AttentionRule
    rope: Rope  # with the norm over the latent
    q_and_kv_a: Linear  # q_a, or q if queries have no latent; then kv_a
    q_a_norm: torch.Tensor | None  # this and q_b: None if queries have no latent
    q_b: Linear | None
    kv_b: torch.Tensor  # [H, nope + value, R]: each head's key and value of a latent
    kernels: Kernels

    def project(
        self,
        normed: Activations,
        inputs: StepInputs,
        cache: KV,
        work: Workspace,
        context: StepContext,
    ) -> None:
        assert isinstance(normed, torch.Tensor)
        self._project(normed, inputs, cache, work.qkv(self.spec), context)

    def bind(
        self, inputs: StepInputs, cache: KV, work: Workspace
    ) -> Callable[[LatentAttention, KV], None]:
        (q, kv), out = self._split(work.qkv(self.spec)), work.attended(self.spec)
        first, group = inputs.num_decode_tokens, self.group

        def attend(layer: LatentAttention, cache: KV) -> None:
            view = inputs.view(group, cache)
            if inputs.decode:
                layer.attend_rows(q[:first], view, inputs.decode[group], out[:first])
            if inputs.prefill:
                chunks = inputs.prefill[group]
                tokens = slice(first, first + chunks.num_tokens)
                layer.attend_chunks(q[tokens], kv[tokens], view, chunks, out[tokens])

        return attend

    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        queries = self._split(work.qkv(self.spec))[0].index_select(0, kept.tokens)
        out = queries.new_empty(len(queries), self.spec.num_heads, self.spec.value_dim)
        self.attend_rows(queries, inputs.view(self.group, cache), kept.work[self.group], out)
        return out

    def decode(
        self, normed: Activations, inputs: StepInputs, cache: KV, context: StepContext
    ) -> torch.Tensor:
        assert isinstance(normed, torch.Tensor)
        spec, work = self.spec, inputs.decode[self.group]
        rows = work.num_tokens
        place = normed.new_empty(rows, spec.q_size + spec.cached_shape[1])
        q, _, view = self._project(normed[:rows], inputs, cache, place, context)
        out = normed.new_empty(normed.shape[0], spec.num_heads, spec.value_dim)
        self.attend_rows(q, view, work, out[:rows], context)
        return out

    def _split(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, [T, H, D], and latents with rope keys, [T, R + rope]."""
        spec, tokens = self.spec, len(place)
        if self.q_b is None:  # side by side in a row, because one product writes both
            q, kv = place[:, : spec.q_size], place[:, spec.q_size :]
        else:
            q, kv = torch.split(
                place.view(-1), [tokens * spec.q_size, tokens * spec.cached_shape[1]]
            )
        return q.view(tokens, spec.num_heads, spec.head_dim), kv.view(tokens, -1)

    def _project(
        self,
        normed: torch.Tensor,
        inputs: StepInputs,
        cache: KV,
        place: torch.Tensor,
        context: StepContext,
    ) -> tuple[torch.Tensor, torch.Tensor, KVView]:
        """Write queries, latents and rope keys to `place`, and latents and rope keys to the cache.
        Return the `_split` of `place`, and the view of the cache."""
        (q, kv), tokens = self._split(place), len(normed)
        positions, view = inputs.positions[:tokens], inputs.view(self.group, cache, tokens)
        if self.q_b is None or self.q_a_norm is None:
            self.q_and_kv_a.product(normed, context, out=place)
            projected = kv
        else:
            made = self.q_and_kv_a.product(normed, context)
            width, eps = kv.shape[1], self.rope.norm_eps
            latent = self.kernels.rms_norm(made[:, :-width], self.q_a_norm, eps, context)
            self.q_b.product(latent, context, out=q.flatten(1))
            projected = made[:, -width:]
        self.kernels.latent_rope_store(q, projected, self.rope, positions, view, context, out=kv)
        return q, kv, view

    def attend_chunks(
        self, q: torch.Tensor, kv: torch.Tensor, view: KVView, work: PrefillWork, out: torch.Tensor
    ) -> None:
        """Compute the attention of all chunks into `out`, [T, H, value]."""
        self.kernels.latent_prefill_attention(
            q, self.kv_b, view, self.rule, work, out=out, chunk_kv=kv
        )

    def attend_rows(
        self,
        q: torch.Tensor,
        view: KVView,
        work: DecodeWork,
        out: torch.Tensor,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> None:
        """Compute the attention of decode rows with `q`, [rows · queries, H, D], into `out`."""
        nope = self.spec.nope_dim
        to_key, to_value = self.kv_b[:, :nope], self.kv_b[:, nope:]
        latent_q, attended = (q.new_empty(*q.shape[:2], self.latent.kv_lora_rank) for _ in range(2))
        _by_head(q[..., :nope], to_key, latent_q)
        self.kernels.latent_decode_attention(
            latent_q, q[..., nope:], view, self.rule, work, context, out=attended
        )
        _by_head(attended, to_value.transpose(1, 2), out)


def _by_head(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply [T, H, in] by a matrix for each head, [H, in, out], into [T, H, out]."""
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
