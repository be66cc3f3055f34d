"""The decoder for fused kernels: what `decoder.py` defines, in eight launches a layer.

    embed · norm ─▶ [ qkv · rope+store+attend · o · +norm · gate+up · act · down · +norm ] × n
    with chunks:    [ qkv · rope+store · attend, a launch a list · o · … ]

The residual stays in one tensor that every `add_rms_norm` adds to. Nothing here looks at a value
on the device or copies one to it, so that a graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from twostroke.kernels import Ahead, FusedKernels
from twostroke.model.batch import FusedDecode, FusedInputs
from twostroke.model.decoder import Loader, load_layers
from twostroke.model.linear import DenseLinear, Linear
from twostroke.model.rope import rope_tables
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer
KVLayers = Sequence[KV]


FEW_TOKENS = 64  # where the launches between the products leave the memory idle


@dataclass(frozen=True, slots=True)
class Overlap:
    """What is tried against the gaps of a step with few tokens; the ledger says what it wins."""

    early: bool = False  # launches are set up before the one in front has ended
    ahead_bytes: int = 0  # of a product's weight: read during the launch before it
    few_rows: int = 0  # products of up to so many rows by a kernel of our own, if ≤ 16


class Lists(NamedTuple):
    """Queries and results of the two phases: views of the step's."""

    decode_q: torch.Tensor
    decode_out: torch.Tensor
    prefill_q: torch.Tensor
    prefill_out: torch.Tensor


def lists_of(inputs: FusedInputs, q: torch.Tensor, out: torch.Tensor) -> Lists:
    """Decode slots first, then the chunks; what comes after is padding."""
    slots = 0 if inputs.decode is None else inputs.decode.rows.shape[0]
    end = slots if inputs.prefill is None else slots + inputs.prefill.tokens
    return Lists(q[:slots], out[:slots], q[slots:end], out[slots:end])


class FusedDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: FusedKernels,
        overlap: Overlap | None = None,
    ) -> None:
        self.spec, self.dtype, self.device, self.kernels = spec, dtype, device, kernels
        self.overlap = overlap or Overlap()
        self._cos, self._sin = rope_tables(spec.rope, max_len, device)
        self._scale = spec.head_dim**-0.5
        load = Loader(source, dtype, device)
        self._layers, self._embed = load_layers(spec, load)
        self._final_norm = load.tensor("final_norm")
        self._head = self._embed if spec.tie_embeddings else load.tensor("head")
        # The norm after each layer: that of the next one.
        self._next_norms = [layer.attn_norm for layer in self._layers[1:]] + [self._final_norm]

    def forward(self, inputs: FusedInputs, kv: KVLayers) -> torch.Tensor:
        """The last hidden state of every token of the step, normed: [T, hidden]."""
        residual = self.embed(inputs.token_ids)
        normed = self.first_norm(residual)
        for index, cache in enumerate(kv):
            if inputs.decode is not None and inputs.prefill is None:
                attended = self.decode(index, normed, inputs, inputs.decode, cache)
            else:
                q = self.project(index, normed, inputs, cache)
                attended = torch.empty_like(q)
                self.attend(index, lists_of(inputs, q, attended), inputs, cache)
            normed = self.finish(index, attended, residual)
        return normed

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embed)

    def first_norm(self, residual: torch.Tensor) -> torch.Tensor:
        first = self._layers[0]
        ahead = self._ahead(residual.shape[0], first.qkv)
        return self.kernels.rms_norm(residual, first.attn_norm, self.spec.norm_eps, ahead=ahead)

    def decode(
        self,
        index: int,
        normed: torch.Tensor,
        inputs: FusedInputs,
        decode: FusedDecode,
        cache: KV,
    ) -> torch.Tensor:
        """`project` and `attend` where there are slots alone: [T, H, D]."""
        layer, spec, group = self._layers[index], self.spec, 0
        attended = normed.new_empty(normed.shape[0], spec.num_heads, spec.head_dim)
        slots = decode.rows.shape[0]  # what comes after is padding
        self.kernels.rope_decode_attention(
            self._product(layer.qkv, normed)[:slots],
            layer.q_norm,
            layer.k_norm,
            spec.norm_eps,
            self._cos,
            self._sin,
            inputs.slots[group][:slots],
            *cache,
            inputs.tables[group],
            decode.rows,
            decode.lengths,
            self._scale,
            layer.window,
            decode.splits,
            decode.scratch,
            out=attended[:slots],
            ahead=self._ahead(slots, layer.o),
        )
        return attended

    def project(
        self,
        index: int,
        normed: torch.Tensor,
        inputs: FusedInputs,
        cache: KV,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queries, [T, H, D]; keys and values go to the cache."""
        layer, spec, group = self._layers[index], self.spec, 0
        return self.kernels.rope_store(
            self._product(layer.qkv, normed),
            layer.q_norm,
            layer.k_norm,
            spec.norm_eps,
            self._cos,
            self._sin,
            inputs.positions,
            inputs.slots[group],
            *cache,
            spec.num_heads,
            spec.num_kv_heads,
            out=out,
            ahead=self._ahead(normed.shape[0]),
        )

    def attend(self, index: int, lists: Lists, inputs: FusedInputs, cache: KV) -> None:
        """The two lists: a launch each."""
        kernels, window, table = self.kernels, self._layers[index].window, inputs.tables[0]
        decode, prefill = inputs.decode, inputs.prefill
        if decode is not None:
            kernels.decode_attention(
                lists.decode_q,
                *cache,
                table,
                decode.rows,
                decode.lengths,
                self._scale,
                window,
                decode.splits,
                decode.scratch,
                out=lists.decode_out,
                ahead=None if prefill else self._ahead(len(lists.decode_q), self._layers[index].o),
            )
        if prefill is not None:
            kernels.prefill_attention(
                lists.prefill_q,
                *cache,
                table,
                prefill.rows,
                prefill.starts,
                prefill.cu_tokens,
                prefill.max_chunk,
                self._scale,
                window,
                out=lists.prefill_out,
            )

    def finish(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, and the norm that the next begins with."""
        layer, eps, kernels = self._layers[index], self.spec.norm_eps, self.kernels
        product, ahead, tokens = self._product, self._ahead, residual.shape[0]
        following = self._layers[index + 1].qkv if index + 1 < len(self._layers) else None
        out = product(layer.o, attended.flatten(1))
        mlp = ahead(tokens, layer.gate_up)
        normed = kernels.add_rms_norm(out, residual, layer.mlp_norm, eps, ahead=mlp)
        gated = kernels.silu_and_mul(layer.gate_up(normed), ahead=ahead(tokens, layer.down))
        out, norm = product(layer.down, gated), self._next_norms[index]
        return kernels.add_rms_norm(out, residual, norm, eps, ahead=ahead(tokens, following))

    def _product(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        few = x.shape[0] <= self.overlap.few_rows
        if few and isinstance(linear, DenseLinear) and linear.bias is None:
            ahead = self._ahead(x.shape[0])
            return self.kernels.few_rows_product(x, linear.weight, ahead=ahead)
        return linear(x)

    def _ahead(self, tokens: int, following: Linear | None = None) -> Ahead | None:
        """For a launch that stands before the product `following`."""
        overlap = self.overlap
        weight = following.weight if isinstance(following, DenseLinear) else None
        if tokens > FEW_TOKENS or not (overlap.early or overlap.ahead_bytes):
            return None
        return Ahead(overlap.early, weight, overlap.ahead_bytes)

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the model's dtype, [rows, vocab]."""
        return torch.mm(hidden, self._head.t(), out=out)
