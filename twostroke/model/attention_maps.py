"""Computes the attention probabilities of a short prompt in all layers and heads, in numpy.

    python -m twostroke.model.attention_maps < request.json > head.json + floats

The engine's kernels never store these probabilities: they process the scores in tiles. This forward
pass runs without an engine, in a separate process that ends after one answer. It reads the same
weights in fp32, one layer at a time. `ModelSpec` describes the computation. Models with latents or
experts are refused. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.config import EngineConfig
from twostroke.errors import RequestError, TwostrokeError
from twostroke.model.describe.rope import query_scales, rope_tables
from twostroke.model.describe.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RopeSpec
from twostroke.model.find.hub import find_model
from twostroke.model.load import open_model
from twostroke.model.weights import WeightSource

Floats = npt.NDArray[np.float32]

MAX_TOKENS = 64
NICE = 10  # niceness of the process: decoding streams have priority
MAX_PARAMETERS = 2e9  # a larger model takes too long without an engine's kernels
# The fields of `AttentionSpec` that this forward computes. Models that use another one are refused.
COMPUTED = {"num_heads", "num_kv_heads", "head_dim", "rope", "scale", "window", "softcap"}
COMPUTED |= {"qk_norm", "qkv_bias", "output_bias", "sinks"}


def attention_maps(spec: ModelSpec, weights: WeightSource, tokens: Sequence[int]) -> list[Floats]:
    """Return [heads, queries, keys] for each layer."""
    check(spec, len(tokens))
    return _Forward(spec, weights, len(tokens)).maps(tokens)


def check(spec: ModelSpec, num_tokens: int) -> None:
    """Raise `RequestError` for a prompt or a model whose attention is not computed here."""
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise RequestError(
            f"attention is shown for prompts of 1 to {MAX_TOKENS} tokens, and this prompt has "
            f"{num_tokens}; send a shorter prompt"
        )
    if spec.has_latents or spec.has_experts:
        raise RequestError(
            "attention is shown for models with attention heads and dense MLPs; this model has "
            f"{'latents' if spec.has_latents else 'experts'}"
        )
    unknown = {name for layer in spec.layers for name in _not_computed(layer.attention)}
    if unknown:
        raise RequestError(
            f"attention is not shown for models with {' and '.join(sorted(unknown))} (a field of "
            "the model's specification)"
        )
    if spec.num_parameters() > MAX_PARAMETERS:
        raise RequestError(
            f"attention is shown for models of up to {MAX_PARAMETERS / 1e9:g}e9 parameters, and "
            f"this one has {spec.num_parameters() / 1e9:.1f}e9"
        )


def _not_computed(spec: AttentionSpec) -> list[str]:
    """Return the fields that have another value than their default and are not computed here."""
    others = [field for field in fields(spec) if field.name not in COMPUTED]
    return [field.name for field in others if getattr(spec, field.name) != field.default]


class _Forward:
    def __init__(self, spec: ModelSpec, weights: WeightSource, count: int) -> None:
        self._spec, self._weights, self._count = spec, weights, count
        self._shapes = spec.weight_shapes()
        self._tables: dict[RopeSpec, tuple[Floats, Floats]] = {}  # of the prompt's positions

    def maps(self, tokens: Sequence[int]) -> list[Floats]:
        spec = self._spec
        rows = [self._weights.floats("embed", slice(token, token + 1))[0] for token in tokens]
        x = np.stack(rows) * np.float32(spec.embed_scale)
        if spec.learned_positions:
            x = x + self._weights.floats("positions", slice(0, self._count))
        maps = []
        for number, layer in enumerate(spec.layers):
            x, probabilities = self._layer(x, layer, f"layers.{number}.")
            maps.append(probabilities)
        return maps

    def _layer(self, x: Floats, layer: LayerSpec, prefix: str) -> tuple[Floats, Floats]:
        spec, scale = self._spec, np.float32(self._spec.residual_scale)
        assert isinstance(layer.mlp, MLPSpec)
        normed = self._norm(x, prefix + "attn_norm") if layer.pre_norm else x
        attended, probabilities = self._attention(normed, layer.attention, prefix)
        if layer.parallel:
            mlp_input = self._norm(x, prefix + "mlp_norm") if layer.two_norms else normed
            return x + scale * (attended + self._mlp(mlp_input, layer.mlp, prefix)), probabilities
        if layer.post_norm:
            attended = self._norm(attended, prefix + "attn_post_norm")
        x = x + scale * attended
        normed = self._norm(x, prefix + "mlp_norm") if layer.pre_norm else x
        out = self._mlp(normed, layer.mlp, prefix)
        if layer.post_norm:
            out = self._norm(out, prefix + "mlp_post_norm")
        assert x.shape == (self._count, spec.hidden_size)
        return x + scale * out, probabilities

    def _attention(self, x: Floats, spec: AttentionSpec, prefix: str) -> tuple[Floats, Floats]:
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        q, k, v = (self._linear(x, prefix + name) for name in "qkv")
        if spec.qk_norm == "full":
            q, k = self._rms(q, prefix + "q_norm"), self._rms(k, prefix + "k_norm")
        q, k, v = (
            one.reshape(self._count, count, spec.head_dim).swapaxes(0, 1)
            for one, count in ((q, heads), (k, kv_heads), (v, kv_heads))
        )
        if spec.qk_norm == "head":
            q, k = self._rms(q, prefix + "q_norm"), self._rms(k, prefix + "k_norm")
        q, k = self._rotated(q, spec.rope), self._rotated(k, spec.rope)
        scales = query_scales(spec.rope, self._count)
        if scales is not None:
            q = q * scales[:, None]
        k, v = np.repeat(k, spec.group_size, 0), np.repeat(v, spec.group_size, 0)
        probabilities = self._probabilities(q @ k.swapaxes(1, 2), spec, prefix)
        attended = (probabilities @ v).swapaxes(0, 1).reshape(self._count, -1)
        return self._linear(attended, prefix + "o"), probabilities

    def _probabilities(self, scores: Floats, spec: AttentionSpec, prefix: str) -> Floats:
        scores = scores * np.float32(spec.scale)
        if spec.softcap:
            scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
        position = np.arange(self._count)
        distance = position[:, None] - position[None, :]
        visible = (distance >= 0) & (distance < (spec.window or math.inf))
        scores = np.where(visible, scores, np.float32(-np.inf))
        largest = scores.max(-1, keepdims=True)
        sink = self._weights.floats(prefix + "sinks")[:, None, None] if spec.sinks else None
        if sink is not None:
            largest = np.maximum(largest, sink)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        if sink is not None:
            total = total + np.exp(sink - largest)
        probabilities: Floats = (weights / total).astype(np.float32)
        return probabilities

    def _rotated(self, x: Floats, rope: RopeSpec) -> Floats:
        """Rotate the first `rope.dim` channels by the angles of their positions."""
        if rope not in self._tables:
            cos, sin = rope_tables(rope, self._spec.max_context)
            self._tables[rope] = cos[: self._count], sin[: self._count]
        cos, sin = self._tables[rope]
        half = rope.dim // 2
        first, second = x[..., :half], x[..., half : rope.dim]
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return np.concatenate([*rotated, x[..., rope.dim :]], axis=-1)

    def _mlp(self, x: Floats, mlp: MLPSpec, prefix: str) -> Floats:
        up = self._linear(x, prefix + "up")
        if not mlp.gated:
            return self._linear(_activated(up, mlp.activation), prefix + "down")
        gate = self._linear(x, prefix + "gate")
        return self._linear(_activated(gate, mlp.activation) * up, prefix + "down")

    def _linear(self, x: Floats, name: str) -> Floats:
        out: Floats = x @ self._weights.floats(name).T
        if name + "_bias" in self._shapes:
            out = out + self._weights.floats(name + "_bias")
        self._weights.release(name)
        return out

    def _norm(self, x: Floats, name: str) -> Floats:
        if self._spec.norm == "rms":
            return self._rms(x, name)
        x = x - x.mean(-1, keepdims=True)
        out = self._rms(x, name)
        if self._spec.norm_bias:
            out = out + self._weights.floats(name + "_bias")
        return out

    def _rms(self, x: Floats, name: str) -> Floats:
        mean = np.square(x).mean(-1, keepdims=True)
        scaled: Floats = x / np.sqrt(mean + np.float32(self._spec.norm_eps))
        return scaled * self._weights.floats(name)


def _activated(x: Floats, activation: object) -> Floats:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return (0.5 * x * (1 + np.tanh(inner))).astype(np.float32)
    if activation == "gelu":
        erf = np.vectorize(math.erf, otypes=[np.float32])
        return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(np.float32)
    raise RequestError("attention is not shown for models with this activation")


def main() -> None:
    """Answer the request on stdin with a line of JSON and the maps as 32-bit floats."""
    os.nice(NICE)
    out = sys.stdout.buffer
    head: dict[str, Any]
    try:
        request = json.loads(sys.stdin.buffer.read())
        config = EngineConfig(**request["config"])
        opened = open_model(config, find_model(config), "cpu")
        maps = attention_maps(opened.spec, opened.weights, request["tokens"])
        head = {"error": "", "heads": [len(one) for one in maps]}
    except TwostrokeError as error:
        maps, head = [], {"error": str(error), "heads": []}
    out.write(json.dumps(head).encode() + b"\n")
    for one in maps:
        out.write(np.ascontiguousarray(one, np.float32).tobytes())


if __name__ == "__main__":
    main()
