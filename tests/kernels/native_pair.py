"""`Pair`: the native decoder and a plain reference, given the same steps over caches in fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.equivalence.harness import Loud, small_spec
from twostroke.kernels import cpu
from twostroke.kv.host_pool import HostPool
from twostroke.model.native import NativeDecoder, Packing
from twostroke.model.rope import query_scales, rope_tables
from twostroke.model.spec import AttentionSpec, LayerSpec, ModelSpec, RopeSpec
from twostroke.model.weights.dummy import DummyWeights

ISAS = cpu.module().isas() if cpu.available() else []
MAX_LEN = 320
NUM_ROWS = 6

# On logits, whose standard deviation is about 1.5: twice the largest difference found, 1.6e-2, of
# one token among thousands (the next: 3e-3). Sums are taken in another order, and a key or a value
# that this moves past the middle between two numbers of fp16 moves by one part in 2048.
TOLERANCE = 3.2e-2

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
# Slots (row, position) and chunks (row, start, size); each may end with a cache index of its own.
Step = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


class Reference:
    """What a `ModelSpec` means, in numpy and fp32. Keys and values are rounded to fp16 and kept by
    row and cache index: there are no blocks and no groups here."""

    def __init__(self, spec: ModelSpec, source: DummyWeights) -> None:
        self.spec, self.int8 = spec, False  # int8: of the cache
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
        logits = self._normed(x, self.weights, "final_norm") @ head.T
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
        gate, *up = (h @ w[name].T + w.get(f"{name}_bias", 0) for name in names)
        if layer.mlp.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        elif layer.mlp.activation == "gelu":
            gate = gate * np.vectorize(lambda x: 0.5 * math.erfc(-x * 0.5**0.5))(gate)
        else:
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + np.tanh(inner))
        inner = gate * up[0] if up else gate
        return inner @ w["down"].T + w.get("down_bias", 0)

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
        q, k, v = (h @ w[name].T + w.get(f"{name}_bias", 0) for name in ("q", "k", "v"))
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
                np.repeat(one[row, :end], part.group_size, axis=1) for one in (keys, values)
            )
            by_head = q[mine].transpose(1, 0, 2) @ seen_keys.transpose(1, 2, 0)
            scores = by_head * np.float32(part.scale)
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
            out[mine] = (weights @ seen_values.transpose(1, 0, 2)).transpose(1, 0, 2)
        return out.reshape(len(h), -1) @ w["o"].T + w.get("o_bias", 0)

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


class Pair:
    """The native decoder and the reference, each with a cache of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        isa: str = "auto",
        *,
        block_size: int = 16,
        threads: tuple[int, int] = (1, 1),
        exact: bool = True,
        seed: int = 0,
        source: DummyWeights | None = None,
        dtype: str = "float32",
        int8: bool = False,
    ) -> None:
        """`int8`: the cache."""
        self.spec, source = spec, source or Loud(spec)
        packing = Packing(spec, source, dtype, None, isa)
        self.native = NativeDecoder(packing, MAX_LEN, *threads, isa, exact)
        self.reference = Reference(spec, source)
        self.reference.int8 = int8
        self.block_size, groups = block_size, len(spec.kv_groups())
        per_row = -(-MAX_LEN // block_size)
        # Block numbers are each group's own: no two groups have as many.
        self.num_blocks = [NUM_ROWS * per_row + group for group in range(groups)]
        self.caches = HostPool(spec, self.num_blocks, block_size, int8=int8).data
        random = np.random.default_rng(seed)
        shape = (NUM_ROWS, MAX_LEN + 1)
        self.tokens: Ints = random.integers(0, spec.vocab_size, shape, dtype=np.int32)
        # Every row has blocks of its own, in no order.
        self.tables: list[Ints] = [
            (1 + random.permutation(count)[: NUM_ROWS * per_row])
            .reshape(NUM_ROWS, per_row)
            .astype(np.int32)
            for count in self.num_blocks
        ]

    def step(self, slots: Any = (), chunks: Any = (), which: Any = None) -> Floats:
        """Logits of every token of the step, or of some, by the native decoder."""
        count = len(slots) + sum(size for _, _, size, *_ in chunks)
        wanted = range(count) if which is None else which
        logits = self.native.forward(
            self.tokens,
            self.tables,
            self.caches,
            with_indices(slots, 3),
            with_indices(chunks, 4),
            np.array(wanted, np.int32),
            keep_all=which is None,
        )
        return logits.copy()

    def expected(self, slots: Any = (), chunks: Any = ()) -> Floats:
        runs = [(row, at, 1, index) for row, at, index in with_indices(slots, 3)]
        runs += [tuple(chunk) for chunk in with_indices(chunks, 4)]
        rows = [row for row, _, size, _ in runs for _ in range(size)]
        positions = [start + n for _, start, size, _ in runs for n in range(size)]
        indices = [index + n for _, _, size, index in runs for n in range(size)]
        where = [np.array(one, np.int32) for one in (rows, positions, indices)]
        return self.reference.logits(self.tokens[rows, positions], *where)

    def difference(self, slots: Any = (), chunks: Any = ()) -> float:
        got, expected = self.step(slots, chunks), self.expected(slots, chunks)
        assert np.isfinite(got).all()
        return float(np.abs(got - expected).max())

    def evict(self, row: int, first: int, last: int) -> None:
        """Take blocks [first, last) out of a row's cache: what came after them moves forward."""
        for table in self.tables:
            freed = table[row, first:last].copy()
            table[row] = np.concatenate([table[row, :first], table[row, last:], freed])
        start, end = first * self.block_size, last * self.block_size
        for cache in self.reference.cache:
            moved = cache[:, row, end:].copy()
            cache[:, row, start : start + moved.shape[1]] = moved


def with_indices(given: Any, width: int) -> Ints:
    """Slots or chunks as the decoder wants them; without an index it is the position."""
    full = [one if len(one) == width else (*one, one[1]) for one in given]
    return np.array(full, np.int32).reshape(-1, width)


def heads(num_heads: int, num_kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    rope = RopeSpec(1e4, head_dim)
    common = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return common | {"rope": rope, "windows": (None,) * 2} | more


class Life:
    """Rows that grow by random steps, in blocks that may be shared where nothing is written."""

    def __init__(self, pair: Pair, random: np.random.Generator) -> None:
        self.pair, self.random = pair, random
        self.lengths = [0] * NUM_ROWS

    def step(self) -> Step:
        slots: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        rows = self.random.permutation(NUM_ROWS)[: self.random.integers(1, NUM_ROWS + 1)]
        for row in map(int, rows):
            done = self.lengths[row]
            if done > 250:
                done = self.lengths[row] = 0
            if done and self.random.random() < 0.6:
                count = int(self.random.choice([1, 1, 1, 2, 4]))  # with drafts now and then
                slots += [(row, done + n) for n in range(count)]
                self.lengths[row] += count
            else:
                size = int(self.random.choice([1, 2, 3, 8, 15, 16, 17, 40]))
                chunks.append((row, done, size))
                self.lengths[row] += size
        return slots, chunks


TWO = (None,) * 2
FUZZ_SPECS = [
    small_spec(windows=TWO, vocab_size=64),
    small_spec(windows=(11, None), vocab_size=64, intermediate_size=50),
    small_spec(**heads(6, 2, 24, vocab_size=64, qk_norm="head")),
]
