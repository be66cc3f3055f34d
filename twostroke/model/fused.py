"""The decoder for fused kernels: what `decoder.py` defines, in eight launches a layer.

    embed · norm ─▶ [ qkv · rope+store+attend · o · +norm · gate+up · act · down · +norm ] × n
    with chunks:    [ qkv · rope+store · attend, a launch a list · o · … ]

Of a chunk only the last token is sampled, if that: after its keys and values the last layer works
for the tokens that somebody wants, and not for the others.
The residual stays in one tensor that every `add_rms_norm` adds to. Nothing here looks at a value
on the device or copies one to it, so that a graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from twostroke.kernels import Attend, FusedKernels
from twostroke.model.batch import FusedDecode, FusedInputs
from twostroke.model.decoder import Loader, load_layers, rope_tensors
from twostroke.model.linear import DenseLinear, Linear
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer
KVLayers = Sequence[KV]
AttendLayer = Callable[[int, KV], None]

FEW_TOKENS = 64  # where the time between two launches shows


class Lists(NamedTuple):
    """What the two phases attend with, and where to: views of the step's."""

    decode: torch.Tensor  # queries, keys and values, [slots, H + 2K, D]
    decode_out: torch.Tensor
    prefill: torch.Tensor
    prefill_out: torch.Tensor


def lists_of(inputs: FusedInputs, qkv: torch.Tensor, out: torch.Tensor) -> Lists:
    """Decode slots first, then the chunks; what comes after is padding."""
    slots = 0 if inputs.decode is None else inputs.decode.rows.shape[0]
    end = slots if inputs.prefill is None else slots + inputs.prefill.tokens
    return Lists(qkv[:slots], out[:slots], qkv[slots:end], out[slots:end])


def _hollow(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to("meta")
    if isinstance(part, DenseLinear):
        return DenseLinear(_hollow(part.weight), _hollow(part.bias))
    return part


class FusedDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: FusedKernels,
        early: bool = False,
    ) -> None:
        """`early`: the launches of a small step are set up before the one in front has ended."""
        self.spec, self.dtype, self.device, self.kernels = spec, dtype, device, kernels
        self.early = early
        self._cos, self._sin = rope_tensors(spec.rope, max_len, device)
        self._scale = spec.head_dim**-0.5
        load = Loader(source, dtype, device)
        self._layers, self._embed = load_layers(spec, load)
        self._final_norm = load.tensor("final_norm")
        self._head = self._embed if spec.tie_embeddings else load.tensor("head")
        # The norm after each layer: that of the next one.
        self._next_norms = [layer.attn_norm for layer in self._layers[1:]] + [self._final_norm]

    def hollow(self) -> FusedDecoder:
        """One layer of each kind and the last, of tensors that have no memory: what it launches is
        the same."""
        other, kinds = copy(self), {layer.window: layer for layer in self._layers}
        layers = [*kinds.values(), self._layers[-1]]
        other.device = torch.device("meta")
        by_window = {layer.attention.window: layer for layer in self.spec.layers}
        other.spec = replace(self.spec, layers=tuple(by_window[layer.window] for layer in layers))
        other._layers = [
            replace(
                layer, **{part.name: _hollow(getattr(layer, part.name)) for part in fields(layer)}
            )
            for layer in layers
        ]
        for name in ("_cos", "_sin", "_embed", "_final_norm", "_head"):
            setattr(other, name, _hollow(getattr(self, name)))
        other._next_norms = [other._final_norm] * len(layers)
        return other

    def forward(self, inputs: FusedInputs, kv: KVLayers) -> torch.Tensor:
        """The last hidden states that are wanted, normed: [S, hidden]; of all tokens if the inputs
        name none."""
        residual = self.embed(inputs.token_ids)
        normed = self.first_norm(residual)
        if inputs.decode is not None and inputs.prefill is None:
            for index, cache in enumerate(kv):
                attended = self.decode(index, normed, inputs, inputs.decode, cache)
                normed = self.finish(index, attended, residual)
            return normed
        # One place for all layers, so that their attention differs in the cache alone.
        tokens, heads, spec = residual.shape[0], self.spec.num_heads, self.spec
        qkv = residual.new_empty(tokens, heads + 2 * spec.num_kv_heads, spec.head_dim)
        attended = residual.new_empty(tokens, heads, spec.head_dim)
        attend = self.attention(lists_of(inputs, qkv, attended), inputs)
        for index, cache in enumerate(kv[:-1]):
            self.project(index, normed, inputs, cache, qkv)
            attend(index, cache)
            normed = self.finish(index, attended, residual)
        self.project(len(kv) - 1, normed, inputs, kv[-1], qkv)
        return self.last_layer(qkv, attended, residual, inputs, attend, kv[-1])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embed)

    def first_norm(self, residual: torch.Tensor) -> torch.Tensor:
        first, early = self._layers[0].attn_norm, self._is_early(residual.shape[0])
        return self.kernels.rms_norm(residual, first, self.spec.norm_eps, early=early)

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
            early=self._is_early(slots),
        )
        return attended

    def project(
        self,
        index: int,
        normed: torch.Tensor,
        inputs: FusedInputs,
        cache: KV,
        out: torch.Tensor,
    ) -> None:
        """Queries, keys and values, [T, H + 2K, D]; the latter also go to the cache."""
        layer, spec, group = self._layers[index], self.spec, 0
        self.kernels.rope_store(
            self._product(layer.qkv, normed, out.flatten(1)),
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
            early=self._is_early(normed.shape[0]),
        )

    def attention(self, lists: Lists, inputs: FusedInputs) -> AttendLayer:
        """`attend(index, cache)` of one step: launches are bound at the first layer that has its
        window, and differ from then on in the cache alone."""
        bound: dict[int | None, list[Attend]] = {}

        def attend(index: int, cache: KV) -> None:
            window = self._layers[index].window
            if window not in bound:
                bound[window] = list(self._bind(window, lists, inputs, cache))
            for launch in bound[window]:
                launch(*cache)

        return attend

    def _bind(
        self, window: int | None, lists: Lists, inputs: FusedInputs, cache: KV
    ) -> Iterator[Attend]:
        """The two lists: a launch each, or two where some chunks begin their sequence."""
        kernels, heads, table = self.kernels, self.spec.num_heads, inputs.tables[0]
        decode, prefill = inputs.decode, inputs.prefill
        if decode is not None:
            queries = lists.decode[:, :heads]
            yield self._bind_slots(window, queries, lists.decode_out, table, decode, cache)
        if prefill is not None:
            yield kernels.bind_prefill_attention(
                lists.prefill[:, :heads],
                *cache,
                table,
                prefill.rows,
                prefill.starts,
                prefill.cu_tokens,
                prefill.max_later,
                self._scale,
                window,
                out=lists.prefill_out,
                own=lists.prefill[:, heads:],
                max_fresh=prefill.max_fresh,
            )

    def _bind_slots(
        self,
        window: int | None,
        queries: torch.Tensor,
        out: torch.Tensor,
        table: torch.Tensor,
        slots: FusedDecode,
        cache: KV,
    ) -> Attend:
        return self.kernels.bind_decode_attention(
            queries,
            *cache,
            table,
            slots.rows,
            slots.lengths,
            self._scale,
            window,
            slots.splits,
            slots.scratch,
            out=out,
        )

    def finish(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of a layer, and the norm that the next begins with."""
        layer, eps, kernels = self._layers[index], self.spec.norm_eps, self.kernels
        early = self._is_early(residual.shape[0])
        out = self._product(layer.o, attended.flatten(1))
        normed = kernels.add_rms_norm(out, residual, layer.mlp_norm, eps, early=early)
        out = self._product(layer.down, self._gated(layer.gate_up, normed))
        return kernels.add_rms_norm(out, residual, self._next_norms[index], eps, early=early)

    def last_layer(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        residual: torch.Tensor,
        inputs: FusedInputs,
        attend: AttendLayer,
        cache: KV,
    ) -> torch.Tensor:
        """What comes after its `project`, for the tokens that are wanted."""
        wanted, index = inputs.wanted, len(self._layers) - 1
        if wanted is None:
            attend(index, cache)
            return self.finish(index, attended, residual)
        residual = residual.index_select(0, wanted.tokens)
        if not len(residual):
            return residual
        queries = qkv[:, : self.spec.num_heads].index_select(0, wanted.tokens)
        attended = torch.empty_like(queries)
        window = self._layers[index].window
        self._bind_slots(window, queries, attended, inputs.tables[0], wanted.slots, cache)(*cache)
        return self.finish(index, attended, residual)

    def _product(
        self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(linear, DenseLinear) and linear.bias is None:
            early = self._is_early(x.shape[0])
            return self.kernels.product(x, linear.weight, early=early, out=out)
        return linear(x, out)

    def _gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        early = self._is_early(x.shape[0])
        if isinstance(linear, DenseLinear) and linear.bias is None:
            return self.kernels.gated_product(x, linear.weight, early=early)
        return self.kernels.silu_and_mul(linear(x), early=early)

    def _is_early(self, tokens: int) -> bool:
        return self.early and tokens <= FEW_TOKENS

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the model's dtype, [rows, vocab]."""
        return torch.mm(hidden, self._head.t(), out=out)
