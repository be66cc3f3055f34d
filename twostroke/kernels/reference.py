"""The operations of the decoder in plain torch. They are written for clarity and define the results
that every other backend must compute.

Shapes: T tokens in a step, H query heads, K key/value heads (each shared by a group of query
heads), D channels in a head. `records.py` defines the records that the operations take. With latent
attention (`LatentSpec`) the cache of a layer is one tensor, `keys`, [blocks, block_size, 1,
R + rope]. Its first R channels are the latents, which are also the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.kernels import kv_dtypes, packed, reference_sampling
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
NEG_INF = float("-inf")
MIN_DIVISOR = 1e-20  # for the sum of routing weights, against division by zero

# A call that computes attention of a step, given the keys, values and sinks of one layer.
Attend = Callable[[Tensor, Tensor, Tensor | None], object]


class Kernels:
    """The operations of a forward pass, each over all tokens of a step.

    This class implements each fused operation with plain operations. A backend overrides the
    operations that it has faster kernels for. If a backend's operations are recorded in CUDA
    graphs, they must not copy values from the device to the host. A decode row of length 0 and a
    slot below 0 are padding.
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
        """Add x to the residual in place, and return the norm of the sum. `to`: return the norm
        quantised to this type."""
        residual += x
        normed = self.rms_norm(residual, weight, eps, context)
        return normed if to is None else self.quantise_activations(normed, to, context)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise the last dimension, with fp32 arithmetic and a result in the type of x. The
        input is first converted to the type of the weight and the bias."""
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
        """Return the matrix product x @ weight.T."""
        return torch.mm(x, weight.t(), out=out)

    def gated_product(
        self,
        x: Tensor,
        weight: Tensor,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Return `act_and_mul` of `product`."""
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
        """Return x @ W.T, where W is the dequantised weight. x is not quantised."""
        weight_fp32 = dequantised(weight.values, weight.scale, torch.float32)
        return _cast(x.float() @ weight_fp32.t(), x.dtype, out)

    def w8_gated_product(
        self,
        x: Tensor,
        weight: W8Weight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Return `act_and_mul` of `w8_product`."""
        return self.act_and_mul(self.w8_product(x, weight), activation)

    def quantise_activations(
        self, x: Tensor, to: torch.dtype, context: StepContext = DEFAULT_CONTEXT
    ) -> QuantizedActivations:
        """Quantise activations, [T, N], with one scale for each token."""
        return QuantizedActivations(*quantised(x, to), x.dtype)

    def w8a8_product(
        self,
        x: QuantizedActivations,
        weight: W8Weight,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ weight.T for quantised activations and a weight with one scale for each row.
        The sums are computed in fp64, in which sums of int8 products are exact."""
        sums = x.values.double() @ weight.values.double().t()
        return _cast(sums * x.scale.unsqueeze(1) * weight.scale.t(), x.dtype, out)

    def w8a8_gated_product(
        self,
        x: QuantizedActivations,
        weight: W8Weight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Tensor | QuantizedActivations:
        """Return `act_and_mul` of `w8a8_product`. `to`: return the result quantised to this
        type."""
        activated = self.act_and_mul(self.w8a8_product(x, weight), activation)
        return activated if to is None else self.quantise_activations(activated, to)

    # Weights of 4 or 8 bits: see `packed.py`.

    def packed_product(
        self,
        x: Tensor,
        weight: PackedWeight,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return x @ W.T, where W is the dequantised weight."""
        weight_fp32 = packed.dequantised(weight, torch.float32)
        return _cast(x.float() @ weight_fp32.t(), x.dtype, out)

    def packed_gated_product(
        self,
        x: Tensor,
        weight: PackedWeight,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
    ) -> Tensor:
        """Return `act_and_mul` of `packed_product`."""
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
        """Choose the experts of each token. Return the numbers of the experts, best first, and the
        weights of their outputs, both [T, experts_per_token]. The arithmetic is in fp32, because
        rounding could change the choice."""
        logits = F.linear(x.float(), router.float(), bias)
        scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
        choice_scores = scores if correction is None else scores + correction
        if rule.num_groups > rule.groups_used:
            grouped = torch.unflatten(choice_scores, -1, (rule.num_groups, -1))
            num_best = 2 if rule.group_score == "top2_sum" else 1
            group_scores = grouped.topk(num_best, dim=-1).values.sum(-1)
            is_used = torch.zeros_like(group_scores, dtype=torch.bool)
            is_used.scatter_(-1, group_scores.topk(rule.groups_used, dim=-1).indices, True)
            choice_scores = grouped.masked_fill(~is_used.unsqueeze(-1), NEG_INF).flatten(-2)
        chosen = choice_scores.topk(rule.experts_per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if rule.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(MIN_DIVISOR)
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
        in fp32, best expert first. `stacked`: the weights of all experts.

        Tokens are sorted by expert, so that each expert computes all its tokens at once. This
        implementation reads the number of tokens of each expert from the device; a backend that is
        recorded in CUDA graphs has an implementation of its own."""
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sorted_x = x[order // per_token]
        counts = torch.bincount(chosen.flatten(), minlength=len(stacked.down)).tolist()
        expert_outputs = []
        for expert, expert_x in enumerate(torch.split(sorted_x, counts)):
            if not len(expert_x):
                continue
            bias = None if stacked.gate_up_bias is None else stacked.gate_up_bias[expert]
            inner = F.linear(expert_x, stacked.gate_up[expert], bias)
            act = self.act_and_mul if stacked.gated else self.activate
            activated = act(inner, stacked.activation)
            bias = None if stacked.down_bias is None else stacked.down_bias[expert]
            expert_outputs.append(F.linear(activated, stacked.down[expert], bias))
        outputs = torch.empty_like(sorted_x)
        outputs[order] = torch.cat(expert_outputs)
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
        """Normalise and rotate the heads of `qkv`, [T, (H + 2K) · D], in place, store keys and
        values in the cache, and return all heads, [T, H + 2K, D]. If the cache has an 8-bit type,
        the returned keys and values are rounded to this type (`kv_dtypes.py`). Queries are
        multiplied by the scale of their position after rotation and rounding."""
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
            kv_dtypes.store(cache, kv.slots[stored], new[stored])
        if kv_dtypes.is_8_bit(kv.keys.dtype):
            k, v = (kv_dtypes.as_stored(new, kv.keys.dtype) for new in (k, v))
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
        """Compute attention of all prefill chunks, [T, H, D]. `chunk_kv`: the keys and values of
        the same tokens, [T, 2K, D], which are also in the cache."""
        chunks = zip(
            work.rows.tolist(), work.starts.tolist(), pairwise(work.cu_tokens.tolist()), strict=True
        )
        for row, start, (first, end) in chunks:
            stop = start + end - first  # of the chunk's positions
            first_key = 0 if rule.window is None else max(0, start - rule.window + 1)
            table, tokens = kv.tables[row], slice(first, end)
            k, v = (gather(x, table, first_key, stop, q.dtype) for x in (kv.keys, kv.values))
            query = torch.arange(start, stop, device=q.device).unsqueeze(1)
            key = torch.arange(first_key, stop, device=q.device).unsqueeze(0)
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
        """Prepare `prefill_attention` for several layers of a step. The host then processes the
        arguments that these layers share only once. `kv` and `rule` may be those of any of the
        layers: the returned call replaces keys, values and sinks."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            layer_kv, layer_rule = replace(kv, keys=keys, values=values), replace(rule, sinks=sinks)
            return self.prefill_attention(q, layer_kv, layer_rule, work, out=out, chunk_kv=chunk_kv)

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
        """Compute attention of the decode rows, [rows · queries, H, D]. The queries of a row are
        its last tokens: query j attends to all entries but the last queries − 1 − j. The result of
        a row of length 0 is zero."""
        size, queries = kv.keys.shape[1], work.queries
        blocks = -(-int(work.lengths.max()) // size)
        batch = max(1, GATHER_TOKENS // max(1, blocks * size))  # rows that are gathered at one time
        key = torch.arange(blocks * size, device=q.device)
        query_index = torch.arange(queries, device=q.device)
        q_by_row, out_by_row = (torch.unflatten(x, 0, (-1, queries)) for x in (q, out))
        for first in range(0, len(work.lengths), batch):
            rows = slice(first, first + batch)
            lengths, table = work.lengths[rows], kv.tables[work.rows[rows].long(), :blocks].long()
            query = lengths.unsqueeze(1) - queries + query_index
            seen = visible(query.unsqueeze(2), key, rule.window)
            k, v = (kv_dtypes.load(x, table, q.dtype).flatten(1, 2) for x in (kv.keys, kv.values))
            has_one_key = k.shape[-2] == 1 and rule.sinks is None
            attend = attention_of_one_key if has_one_key else attention
            attended = attend(q_by_row[rows], k, v, seen, rule)
            out_by_row[rows] = attended.masked_fill_((lengths == 0)[:, None, None, None], 0)
        return out

    def bind_decode_attention(
        self, q: Tensor, kv: KVView, rule: AttentionRule, work: DecodeWork, *, out: Tensor
    ) -> Attend:
        """Prepare `decode_attention` for several layers, like `bind_prefill_attention`."""

        def attend(keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
            layer_kv, layer_rule = replace(kv, keys=keys, values=values), replace(rule, sinks=sinks)
            return self.decode_attention(q, layer_kv, layer_rule, work, out=out)

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
        """Call `rope_store`, then `decode_attention`. Each token is the last token of its sequence,
        and its block is not shared with another sequence."""
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
        """Rotate the last channels of q, [T, H, D], in place. Normalise the first R channels of
        `projected`, [T, R + rope], and rotate its other channels. Write all channels to the cache
        and to `out`, which may be `projected` itself."""
        assert rope.k_norm is not None
        rank, rope_dim = len(rope.k_norm), 2 * rope.cos.shape[-1]
        cos, sin = rope.cos[positions], rope.sin[positions]
        out[:, :rank] = self.rms_norm(projected[:, :rank].contiguous(), rope.k_norm, rope.norm_eps)
        out[:, None, rank:] = rotate(projected[:, None, rank:], cos, sin)
        q[..., -rope_dim:] = rotate(q[..., -rope_dim:], cos, sin)
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
        """Compute `prefill_attention` with keys and values that are expanded from the latents by
        `kv_b`, [H, key + value, R]. `chunk_kv`: the latents and rope keys of the chunks' tokens,
        [T, R + rope], which are also in the cache."""
        chunks = zip(work.rows.tolist(), work.spans, work.cu_tokens.tolist(), strict=False)
        for row, (start, stop), first in chunks:
            first_key = 0 if rule.window is None else max(0, start - rule.window + 1)
            entries = gather(kv.keys, kv.tables[row], first_key, stop, q.dtype).squeeze(1)
            k, v = expand_latents(entries, kv_b, q.shape[-1])
            query = torch.arange(start, stop, device=q.device).unsqueeze(1)
            key = torch.arange(first_key, stop, device=q.device).unsqueeze(0)
            tokens = slice(first, first + stop - start)
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
        """Compute `decode_attention` on the latents. `q`: queries projected into the space of the
        latents, [.., H, R]. `q_rope`: the rotated channels of the queries, [.., H, rope]. `out` is
        [.., H, R]."""
        joined = torch.cat([q, q_rope], -1)
        latent_kv = replace(kv, values=kv.keys[..., : q.shape[-1]])
        return Kernels.decode_attention(self, joined, latent_kv, rule, work, out=out)

    def latent_decode_splits(self, batch: int, num_heads: int, width: int, max_len: int) -> int:
        """Return the number of splits for latent attention; see `decode_splits`. `num_heads`: heads
        times the tokens of a row; `width`: R + rope."""
        return 1

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        """Return the number of splits of a context in decode attention."""
        return 1

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> Any:
        """Return the memory for the partial results of the splits. Launches on the same CUDA stream
        may share this memory."""
        return None

    # Sampling: see `reference_sampling`.
    adjust_logits = staticmethod(reference_sampling.adjust_logits)
    sample = staticmethod(reference_sampling.sample)
    advance_tokens = staticmethod(reference_sampling.advance_tokens)
    token_logprobs = staticmethod(reference_sampling.token_logprobs)

    def compile_ahead(self, run: Callable[[], object], key: object) -> None:
        """Compile the kernels that `run` calls on tensors without memory. `run` is not called if
        all kernels for `key` were compiled before. `key`: everything that determines which kernels
        `run` calls; its `repr` must be equal in all processes."""


def _cast(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return x.to(dtype) if out is None else out.copy_(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in fp32, then multiply by the weight in the weight's type."""
    x_fp32 = x.float()
    scale = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (x_fp32 * scale).to(weight.dtype)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `dim` channels of x, [T, heads, D], by the angles of `cos` and `sin`,
    [T, dim / 2]. The other channels are not changed."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]], dim=-1)


def visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return the attention mask: a query attends to its own entry, and to the entries before it
    that are inside the window."""
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention of q, […, queries, H, D], over k and v, […, entries, K, D]. `seen`: the
    attention mask. The sink of a head is an additional score in the softmax of the head. It is not
    scaled, and it has no value, so it only lowers the weights of the entries."""
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
    scores = scores.masked_fill(~seen.unsqueeze(-3), NEG_INF)
    if rule.sinks is not None:
        column = rule.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    # In a row of padding all entries are masked and the softmax is NaN.
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[-2]]
    return (weights.to(q.dtype) @ v).transpose(-3, -2)


def attention_of_one_key(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: AttentionRule
) -> Tensor:
    """Compute `attention` if all heads share one key/value head. The heads are treated as further
    queries of one head, so that keys and values are not copied for each head."""
    heads = q.shape[-2]
    queries = q.flatten(-3, -2).unsqueeze(-2)
    attended = attention(queries, k, v, seen.repeat_interleave(heads, dim=-2), rule)
    return torch.unflatten(attended.squeeze(-2), -2, (-1, heads))


def expand_latents(entries: Tensor, kv_b: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Expand latents and rope keys, [entries, R + rope], to the keys, [entries, H, D], and values,
    [entries, H, value], of all heads."""
    heads, _, rank = kv_b.shape
    expanded = torch.unflatten(entries[:, :rank] @ kv_b.flatten(0, 1).t(), 1, (heads, -1))
    rope_keys = entries[:, None, rank:].expand(-1, heads, -1)
    nope = head_dim - rope_keys.shape[-1]
    return torch.cat([expanded[..., :nope], rope_keys], dim=-1), expanded[..., nope:]


def gather(cache: Tensor, table: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return cache entries [first, end) of a sequence, as [entries, K, D]."""
    size = cache.shape[1]
    blocks = table[first // size : -(-end // size)].long()
    skip = first % size
    return kv_dtypes.load(cache, blocks, dtype).flatten(0, 1)[skip : skip + end - first]
