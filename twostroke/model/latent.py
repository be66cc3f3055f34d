"""`LatentAttention`: the attention of a layer whose cache holds latents (`LatentSpec`), for torch.

    prefill   expanded: the latents that a chunk sees become keys and values of every head
    decode    latent: queries and outputs go through the rows of kv_b, the cache is read as it is

The decoder (`decoder.py`) calls it where a layer has one; everything else of a layer is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from twostroke.kernels.reference import Kernels
from twostroke.model.batch import DecodeInputs, PrefillInputs
from twostroke.model.linear import Linear
from twostroke.model.spec import AttentionSpec, LatentSpec

KV = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class LatentAttention:
    part: AttentionSpec
    spec: LatentSpec
    q_a_norm: torch.Tensor | None  # these two where queries have a latent, too
    q_b: Linear | None
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor  # [H, nope + value, R]: each head's key and value of a latent
    kernels: Kernels

    def to_meta(self) -> LatentAttention:
        return replace(
            self,
            q_a_norm=None if self.q_a_norm is None else self.q_a_norm.to("meta"),
            q_b=None if self.q_b is None else self.q_b.to_meta(),
            kv_a_norm=self.kv_a_norm.to("meta"),
            kv_b=self.kv_b.to("meta"),
        )

    def project(
        self,
        projected: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        *,
        pdl: bool = False,
    ) -> None:
        """Queries to `q`, [T, H, D]; latents and rope keys to `kv`, [T, R + rope], and the cache.
        `projected`: what q_a (or q) and kv_a, as one product, make of the hidden states."""
        width = kv.shape[1]
        kv.copy_(projected[:, -width:])
        before = projected[:, :-width]
        if self.q_b is None or self.q_a_norm is None:
            q.flatten(1).copy_(before)
        else:
            latent = self.kernels.rms_norm(before.contiguous(), self.q_a_norm, self.spec.norm_eps)
            self.q_b.product(latent, pdl=pdl, out=q.flatten(1))
        self.kernels.latent_rope_store(
            q, kv, self.kv_a_norm, self.spec.norm_eps, cos, sin, positions, slots, keys
        )

    def prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: KV,
        tables: torch.Tensor,
        prefill: PrefillInputs,
        group: int,
        out: torch.Tensor,
    ) -> None:
        """All chunks, `q` and `kv` being their tokens': [T, H, value] to `out`."""
        self.kernels.latent_prefill_attention(
            q,
            cache[0],
            self.kv_b,
            tables,
            prefill.rows,
            prefill.starts[group],
            prefill.cu_tokens,
            self.part.scale,
            self.part.window,
            self.part.softcap,
            out=out,
            chunk_kv=kv,
        )

    def decode(
        self,
        q: torch.Tensor,
        cache: KV,
        tables: torch.Tensor,
        decode: DecodeInputs,
        group: int,
        out: torch.Tensor,
    ) -> None:
        """Rows that decode, [rows · queries, H, D], likewise."""
        nope, rank = self.part.nope_dim, self.spec.kv_lora_rank
        to_key, to_value = self.kv_b[:, :nope], self.kv_b[:, nope:]
        latent_q = q.new_empty(*q.shape[:2], cache[0].shape[-1])
        latent_q[..., :rank] = _by_head(q[..., :nope], to_key)
        latent_q[..., rank:] = q[..., nope:]
        attended = latent_q.new_empty(*q.shape[:2], rank)
        self.kernels.latent_decode_attention(
            latent_q,
            *cache,
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
        )
        out.copy_(_by_head(attended, to_value.transpose(1, 2)))


def _by_head(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, H, in] with a matrix for each head, [H, in, out]: [T, H, out]."""
    return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
