"""`Reference`: the meaning of a `ModelSpec` in numpy. It needs no torch."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from twostroke.model.describe.rope import query_scales, rope_tables
from twostroke.model.describe.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from twostroke.model.weights.dummy import DummyWeights

MAX_LEN = 320
NUM_ROWS = 6

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class Reference:
    """A model in fp32. Keys and values are rounded to fp16 or int8, and kept by row and cache
    index: there are no blocks and no groups here."""

    def __init__(self, spec: ModelSpec, source: DummyWeights, int8: bool = False) -> None:
        """`int8`: the format of the KV cache; fp16 otherwise."""
        self.spec, self.int8 = spec, int8
        self.weights = {name: source.floats(name) for name in spec.weight_shapes()}
        self.ropes = {rope: rope_tables(rope, MAX_LEN) for rope in spec.ropes()}
        parts = [layer.attention for layer in spec.layers]
        # Of the last step, by layer and row: [heads, queries, keys].
        self.attended: dict[tuple[int, int], Floats] = {}
        self.cache = [  # of each layer: keys, values
            np.zeros((2, NUM_ROWS, MAX_LEN, part.num_kv_heads, part.head_dim), np.float32)
            for part in parts
        ]

    def logits(self, ids: Ints, rows: Ints, positions: Ints, indices: Ints) -> Floats:
        x = self.weights["embed"][ids] * np.float32(self.spec.embed_scale)
        if self.spec.learned_positions:
            x = x + self.weights["positions"][positions]
        for number, layer in enumerate(self.spec.layers):
            w, scale = self._of_layer(number), np.float32(self.spec.residual_scale)
            before, first = x, self._normed(x, w, "attn_norm")
            h = self._attention(number, layer.attention, w, first, rows, positions, indices)
            x = x + scale * self._normed(h, w, "attn_post_norm")
            if layer.two_norms:
                first = self._normed(before, w, "mlp_norm")
            h = self._mlp(layer, w, first if layer.parallel else self._normed(x, w, "mlp_norm"))
            x = x + scale * self._normed(h, w, "mlp_post_norm")
        head = self.weights["embed" if self.spec.tie_embeddings else "head"]
        logits = self._linear(self._normed(x, self.weights, "final_norm"), head)
        logits = logits + self.weights.get("head_bias", np.float32(0))
        return _capped(logits * np.float32(self.spec.logit_scale), self.spec.logit_softcap)

    def _of_layer(self, number: int) -> dict[str, Floats]:
        at = f"layers.{number}."
        named = self.weights.items()
        return {name.removeprefix(at): w for name, w in named if name.startswith(at)}

    def _normed(self, x: Floats, w: dict[str, Floats], name: str) -> Floats:
        if self.spec.norm == "layer" and name in w:
            x = x - x.mean(-1, keepdims=True)
        return self._norm(x, w.get(name)) + w.get(f"{name}_bias", np.float32(0))

    def _norm(self, x: Floats, weight: Floats | None) -> Floats:
        """Over the last axis; without a weight there is no norm."""
        if weight is None:
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.spec.norm_eps) * weight

    def _mlp(self, layer: LayerSpec, w: dict[str, Floats], h: Floats) -> Floats:
        names = ("gate", "up") if layer.mlp.gated else ("up",)
        gate, *up = (self._linear(h, w[name]) + w.get(f"{name}_bias", 0) for name in names)
        if layer.mlp.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        elif layer.mlp.activation == "gelu":
            gate = gate * np.vectorize(lambda x: 0.5 * math.erfc(-x * 0.5**0.5))(gate)
        else:
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(inner))
        inner = gate * up[0] if up else gate
        return self._linear(inner, w["down"]) + w.get("down_bias", 0)

    def _attention(
        self,
        number: int,
        part: AttentionSpec,
        w: dict[str, Floats],
        h: Floats,
        rows: Ints,
        positions: Ints,
        indices: Ints,
    ) -> Floats:
        q, k, v = (self._linear(h, w[name]) + w.get(f"{name}_bias", 0) for name in ("q", "k", "v"))
        if part.qk_norm == "full":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k, v = (one.reshape(len(h), -1, part.head_dim) for one in (q, k, v))
        if part.qk_norm == "head":
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        keys, values = self.cache[number]
        keys[rows, indices] = self._as_stored(self._rotated(k, part.rope, positions))
        values[rows, indices] = self._as_stored(v)
        q, out = self._rotated(q, part.rope, positions), np.empty_like(q)
        scales = query_scales(part.rope, MAX_LEN)
        if scales is not None:
            q = q * scales[positions][:, None, None]
        for row in np.unique(rows):
            mine = rows == row
            at, end = indices[mine], indices[mine].max() + 1
            seen_keys, seen_values = (
                np.repeat(one[row, :end], part.group_size, axis=1).transpose(1, 0, 2)
                for one in (keys, values)
            )
            scores = self._scores(q[mine].transpose(1, 0, 2), seen_keys) * np.float32(part.scale)
            scores = _capped(scores, part.softcap)
            key = np.arange(end)
            seen = key <= at[:, None]
            if part.window is not None:
                seen &= key > at[:, None] - part.window
            most = scores.max(-1, keepdims=True)
            weights = np.exp(np.where(seen, scores - most, -np.inf))
            sink = w["sinks"][:, None, None] if part.sinks else np.float32(-np.inf)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sink - most)
            self.attended[number, int(row)] = weights
            out[mine] = self._weighted(weights, seen_values).transpose(1, 0, 2)
        return self._linear(out.reshape(len(h), -1), w["o"]) + w.get("o_bias", 0)

    def _linear(self, x: Floats, weight: Floats) -> Floats:
        return x @ weight.T

    def _scores(self, queries: Floats, keys: Floats) -> Floats:
        """Return [heads, queries, keys] from [heads, queries, dim] and [heads, keys, dim]."""
        return queries @ keys.transpose(0, 2, 1)

    def _weighted(self, weights: Floats, values: Floats) -> Floats:
        """Return [heads, queries, dim] from [heads, queries, keys] and [heads, keys, dim]."""
        return weights @ values

    def _as_stored(self, x: Floats) -> Floats:
        """In fp16, or in int8 with a scale for each head of a token."""
        if not self.int8:
            return x.astype(np.float16).astype(np.float32)
        largest = np.abs(x).max(-1, keepdims=True)
        codes = np.rint(x * (np.float32(127) / np.maximum(largest, np.float32(1e-30))))
        return (codes * (largest / np.float32(127))).astype(np.float32)

    def _rotated(self, x: Floats, rope: RopeSpec, positions: Ints) -> Floats:
        cos, sin = (table[positions][:, None] for table in self.ropes[rope])
        half = rope.dim // 2
        a, b, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _capped(x: Floats, cap: float) -> Floats:
    return x if cap == 0 else np.float32(cap) * np.tanh(x / np.float32(cap))
