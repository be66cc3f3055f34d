"""The decoder for fused kernels: what `decoder.py` defines, in nine launches a layer.

    embed · norm ─▶ [ qkv · rope+store · attend · o · +norm · gate+up · act · down · +norm ] × n

The residual stays in one tensor that every `add_rms_norm` adds to. Nothing here looks at a value
on the device or copies one to it, so that a graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from twostroke.kernels import FusedKernels
from twostroke.model.batch import FusedInputs
from twostroke.model.decoder import Loader, load_layers, rope_tensors
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of a layer
KVLayers = Sequence[KV]


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
    ) -> None:
        self.spec, self.dtype, self.device, self.kernels = spec, dtype, device, kernels
        self._cos, self._sin = rope_tensors(spec.rope, max_len, device)
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
            q = self.project(index, normed, inputs, cache)
            attended = torch.empty_like(q)
            self.attend(index, lists_of(inputs, q, attended), inputs, cache)
            normed = self.finish(index, attended, residual)
        return normed

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self._embed)

    def first_norm(self, residual: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(residual, self._layers[0].attn_norm, self.spec.norm_eps)

    def project(
        self, index: int, normed: torch.Tensor, inputs: FusedInputs, cache: KV
    ) -> torch.Tensor:
        """Queries, [T, H, D]; keys and values go to the cache."""
        layer, spec, group = self._layers[index], self.spec, 0
        return self.kernels.rope_store(
            layer.qkv(normed),
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
        out = layer.o(attended.flatten(1))
        normed = kernels.add_rms_norm(out, residual, layer.mlp_norm, eps)
        out = layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
        return kernels.add_rms_norm(out, residual, self._next_norms[index], eps)

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the model's dtype, [rows, vocab]."""
        return torch.mm(hidden, self._head.t(), out=out)
