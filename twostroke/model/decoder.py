"""One decoder for every `ModelSpec`.

    embed ─▶ [ norm · qkv · rope · store · attend · o · + · norm · mlp · + ] × layers ─▶ norm

The linear layers see one flat run of tokens, decode slots first and then the chunks; attention
sees the two lists. The head runs only on the positions that are asked for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from twostroke.kernels import Kernels
from twostroke.kv.pool import KVPool
from twostroke.model.batch import StepInputs
from twostroke.model.linear import DenseLinear, Linear
from twostroke.model.rope import rope_tables
from twostroke.model.spec import ModelSpec, RopeSpec
from twostroke.model.weights import WeightSource
from twostroke.model.weights.tensors import read_tensor


@dataclass(slots=True)
class Layer:
    window: int | None
    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kernels: Kernels,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        self.dtype = dtype
        self.device = device
        self._cos, self._sin = rope_tensors(spec.rope, max_len, device)
        self._scale = spec.head_dim**-0.5
        load = Loader(source, dtype, device)
        self._layers, self._embed = load_layers(spec, load)
        self._final_norm = load.tensor("final_norm")
        head = self._embed if spec.tie_embeddings else load.tensor("head")
        self._head: Linear = DenseLinear(head)

    def forward(self, inputs: StepInputs, pool: KVPool) -> torch.Tensor:
        """The last hidden state of every token of the step, normed: [T, hidden]."""
        eps, kernels = self.spec.norm_eps, self._kernels
        cos, sin = self._cos[inputs.positions], self._sin[inputs.positions]
        x = F.embedding(inputs.token_ids, self._embed)
        for index, layer in enumerate(self._layers):
            normed = kernels.rms_norm(x, layer.attn_norm, eps)
            x = x + layer.o(self._attend(index, layer, normed, cos, sin, inputs, pool))
            normed = kernels.rms_norm(x, layer.mlp_norm, eps)
            x = x + layer.down(kernels.silu_and_mul(layer.gate_up(normed)))
        return kernels.rms_norm(x, self._final_norm, eps)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in fp32, [rows, vocab]."""
        return self._head(hidden).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        pool: KVPool,
    ) -> torch.Tensor:
        spec, kernels, group = self.spec, self._kernels, 0
        sizes = [spec.q_size, spec.kv_size, spec.kv_size]
        parts = torch.split(layer.qkv(x), sizes, dim=-1)
        q, k, v = (part.reshape(x.shape[0], -1, spec.head_dim) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, spec.norm_eps)
        q, k = kernels.rope(q, cos, sin), kernels.rope(k, cos, sin)
        keys, values = pool.layer(index)
        kernels.store_kv(k, v, keys, values, inputs.slots[group])
        out = torch.empty_like(q)
        decode = inputs.decode
        if decode is not None:
            out[: decode.rows] = kernels.decode_attention(
                q[: decode.rows],
                keys,
                values,
                decode.tables[group],
                decode.lengths,
                decode.longest,
                self._scale,
                layer.window,
            )
        for chunk in inputs.prefill:
            part = slice(chunk.first, chunk.first + chunk.size)
            out[part] = kernels.prefill_attention(
                q[part], keys, values, chunk.tables[group], chunk.start, self._scale, layer.window
            )
        return out.flatten(1)


def rope_tensors(
    rope: RopeSpec, max_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rope_tables(rope, max_len)
    return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


class Loader:
    """Reads weights into place, matrices that are used together side by side."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device

    def tensor(self, name: str) -> torch.Tensor:
        return read_tensor(self._source, name, self._dtype).to(self._device)

    def linear(self, names: list[str], biased: bool) -> DenseLinear:
        weight = self.merged(names)
        bias = self.merged([name + "_bias" for name in names]) if biased else None
        return DenseLinear(weight, bias)

    def merged(self, names: list[str]) -> torch.Tensor:
        """One tensor of several; a part is in memory a second time only while it is put there."""
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._source.shape(name) or () for name in names]
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty(rows, *shapes[0][1:], dtype=self._dtype, device=self._device)
        places = torch.split(whole, [shape[0] for shape in shapes])
        for name, place in zip(names, places, strict=True):
            place.copy_(read_tensor(self._source, name, self._dtype))
        return whole


def load_layers(spec: ModelSpec, load: Loader) -> tuple[list[Layer], torch.Tensor]:
    """All layers, and the embedding."""
    # Unpacking keeps one core busy at a time, and leaves Python free while it does.
    with ThreadPoolExecutor() as pool:
        embed = pool.submit(load.tensor, "embed")
        layers = list(pool.map(partial(_load_layer, spec, load), range(spec.num_layers)))
        return layers, embed.result()


def _load_layer(spec: ModelSpec, load: Loader, index: int) -> Layer:
    at = f"layers.{index}."
    return Layer(
        window=spec.layers[index].attention.window,
        attn_norm=load.tensor(at + "attn_norm"),
        qkv=load.linear([at + "q", at + "k", at + "v"], spec.qkv_bias),
        q_norm=load.tensor(at + "q_norm") if spec.qk_norm else None,
        k_norm=load.tensor(at + "k_norm") if spec.qk_norm else None,
        o=load.linear([at + "o"], spec.output_bias),
        mlp_norm=load.tensor(at + "mlp_norm"),
        gate_up=load.linear([at + "gate", at + "up"], spec.mlp_bias),
        down=load.linear([at + "down"], spec.mlp_bias),
    )
