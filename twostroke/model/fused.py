"""The decoder for fused kernels: what `decoder.py` defines, in nine launches a layer.

    embed · norm ─▶ [ qkv · rope+store · attend · o · +norm · gate+up · act · down · +norm ] × n

The residual stays in one tensor that every `add_rms_norm` adds to. Nothing here looks at a value
on the device or copies one to it, so that a graph can hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from twostroke.kernels import FusedKernels
from twostroke.model.batch import FusedInputs
from twostroke.model.decoder import Layer, Loader, load_layers
from twostroke.model.rope import rope_tables
from twostroke.model.spec import ModelSpec
from twostroke.model.weights import WeightSource

KVLayers = Sequence[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer


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
        eps, kernels = self.spec.norm_eps, self.kernels
        residual = F.embedding(inputs.token_ids, self._embed)
        normed = kernels.rms_norm(residual, self._layers[0].attn_norm, eps)
        for layer, cache, next_norm in zip(self._layers, kv, self._next_norms, strict=True):
            attended = layer.o(self._attend(layer, normed, inputs, *cache))
            normed = kernels.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            written = layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
            normed = kernels.add_rms_norm(written, residual, next_norm, eps)
        return normed

    def head(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits in the model's dtype, [rows, vocab]."""
        return torch.mm(hidden, self._head.t(), out=out)

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        inputs: FusedInputs,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        spec, kernels, group = self.spec, self.kernels, 0
        q = kernels.rope_store(
            layer.qkv(x),
            layer.q_norm,
            layer.k_norm,
            spec.norm_eps,
            self._cos,
            self._sin,
            inputs.positions,
            inputs.slots[group],
            keys,
            values,
            spec.num_heads,
            spec.num_kv_heads,
        )
        out = torch.empty_like(q)
        table, decode, prefill = inputs.tables[group], inputs.decode, inputs.prefill
        count = 0
        if decode is not None:
            count = decode.rows.shape[0]
            kernels.decode_attention(
                q[:count],
                keys,
                values,
                table,
                decode.rows,
                decode.lengths,
                self._scale,
                layer.window,
                decode.splits,
                decode.scratch,
                out=out[:count],
            )
        if prefill is not None:
            kernels.prefill_attention(
                q[count:],
                keys,
                values,
                table,
                prefill.rows,
                prefill.starts,
                prefill.cu_tokens,
                prefill.max_chunk,
                self._scale,
                layer.window,
                out=out[count:],
            )
        return out.flatten(1)
