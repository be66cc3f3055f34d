"""The kernels in plain torch: short, obviously right, and the definition of every other one.

Shapes: T tokens in a step, H query heads in groups that share one of K key/value heads, D channels
a head. The paged cache of one layer is `keys` and `values`, each [blocks, block_size, K, D] (a
strided view of its group's pool); a row of `tables` lists the blocks of one sequence in order;
block 0 is null and all zero. Latent attention (`LatentSpec`): the cache of a layer is `keys`,
[blocks, block_size, 1, R + rope], whose first R channels are the latents and the `values`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels import kv_types, packed, reference_sampling
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.packed import PackedWeight
from twostroke.kernels.w8a8 import A8Rows, W8Weight, dequantised, quantised

GATHER_TOKENS = 1 << 16  # cache entries that decode attention gathers at one time
NEVER = float("-inf")
TINY = 1e-20  # what a sum of scores is at the least before something is divided by it

# Over the keys and values of a layer, with its sinks
Attend = Callable[[Tensor, Tensor, Tensor | None], object]


class Kernels:
    """What a forward calls, each operation over everything in a step.

    Fused operations are compositions of the plain ones here; a backend overrides what it does
    better. None of them may ask the device for a value where a backend is to be recorded in CUDA
    graphs. A decode row of length 0 and a slot below 0 are padding. `pdl`: the launch may be set up
    before the one in front has ended (programmatic dependent launch).
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        pdl: bool = False,
        to: torch.dtype | None = None,
    ) -> Tensor | A8Rows:
        """`residual += x` in place, then its norm; quantised, if to a type."""
        residual += x
        normed = self.rms_norm(residual, weight, eps, pdl=pdl)
        return normed if to is None else self.a8_rows(normed, to, pdl=pdl)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Over the last dimension, in fp32 inside; rounded to the weight's type, which the bias
        has, too."""
        x, dtype = x.to(weight.dtype), x.dtype
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def act_and_mul(self, gate_up: Tensor, activation: Activation, *, pdl: bool = False) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if isinstance(activation, ClampedSwiglu):
            limit = activation.limit
            gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
            return ((up + 1) * gate * (activation.alpha * gate).sigmoid()).to(gate_up.dtype)
        return self.activate(gate, activation) * up

    def product(
        self, x: Tensor, weight: Tensor, *, pdl: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T"""
        return torch.mm(x, weight.t(), out=out)

    def gated_product(
        self, x: Tensor, weight: Tensor, activation: Activation, *, pdl: bool = False
    ) -> Tensor:
        """`act_and_mul` of the product."""
        return self.act_and_mul(self.product(x, weight), activation)

    # Weights in fp8 or int8, activations as they are or so, too: see `w8a8.py`.

    def w8_product(
        self, x: Tensor, weight: W8Weight, *, pdl: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x @ what the weight stands for, transposed; x as it is."""
        wide = dequantised(weight.values, weight.scale, torch.float32)
        return _to(x.float() @ wide.t(), x.dtype, out)

    def w8_gated_product(
        self, x: Tensor, weight: W8Weight, activation: Activation, *, pdl: bool = False
    ) -> Tensor:
        """`act_and_mul` of it."""
        return self.act_and_mul(self.w8_product(x, weight), activation)

    def a8_rows(self, x: Tensor, to: torch.dtype, *, pdl: bool = False) -> A8Rows:
        """Activations [T, N], quantised token by token."""
        return A8Rows(*quantised(x, to), x.dtype)

    def w8a8_product(
        self, x: A8Rows, weight: W8Weight, *, pdl: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """The product of both as they are quantised. The weight has one scale a row. In fp64, which
        has every sum of int8 exactly."""
        sums = x.values.double() @ weight.values.double().t()
        return _to(sums * x.scale.unsqueeze(1) * weight.scale.t(), x.dtype, out)

    def w8a8_gated_product(
        self,
        x: A8Rows,
        weight: W8Weight,
        activation: Activation,
        *,
        pdl: bool = False,
        to: torch.dtype | None = None,
    ) -> Tensor | A8Rows:
        """`act_and_mul` of it; quantised again if a type is given."""
        acted = self.act_and_mul(self.w8a8_product(x, weight), activation)
        return acted if to is None else self.a8_rows(acted, to)

    # Weights of 4 or 8 bits: see `packed.py`.

    def packed_product(
        self, x: Tensor, weight: PackedWeight, *, pdl: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x @ what the weight stands for, transposed."""
        wide = packed.dequantised(weight, torch.float32)
        return _to(x.float() @ wide.t(), x.dtype, out)

    def packed_gated_product(
        self, x: Tensor, weight: PackedWeight, activation: Activation, *, pdl: bool = False
    ) -> Tensor:
        """`act_and_mul` of it."""
        return self.act_and_mul(self.packed_product(x, weight), activation)

    def route(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor | None,
        correction: Tensor | None,
        *,
        experts_per_token: int,
        scoring: str,
        normalised: bool,
        scale: float,
        num_groups: int,
        groups_used: int,
        group_score: str,
        pdl: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token, best first, and what their outputs are multiplied by: [T, n]
        each. `RoutingSpec` says by which rule. In fp32: a rounding could choose another expert."""
        logits = F.linear(x.float(), router.float(), bias)
        scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if correction is None else scores + correction
        if num_groups > groups_used:
            grouped = torch.unflatten(choice, -1, (num_groups, -1))
            best = 2 if group_score == "top2_sum" else 1
            of_group = grouped.topk(best, dim=-1).values.sum(-1)
            used = torch.zeros_like(of_group, dtype=torch.bool)
            used.scatter_(-1, of_group.topk(groups_used, dim=-1).indices, True)
            choice = grouped.masked_fill(~used.unsqueeze(-1), NEVER).flatten(-2)
        chosen = choice.topk(experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(TINY)
        return chosen, weights * scale

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: Activation,
        gated: bool,
        *,
        pdl: bool = False,
    ) -> Tensor:
        """Σ weight · mlp(x) over the experts that `route` has chosen: [T, hidden], added up in
        fp32, best expert first. Weights are stacked, [experts, out, in].

        Tokens are sorted by expert, and each expert in use multiplies its own at once. This asks
        the device how many those are: a backend that is recorded in graphs has its own."""
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sorted_x = x[order // per_token]
        counts = torch.bincount(chosen.flatten(), minlength=len(down)).tolist()
        parts = []
        for expert, part in enumerate(torch.split(sorted_x, counts)):
            if not len(part):
                continue
            bias = None if gate_up_bias is None else gate_up_bias[expert]
            inner = F.linear(part, gate_up[expert], bias)
            act = self.act_and_mul if gated else self.activate
            bias = None if down_bias is None else down_bias[expert]
            parts.append(F.linear(act(inner, activation), down[expert], bias))
        outputs = torch.empty_like(sorted_x)
        outputs[order] = torch.cat(parts)
        by_token = torch.unflatten(outputs, 0, (-1, per_token)).float()
        return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def rope_store(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        num_kv_heads: int,
        *,
        pdl: bool = False,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate [T, (H + 2K) · D] in place, put keys and values in the cache:
        [T, H + 2K, D]. Slot = block · block_size + offset. Of 8-bit types they are then as the
        cache has them: see `kv_types.py`. `query_scales`, [max_len]: what queries are multiplied by
        at each position, once they are rotated and rounded."""
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        v = heads[:, num_heads + num_kv_heads :]
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        q, k = (rope(part, cos[positions], sin[positions]) for part in (q, k))
        if query_scales is not None:
            q = q * query_scales[positions].to(q.dtype)[:, None, None]
        stored = slots >= 0
        for cache, new in ((keys, k), (values, v)):
            kv_types.store(cache, slots[stored], new[stored])
        if kv_types.is_8_bit(keys.dtype):
            k, v = (kv_types.as_stored(new, keys.dtype) for new in (k, v))
        heads[:] = torch.cat([q, k, v], dim=1)
        return heads

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        chunk_rows: Tensor,
        chunk_starts: Tensor,
        cu_tokens: Tensor,
        max_continued: int,
        scale: float,
        window: int | None,
        softcap: float,
        *,
        out: Tensor,
        chunk_kv: Tensor,
        max_first: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """All chunks: tokens [cu_tokens[c], cu_tokens[c + 1]) are cache entries from
        chunk_starts[c] on of the sequence in tables[chunk_rows[c]]. `chunk_kv`: their keys and
        values, [T, 2K, D], which the cache has, too. `max_first`: tokens of the largest chunk that
        starts at 0, `max_continued`: of the largest other one. `sinks`: [H] in fp32, see
        `attention`."""
        chunks = zip(
            chunk_rows.tolist(), chunk_starts.tolist(), pairwise(cu_tokens.tolist()), strict=True
        )
        for row, start, (first, end) in chunks:
            until = start + end - first
            since = 0 if window is None else max(0, start - window + 1)
            k, v = (gather(x, tables[row], since, until, q.dtype) for x in (keys, values))
            query = torch.arange(start, until, device=q.device).unsqueeze(1)
            key = torch.arange(since, until, device=q.device).unsqueeze(0)
            part = slice(first, end)
            seen = visible(query, key, window)
            out[part] = attention(q[part], k, v, seen, scale, softcap, sinks)
        return out

    def bind_prefill_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> Attend:
        """`prefill_attention` for many layers of a step: what is not a layer's own is looked at
        once. Keys, values and sinks here are those of any layer of the same kind."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            return self.prefill_attention(q, keys, values, *args, **kwargs | {"sinks": sinks})

        return attend

    def decode_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        splits: int,
        scratch: Any,
        *,
        out: Tensor,
        queries: int = 1,
        pdl: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[rows · queries, H, D] against the first `lengths` cache entries of each row, all of its
        queries included: query j sees queries − 1 − j fewer."""
        size = keys.shape[1]
        blocks = -(-int(lengths.max()) // size)
        at_once = max(1, GATHER_TOKENS // max(1, blocks * size))
        key = torch.arange(blocks * size, device=q.device)
        of_row = torch.arange(queries, device=q.device)
        rows_of_q, rows_of_out = (torch.unflatten(x, 0, (-1, queries)) for x in (q, out))
        for at in range(0, len(lengths), at_once):
            part = slice(at, at + at_once)
            table = tables[rows[part].long(), :blocks].long()
            query = lengths[part].unsqueeze(1) - queries + of_row
            seen = visible(query.unsqueeze(2), key, window)
            k, v = (kv_types.load(x, table, q.dtype).flatten(1, 2) for x in (keys, values))
            if k.shape[-2] > 1 or sinks is not None:
                found = attention(rows_of_q[part], k, v, seen, scale, softcap, sinks)
            else:
                found = attention_of_one_key(rows_of_q[part], k, v, seen, scale, softcap)
            padding = lengths[part] == 0
            rows_of_out[part] = found.masked_fill_(padding[:, None, None, None], 0)
        return out

    def bind_decode_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> Attend:
        """`decode_attention`, in the same way."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            return self.decode_attention(q, keys, values, *args, **kwargs | {"sinks": sinks})

        return attend

    def rope_decode_attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        splits: int,
        scratch: Any,
        *,
        out: Tensor,
        pdl: bool = False,
        sinks: Tensor | None = None,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """`rope_store`, then `decode_attention`, where each token is the last of its sequence and
        its block is in no other table."""
        num_heads, num_kv_heads = out.shape[1], keys.shape[2]
        made = (qkv, q_norm, k_norm, eps, cos, sin, positions, slots, keys, values)
        stored = self.rope_store(*made, num_heads, num_kv_heads, pdl=pdl, query_scales=query_scales)
        q, how = stored[:, :num_heads], (scale, window, softcap, splits, scratch)
        where = (keys, values, tables, rows, lengths)
        return self.decode_attention(q, *where, *how, out=out, pdl=pdl, sinks=sinks)

    # Latent attention: see `model/torch/latent.py`.

    def latent_rope_store(
        self,
        q: Tensor,
        projected: Tensor,
        kv_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        *,
        kv: Tensor,
        pdl: bool = False,
    ) -> None:
        """Rotate the last channels of [T, H, D] in place. Of `projected`, [T, R + rope], norm the
        first R channels and rotate the others: to `kv`, which may be the same, and to the cache."""
        rank, turned = len(kv_norm), 2 * cos.shape[-1]
        kv[:, :rank] = self.rms_norm(projected[:, :rank].contiguous(), kv_norm, eps)
        kv[:, None, rank:] = rope(projected[:, None, rank:], cos[positions], sin[positions])
        q[..., -turned:] = rope(q[..., -turned:], cos[positions], sin[positions])
        stored, size = slots >= 0, keys.shape[1]
        at = slots[stored] // size, slots[stored] % size
        keys[at] = kv[stored].unsqueeze(1).to(keys.dtype)

    def latent_prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        kv_b: Tensor,
        tables: Tensor,
        chunk_rows: Tensor,
        chunk_starts: Tensor,
        cu_tokens: Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        *,
        out: Tensor,
        chunk_kv: Tensor,
        spans: Sequence[tuple[int, int]],
        max_first: int,
    ) -> Tensor:
        """`prefill_attention` over keys and values that `kv_b`, [H, key + value, R], makes of the
        latents that each chunk sees. `chunk_kv`: its own, [T, R + rope], which the cache has, too.
        `spans`: the cache entries of each chunk, from its start to its end, on the host."""
        chunks = zip(chunk_rows.tolist(), spans, cu_tokens.tolist(), strict=False)
        for row, (start, until), first in chunks:
            since = 0 if window is None else max(0, start - window + 1)
            entries = gather(keys, tables[row], since, until, q.dtype).squeeze(1)
            k, v = expand_latents(entries, kv_b, q.shape[-1])
            query = torch.arange(start, until, device=q.device).unsqueeze(1)
            key = torch.arange(since, until, device=q.device).unsqueeze(0)
            part = slice(first, first + until - start)
            out[part] = attention(q[part], k, v, visible(query, key, window), scale, softcap)
        return out

    def latent_decode_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        keys: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
        softcap: float,
        splits: int,
        scratch: Any,
        *,
        out: Tensor,
        queries: int = 1,
        pdl: bool = False,
    ) -> Tensor:
        """`decode_attention` with queries that were brought into the latents' space, [.., H, R],
        and those with rope, [.., H, rope]; out is [.., H, R]."""
        whole, values = torch.cat([q, q_rope], dim=-1), keys[..., : q.shape[-1]]
        where, how = (keys, values, tables, rows, lengths), (scale, window, softcap)
        return Kernels.decode_attention(
            self, whole, *where, *how, splits, scratch, out=out, queries=queries
        )

    def latent_decode_splits(self, batch: int, num_heads: int, width: int, max_len: int) -> int:
        """`decode_splits` of latent attention. `num_heads`: times the tokens of a row; `width`: R +
        rope."""
        return 1

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        """Into how many parts decode attention cuts a context."""
        return 1

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> Any:
        """Where those parts meet; launches of one stream may share it."""
        return None

    # Sampling: see `reference_sampling`.
    adjust_logits = staticmethod(reference_sampling.adjust_logits)
    sample = staticmethod(reference_sampling.sample)
    advance_tokens = staticmethod(reference_sampling.advance_tokens)
    token_logprobs = staticmethod(reference_sampling.token_logprobs)

    def compile_ahead(self, run: Callable[[], object], of: object) -> None:
        """Make ready what `run` calls, on tensors without memory; it may be run or not. `of`: all
        that decides what it calls, of which the `repr` is the same in another process."""


def _to(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return x.to(dtype) if out is None else out.copy_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in fp32 inside; multiplied by the weight in the weight's type."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D] by [T, dim / 2] angles; channels past dim pass through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Which cache entries each query sees: itself, and those before it inside the window."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """[…, queries, H, D] against […, entries, K, D], of which each query sees some. A head's sink
    is one score more in its softmax, as it is, whose weight goes to no value."""
    q, k, v = (part.transpose(-3, -2) for part in (q, k, v))
    if not softcap and sinks is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen.unsqueeze(-3), scale=scale, enable_gqa=True
        )
        return out.transpose(-3, -2)
    k, v = (part.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for part in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(-3), NEVER)
    if sinks is not None:
        column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A padded row sees nothing.
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[-2]]
    return (weights.to(q.dtype) @ v).transpose(-3, -2)


def attention_of_one_key(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float
) -> Tensor:
    """The same where all heads share the key: heads are further queries, and nothing is repeated
    for each of them."""
    heads = q.shape[-2]
    rows = q.flatten(-3, -2).unsqueeze(-2)
    found = attention(rows, k, v, seen.repeat_interleave(heads, dim=-2), scale, softcap)
    return torch.unflatten(found.squeeze(-2), -2, (-1, heads))


def expand_latents(entries: Tensor, kv_b: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [entries, H, D] and values [entries, H, value] of latents and rope keys, [entries, R +
    rope]."""
    heads, _, rank = kv_b.shape
    made = torch.unflatten(entries[:, :rank] @ kv_b.flatten(0, 1).t(), 1, (heads, -1))
    rope_keys = entries[:, None, rank:].expand(-1, heads, -1)
    nope = head_dim - rope_keys.shape[-1]
    return torch.cat([made[..., :nope], rope_keys], dim=-1), made[..., nope:]


def gather(cache: Tensor, table: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Cache entries [first, end) of a sequence, as [entries, K, D]."""
    size = cache.shape[1]
    blocks = table[first // size : -(-end // size)].long()
    skip = first % size
    return kv_types.load(cache, blocks, dtype).flatten(0, 1)[skip : skip + end - first]
