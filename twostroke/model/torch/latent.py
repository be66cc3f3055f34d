"""`LatentAttention`: the attention of a layer whose cache holds latents (`LatentSpec`), for torch.

prefill   expanded: the latents that a chunk sees become keys and values of every head
decode    latent: queries and outputs go through the rows of kv_b, the cache is read as it is
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import AttentionSpec, LatentSpec
from twostroke.model.formats.linear import Activations, Linear
from twostroke.model.torch.attention import KV, Attention, Rope, Workspace
from twostroke.model.torch.step_inputs import DecodeInputs, KeptTokens, PrefillInputs, StepInputs


@dataclass(slots=True)
class LatentAttention(Attention):
    part: AttentionSpec
    spec: LatentSpec
    group: int  # KV group
    rope: Rope
    q_and_kv_a: Linear  # q_a, or q where queries have no latent; and kv_a
    q_a_norm: torch.Tensor | None  # these two where queries have a latent, too
    q_b: Linear | None
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor  # [H, nope + value, R]: each head's key and value of a latent
    kernels: Kernels

    def project(
        self, normed: Activations, inputs: StepInputs, cache: KV, work: Workspace, pdl: bool
    ) -> None:
        assert isinstance(normed, torch.Tensor)
        self._project(normed, inputs, cache, work.qkv(self.part), pdl)

    def bind(
        self, inputs: StepInputs, cache: KV, work: Workspace
    ) -> Callable[[LatentAttention, KV], None]:
        decode, prefill = inputs.decode, inputs.prefill
        (q, kv), out = self._split(work.qkv(self.part)), work.attended(self.part)
        tables = inputs.tables[self.group]
        first = 0 if decode is None else decode.num_tokens

        def attend(layer: LatentAttention, cache: KV) -> None:
            if decode is not None:
                layer.attend_rows(q[:first], cache, tables, decode, out[:first])
            if prefill is not None:
                tokens = slice(first, first + prefill.num_tokens)
                layer.attend_chunks(q[tokens], kv[tokens], cache, tables, prefill, out[tokens])

        return attend

    def attend_kept(
        self, inputs: StepInputs, kept: KeptTokens, cache: KV, work: Workspace
    ) -> torch.Tensor:
        queries = self._split(work.qkv(self.part))[0].index_select(0, kept.tokens)
        out = queries.new_empty(len(queries), self.part.num_heads, self.part.value_dim)
        self.attend_rows(queries, cache, inputs.tables[self.group], kept.rows, out)
        return out

    def decode(
        self,
        normed: Activations,
        inputs: StepInputs,
        decode: DecodeInputs,
        cache: KV,
        pdl: bool,
    ) -> torch.Tensor:
        assert isinstance(normed, torch.Tensor)
        part, rows = self.part, decode.num_tokens
        place = normed.new_empty(rows, part.q_size + part.cached[1])
        q, _ = self._project(normed[:rows], inputs, cache, place, pdl)
        out = normed.new_empty(normed.shape[0], part.num_heads, part.value_dim)
        self.attend_rows(q, cache, inputs.tables[self.group], decode, out[:rows], pdl)
        return out

    def _split(self, place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, [T, H, D]; latents and rope keys, [T, R + rope]."""
        part, tokens = self.part, len(place)
        if self.q_b is None:  # side by side, as one product leaves them
            q, kv = place[:, : part.q_size], place[:, part.q_size :]
        else:
            q, kv = torch.split(place.view(-1), [tokens * part.q_size, tokens * part.cached[1]])
        return q.view(tokens, part.num_heads, part.head_dim), kv.view(tokens, -1)

    def _project(
        self,
        normed: torch.Tensor,
        inputs: StepInputs,
        cache: KV,
        place: torch.Tensor,
        pdl: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_split` of `place`, filled; latents and rope keys are in the cache, too."""
        tokens, (q, kv) = len(normed), self._split(place)
        if self.q_b is None or self.q_a_norm is None:
            self.q_and_kv_a.product(normed, pdl=pdl, out=place)
            projected = kv
        else:
            made = self.q_and_kv_a.product(normed, pdl=pdl)
            width = kv.shape[1]
            eps, of_q = self.spec.norm_eps, made[:, :-width]
            latent = self.kernels.rms_norm(of_q, self.q_a_norm, eps, pdl=pdl)
            self.q_b.product(latent, pdl=pdl, out=q.flatten(1))
            projected = made[:, -width:]
        self.kernels.latent_rope_store(
            q,
            projected,
            self.kv_a_norm,
            self.spec.norm_eps,
            self.rope.cos,
            self.rope.sin,
            inputs.positions[:tokens],
            inputs.slots[self.group][:tokens],
            cache[0],
            kv=kv,
            pdl=pdl,
        )
        return q, kv

    def attend_chunks(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: KV,
        tables: torch.Tensor,
        prefill: PrefillInputs,
        out: torch.Tensor,
    ) -> None:
        """All chunks, `q` and `kv` being their tokens': [T, H, value] to `out`."""
        self.kernels.latent_prefill_attention(
            q,
            cache[0],
            self.kv_b,
            tables,
            prefill.rows,
            prefill.starts[self.group],
            prefill.cu_tokens,
            self.part.scale,
            self.part.window,
            self.part.softcap,
            out=out,
            chunk_kv=kv,
            spans=prefill.spans[self.group],
            max_first=prefill.max_first,
        )

    def attend_rows(
        self,
        q: torch.Tensor,
        cache: KV,
        tables: torch.Tensor,
        decode: DecodeInputs,
        out: torch.Tensor,
        pdl: bool = False,
    ) -> None:
        """Rows that decode, [rows · queries, H, D], likewise."""
        nope, group = self.part.nope_dim, self.group
        to_key, to_value = self.kv_b[:, :nope], self.kv_b[:, nope:]
        latent_q, attended = (q.new_empty(*q.shape[:2], self.spec.kv_lora_rank) for _ in range(2))
        _by_head(q[..., :nope], to_key, latent_q)
        self.kernels.latent_decode_attention(
            latent_q,
            q[..., nope:],
            cache[0],
            tables,
            decode.rows,
            decode.lengths[group],
            self.part.scale,
            self.part.window,
            self.part.softcap,
            decode.splits[group],
            decode.scratch[group],
            out=attended,
            queries=decode.queries,
            pdl=pdl,
        )
        _by_head(attended, to_value.transpose(1, 2), out)


def _by_head(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """[T, H, in] with a matrix for each head, [H, in, out]: to `out`, [T, H, out]."""
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
