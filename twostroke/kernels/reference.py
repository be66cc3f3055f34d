"""The kernels in plain torch: short, obviously right, and the definition of every other backend.

Shapes: T tokens in a step, H query heads in groups that share one of K key/value heads, D channels
a head. The records that calls are given are in `records.py`. Latent attention (`LatentSpec`): the
cache of a layer is `keys`, [blocks, block_size, 1, R + rope], whose first R channels are the
latents and the `values`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels import kv_types, packed, reference_sampling
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.packed import PackedWeight
from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    ExpertWeights,
    KVView,
    PrefillWork,
    Rope,
    RoutingRule,
    StepContext,
)
from twostroke.kernels.w8a8 import QuantizedActivations, W8Weight, dequantised, quantised

GATHER_TOKENS = 1 << 16  # cache entries that decode attention gathers at one time
NEVER = float("-inf")
TINY = 1e-20  # the smallest divisor of scores

# Attention over the keys, values and sinks of one layer, bound to a step
Attend = Callable[[Tensor, Tensor, Tensor | None], object]


class Kernels:
    """The operations of a forward, each over all tokens of a step.

    Fused operations are compositions of the plain ones here; a backend overrides what it does
    better. An operation must not read a value from the device where the backend is recorded in
    CUDA graphs. A decode row of length 0 and a slot below 0 are padding.
    """

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, context: StepContext = DEFAULT_CONTEXT
    ) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Tensor | QuantizedActivations:
        """Add x to the residual in place, and return the norm of the sum. `to`: the type that the
        norm is quantised to."""
        residual += x
        normed = self.rms_norm(residual, weight, eps, context)
        return normed if to is None else self.quantise_activations(normed, to, context)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Norm over the last dimension, in fp32 inside; rounded to the type of the weight and the
        bias."""
        x, dtype = x.to(weight.dtype), x.dtype
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")

    def act_and_mul(
        self, gate_up: Tensor, activation: Activation, context: StepContext = DEFAULT_CONTEXT
    ) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if isinstance(activation, ClampedSwiglu):
            limit = activation.limit
            gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
            return ((up + 1) * gate * (activation.alpha * gate).sigmoid()).to(gate_up.dtype)
        return self.activate(gate, activation) * up

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """x @ weight.T"""
        return torch.mm(x, weight.t(), out=out)

    def gated_product(
        self,
        x: Tensor,
        weight: Tensor,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """`act_and_mul` of the product."""
        return self.act_and_mul(self.product(x, weight), activation)

    # Weights in fp8 or int8, activations in 16 or 8 bits: see `w8a8.py`.

    def w8_product(
        self,
        x: Tensor,
        weight: W8Weight,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ dequantised weight, transposed; x is not quantised."""
        wide = dequantised(weight.values, weight.scale, torch.float32)
        return _to(x.float() @ wide.t(), x.dtype, out)

    def w8_gated_product(
        self,
        x: Tensor,
        weight: W8Weight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """`act_and_mul` of `w8_product`."""
        return self.act_and_mul(self.w8_product(x, weight), activation)

    def quantise_activations(
        self, x: Tensor, to: torch.dtype, context: StepContext = DEFAULT_CONTEXT
    ) -> QuantizedActivations:
        """Quantise activations, [T, N], token by token."""
        return QuantizedActivations(*quantised(x, to), x.dtype)

    def w8a8_product(
        self,
        x: QuantizedActivations,
        weight: W8Weight,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the product of quantised activations with a weight that has one scale a row. In
        fp64, which has every sum of int8 exactly."""
        sums = x.values.double() @ weight.values.double().t()
        return _to(sums * x.scale.unsqueeze(1) * weight.scale.t(), x.dtype, out)

    def w8a8_gated_product(
        self,
        x: QuantizedActivations,
        weight: W8Weight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Tensor | QuantizedActivations:
        """`act_and_mul` of `w8a8_product`. `to`: the type that it is quantised to."""
        acted = self.act_and_mul(self.w8a8_product(x, weight), activation)
        return acted if to is None else self.quantise_activations(acted, to)

    # Weights of 4 or 8 bits: see `packed.py`.

    def packed_product(
        self,
        x: Tensor,
        weight: PackedWeight,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ dequantised weight, transposed."""
        wide = packed.dequantised(weight, torch.float32)
        return _to(x.float() @ wide.t(), x.dtype, out)

    def packed_gated_product(
        self,
        x: Tensor,
        weight: PackedWeight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """`act_and_mul` of `packed_product`."""
        return self.act_and_mul(self.packed_product(x, weight), activation)

    def route(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor | None,
        correction: Tensor | None,
        rule: RoutingRule,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token. Returns their numbers, best first, and the factors of
        their outputs: [T, experts_per_token] each. In fp32: a rounding could choose another
        expert."""
        logits = F.linear(x.float(), router.float(), bias)
        scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if correction is None else scores + correction
        if rule.num_groups > rule.groups_used:
            grouped = torch.unflatten(choice, -1, (rule.num_groups, -1))
            best = 2 if rule.group_score == "top2_sum" else 1
            of_group = grouped.topk(best, dim=-1).values.sum(-1)
            used = torch.zeros_like(of_group, dtype=torch.bool)
            used.scatter_(-1, of_group.topk(rule.groups_used, dim=-1).indices, True)
            choice = grouped.masked_fill(~used.unsqueeze(-1), NEVER).flatten(-2)
        chosen = choice.topk(rule.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if rule.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(TINY)
        return chosen, weights * rule.scale

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        stacked: ExpertWeights,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Return Σ weight · mlp(x) over the experts that `route` has chosen: [T, hidden], added up
        in fp32, best expert first.

        Tokens are sorted by expert, and each expert in use multiplies its tokens in one product.
        This reads the number of tokens of each expert from the device; a backend that is recorded
        in CUDA graphs has an implementation of its own."""
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sorted_x = x[order // per_token]
        counts = torch.bincount(chosen.flatten(), minlength=len(stacked.down)).tolist()
        parts = []
        for expert, part in enumerate(torch.split(sorted_x, counts)):
            if not len(part):
                continue
            bias = None if stacked.gate_up_bias is None else stacked.gate_up_bias[expert]
            inner = F.linear(part, stacked.gate_up[expert], bias)
            act = self.act_and_mul if stacked.gated else self.activate
            bias = None if stacked.down_bias is None else stacked.down_bias[expert]
            parts.append(F.linear(act(inner, stacked.activation), stacked.down[expert], bias))
        outputs = torch.empty_like(sorted_x)
        outputs[order] = torch.cat(parts)
        by_token = torch.unflatten(outputs, 0, (-1, per_token)).float()
        return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def rope_store(
        self,
        qkv: Tensor,
        rope: Rope,
        positions: Tensor,
        kv: KVView,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Norm and rotate the heads of [T, (H + 2K) · D] in place and store keys and values in the
        cache: [T, H + 2K, D]. With a cache of an 8-bit type the returned keys and values are
        rounded as the cache has them (`kv_types.py`). Queries are multiplied by the scale of their
        position after they are rotated and rounded."""
        num_kv_heads, dim = kv.keys.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        v = heads[:, num_heads + num_kv_heads :]
        if rope.q_norm is not None and rope.k_norm is not None:
            q, k = rms_norm(q, rope.q_norm, rope.norm_eps), rms_norm(k, rope.k_norm, rope.norm_eps)
        cos, sin = rope.cos[positions], rope.sin[positions]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if rope.query_scales is not None:
            q = q * rope.query_scales[positions].to(q.dtype)[:, None, None]
        stored = kv.slots >= 0
        for cache, new in ((kv.keys, k), (kv.values, v)):
            kv_types.store(cache, kv.slots[stored], new[stored])
        if kv_types.is_8_bit(kv.keys.dtype):
            k, v = (kv_types.as_stored(new, kv.keys.dtype) for new in (k, v))
        heads[:] = torch.cat([q, k, v], dim=1)
        return heads

    def prefill_attention(
        self,
        q: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: PrefillWork,
        *,
        out: Tensor,
        chunk_kv: Tensor,
    ) -> Tensor:
        """Attention of all prefill chunks, [T, H, D]. `chunk_kv`: the keys and values of the same
        tokens, [T, 2K, D]; they are in the cache too."""
        chunks = zip(
            work.rows.tolist(), work.starts.tolist(), pairwise(work.cu_tokens.tolist()), strict=True
        )
        for row, start, (first, end) in chunks:
            until = start + end - first
            since = 0 if rule.window is None else max(0, start - rule.window + 1)
            table, tokens = kv.tables[row], slice(first, end)
            k, v = (gather(x, table, since, until, q.dtype) for x in (kv.keys, kv.values))
            query = torch.arange(start, until, device=q.device).unsqueeze(1)
            key = torch.arange(since, until, device=q.device).unsqueeze(0)
            out[tokens] = attention(q[tokens], k, v, visible(query, key, rule.window), rule)
        return out

    def bind_prefill_attention(
        self,
        q: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: PrefillWork,
        *,
        out: Tensor,
        chunk_kv: Tensor,
    ) -> Attend:
        """Prepare `prefill_attention` for many layers of a step, so that the host looks only once
        at what these layers have in common. Keys, values and sinks given here are those of any
        layer of the same kind."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            layer, own = replace(kv, keys=keys, values=values), replace(rule, sinks=sinks)
            return self.prefill_attention(q, layer, own, work, out=out, chunk_kv=chunk_kv)

        return attend

    def decode_attention(
        self,
        q: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: DecodeWork,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor,
    ) -> Tensor:
        """Attention of the decode rows, [rows · queries, H, D]. Query j of a row sees the first
        `length` − (queries − 1 − j) entries of its context. A row of length 0 gives zeros."""
        size, queries = kv.keys.shape[1], work.queries
        blocks = -(-int(work.lengths.max()) // size)
        at_once = max(1, GATHER_TOKENS // max(1, blocks * size))
        key = torch.arange(blocks * size, device=q.device)
        of_row = torch.arange(queries, device=q.device)
        rows_of_q, rows_of_out = (torch.unflatten(x, 0, (-1, queries)) for x in (q, out))
        for at in range(0, len(work.lengths), at_once):
            part = slice(at, at + at_once)
            lengths, table = work.lengths[part], kv.tables[work.rows[part].long(), :blocks].long()
            query = lengths.unsqueeze(1) - queries + of_row
            seen = visible(query.unsqueeze(2), key, rule.window)
            k, v = (kv_types.load(x, table, q.dtype).flatten(1, 2) for x in (kv.keys, kv.values))
            has_one_key = k.shape[-2] == 1 and rule.sinks is None
            attend = attention_of_one_key if has_one_key else attention
            found = attend(rows_of_q[part], k, v, seen, rule)
            rows_of_out[part] = found.masked_fill_((lengths == 0)[:, None, None, None], 0)
        return out

    def bind_decode_attention(
        self, q: Tensor, kv: KVView, rule: AttentionRule, work: DecodeWork, *, out: Tensor
    ) -> Attend:
        """Prepare `decode_attention` for many layers, as `bind_prefill_attention` does."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            layer, own = replace(kv, keys=keys, values=values), replace(rule, sinks=sinks)
            return self.decode_attention(q, layer, own, work, out=out)

        return attend

    def rope_decode_attention(
        self,
        qkv: Tensor,
        rope: Rope,
        positions: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: DecodeWork,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor,
    ) -> Tensor:
        """`rope_store`, then `decode_attention`. Each token is the last of its sequence, and the
        block that it is stored in is in no other table."""
        stored = self.rope_store(qkv, rope, positions, kv, context)
        return self.decode_attention(stored[:, : out.shape[1]], kv, rule, work, context, out=out)

    # Latent attention: see `model/torch/latent.py`.

    def latent_rope_store(
        self,
        q: Tensor,
        projected: Tensor,
        rope: Rope,
        positions: Tensor,
        kv: KVView,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor,
    ) -> None:
        """Rotate the last channels of q, [T, H, D], in place. Norm the first R channels of
        `projected`, [T, R + rope], and rotate the others; write both to `out`, which may be
        `projected`, and to the cache."""
        assert rope.k_norm is not None
        rank, turned = len(rope.k_norm), 2 * rope.cos.shape[-1]
        cos, sin = rope.cos[positions], rope.sin[positions]
        out[:, :rank] = self.rms_norm(projected[:, :rank].contiguous(), rope.k_norm, rope.norm_eps)
        out[:, None, rank:] = rotate(projected[:, None, rank:], cos, sin)
        q[..., -turned:] = rotate(q[..., -turned:], cos, sin)
        stored, size = kv.slots >= 0, kv.keys.shape[1]
        at = kv.slots[stored] // size, kv.slots[stored] % size
        kv.keys[at] = out[stored].unsqueeze(1).to(kv.keys.dtype)

    def latent_prefill_attention(
        self,
        q: Tensor,
        kv_b: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: PrefillWork,
        *,
        out: Tensor,
        chunk_kv: Tensor,
    ) -> Tensor:
        """`prefill_attention` over the keys and values that `kv_b`, [H, key + value, R], makes of
        the latents that each chunk sees. `chunk_kv`: the latents and rope keys of the chunks'
        tokens, [T, R + rope]; they are in the cache too."""
        chunks = zip(work.rows.tolist(), work.spans, work.cu_tokens.tolist(), strict=False)
        for row, (start, until), first in chunks:
            since = 0 if rule.window is None else max(0, start - rule.window + 1)
            entries = gather(kv.keys, kv.tables[row], since, until, q.dtype).squeeze(1)
            k, v = expand_latents(entries, kv_b, q.shape[-1])
            query = torch.arange(start, until, device=q.device).unsqueeze(1)
            key = torch.arange(since, until, device=q.device).unsqueeze(0)
            tokens = slice(first, first + until - start)
            out[tokens] = attention(q[tokens], k, v, visible(query, key, rule.window), rule)
        return out

    def latent_decode_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: DecodeWork,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor,
    ) -> Tensor:
        """`decode_attention` with queries in the latents' space, [.., H, R], and the queries with
        rope, [.., H, rope]; `out` is [.., H, R]."""
        whole, layer = torch.cat([q, q_rope], -1), replace(kv, values=kv.keys[..., : q.shape[-1]])
        return Kernels.decode_attention(self, whole, layer, rule, work, out=out)

    def latent_decode_splits(self, batch: int, num_heads: int, width: int, max_len: int) -> int:
        """Return `decode_splits` of latent attention. `num_heads`: heads times the tokens of a
        row; `width`: R + rope."""
        return 1

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        """Return the number of parts that decode attention cuts a context into."""
        return 1

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> Any:
        """Return the memory where these parts meet; launches of one stream may share it."""
        return None

    # Sampling: see `reference_sampling`.
    adjust_logits = staticmethod(reference_sampling.adjust_logits)
    sample = staticmethod(reference_sampling.sample)
    advance_tokens = staticmethod(reference_sampling.advance_tokens)
    token_logprobs = staticmethod(reference_sampling.token_logprobs)

    def compile_ahead(self, run: Callable[[], object], of: object) -> None:
        """Compile the kernels that `run` calls, on tensors without memory; `run` may be called or
        not. `of`: everything that decides what `run` calls; its `repr` is the same in another
        process."""


def _to(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return x.to(dtype) if out is None else out.copy_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension, in fp32 inside; multiplied by the weight in the weight's
    type."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D] by [T, dim / 2] angles; channels past dim pass through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return which cache entries each query sees: its own, and those before it inside the
    window."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionRule) -> Tensor:
    """[…, queries, H, D] against […, entries, K, D]; `seen` says which entries each query sees. The
    sink of a head is one more score in its softmax, not scaled, whose weight goes to no value."""
    q, k, v = (part.transpose(-3, -2) for part in (q, k, v))
    if not rule.softcap and rule.sinks is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen.unsqueeze(-3), scale=rule.scale, enable_gqa=True
        )
        return out.transpose(-3, -2)
    k, v = (part.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for part in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen.unsqueeze(-3), NEVER)
    if rule.sinks is not None:
        column = rule.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # A padded row sees nothing.
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[-2]]
    return (weights.to(q.dtype) @ v).transpose(-3, -2)


def attention_of_one_key(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionRule
) -> Tensor:
    """`attention` where all heads share one key: the heads become further queries, so that nothing
    is repeated for each head."""
    heads = q.shape[-2]
    rows = q.flatten(-3, -2).unsqueeze(-2)
    found = attention(rows, k, v, seen.repeat_interleave(heads, dim=-2), rule)
    return torch.unflatten(found.squeeze(-2), -2, (-1, heads))


def expand_latents(entries: Tensor, kv_b: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys, [entries, H, D], and values, [entries, H, value], of latents and rope keys,
    [entries, R + rope]."""
    heads, _, rank = kv_b.shape
    made = torch.unflatten(entries[:, :rank] @ kv_b.flatten(0, 1).t(), 1, (heads, -1))
    rope_keys = entries[:, None, rank:].expand(-1, heads, -1)
    nope = head_dim - rope_keys.shape[-1]
    return torch.cat([made[..., :nope], rope_keys], dim=-1), made[..., nope:]


def gather(cache: Tensor, table: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return cache entries [first, end) of a sequence, as [entries, K, D]."""
    size = cache.shape[1]
    blocks = table[first // size : -(-end // size)].long()
    skip = first % size
    return kv_types.load(cache, blocks, dtype).flatten(0, 1)[skip : skip + end - first]
