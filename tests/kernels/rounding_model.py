"""Bounds of rounding errors, derived from number formats and a model's shape.

The bounds hold on every machine: each is the error that a model of the arithmetic makes in the
numpy `Reference`, times a stated margin. No bound is an error that one machine once showed.

| arithmetic          | rounding model                                                            |
|---------------------|---------------------------------------------------------------------------|
| fp32, another order | a stored key or value moves to a neighbour of its format now and then     |
| fp16 attention      | queries and weights round to fp16, and so does every partial sum          |
| fp16 products       | the same for activations and the sums of every linear layer               |
| bf16 matrix units   | both operands of every product round to bf16; sums are in fp32            |
| int8 KV in decode   | queries round to int8 for each head, in addition to fp16 attention        |
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.kernels.reference_model import Floats, Ints, Reference
from tests.support import round_to_bf16
from twostroke.kernels import cpu
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.weights.dummy import DummyWeights

# A bound is twice the error of its rounding model: errors are random, and a kernel's errors differ
# from the model's.
MARGIN = 2.0

FP16_ROUNDOFF = np.float32(2.0**-11)
FP32_ROUNDOFF = 2.0**-24
# Terms of one sum in fp16, as `native/src/fp16_attention.h` and `fp16_products.h` have them.
FP16_RUN_DIM, FP16_RUN_KEYS, FP16_RUN_PRODUCT = 32, 64, 32

# Sums of about 64 terms in another order differ by √64 · 2⁻²⁴ = 2⁻²¹. A stored number moves to its
# neighbour when that crosses the middle between two numbers of the format, whose relative spacing
# is 2⁻¹⁰ (fp16) or 2⁻⁷ (int8). The rounding model moves 128 times as many numbers, so that the
# number that matters most to a logit is among them.
PROMPT_TOKENS = 200
MOVED_FP16, MOVED_INT8 = 128 * 2.0**-21 / 2.0**-10, 128 * 2.0**-21 / 2.0**-7


class RoundingModel(Reference):
    """A `Reference` that makes the random errors of some arithmetic."""

    def __init__(self, spec: ModelSpec, source: DummyWeights, int8: bool = False) -> None:
        super().__init__(spec, source, int8)
        self.random = np.random.default_rng(0)

    def _noise(self, shape: tuple[int, ...]) -> Floats:
        return self.random.standard_normal(shape, dtype=np.float32)


class OtherOrder(RoundingModel):
    """fp32 sums in another order: some of the stored keys and values move to a neighbour."""

    def _as_stored(self, x: Floats) -> Floats:
        stored = super()._as_stored(x)
        share = MOVED_INT8 if self.int8 else MOVED_FP16
        moved, up = self.random.random(x.shape) < share, self.random.random(x.shape) < 0.5
        if self.int8:
            step = np.abs(x).max(-1, keepdims=True) / np.float32(127)
            return np.where(moved, stored + np.where(up, step, -step), stored)
        towards = np.where(up, np.float16(np.inf), np.float16(-np.inf))
        neighbour = np.nextafter(stored.astype(np.float16), towards).astype(np.float32)
        return np.where(moved, neighbour, stored)


class Fp16Attention(OtherOrder):
    """Attention in fp16, as NEON computes it. The rest is fp32."""

    def _scores(self, queries: Floats, keys: Floats) -> Floats:
        return self._summed(self._rounded(queries), keys.transpose(0, 2, 1), FP16_RUN_DIM)

    def _weighted(self, weights: Floats, values: Floats) -> Floats:
        return self._summed(self._rounded(weights), values, FP16_RUN_KEYS)

    def _rounded(self, x: Floats) -> Floats:
        """Rounding to nearest errs evenly up to the roundoff: by roundoff / √3 in the root mean
        square."""
        return x * (1 + FP16_ROUNDOFF / np.float32(3**0.5) * self._noise(x.shape))

    def _summed(self, a: Floats, b: Floats, run: int) -> Floats:
        """The product a @ b whose partial sums are rounded.

        Rounding partial sum i of n adds an error of variance (roundoff · |sum i|)² / 3. A partial
        sum squared is about i/n · (Σ terms² + sum²), whether terms cancel or not. Added over i:
        roundoff² · n / 6 · (Σ terms² + sum²).
        """
        total, terms = a @ b, min(run, a.shape[-1])
        squares = (a * a) @ (b * b) + total * total
        return total + self._noise(total.shape) * FP16_ROUNDOFF * np.sqrt(
            np.float32(terms / 6) * squares
        )


class Fp16Products(Fp16Attention):
    """Products with fp16 weights, as NEON computes them, and attention in fp16."""

    def _linear(self, x: Floats, weight: Floats) -> Floats:
        return self._summed(self._rounded(x), weight.T, FP16_RUN_PRODUCT)


class Int8Attention(Fp16Attention):
    """Attention over a KV cache in int8. Decode rounds queries to int8 for each head on NEON."""

    def _rounded(self, x: Floats) -> Floats:
        step = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        return super()._rounded(x) + step / np.float32(12**0.5) * self._noise(x.shape)


class Bf16Products(OtherOrder):
    """Products of matrix units: both operands in bf16."""

    def _linear(self, x: Floats, weight: Floats) -> Floats:
        return super()._linear(round_to_bf16(x), round_to_bf16(weight))

    def _scores(self, queries: Floats, keys: Floats) -> Floats:
        return super()._scores(round_to_bf16(queries), round_to_bf16(keys))

    def _weighted(self, weights: Floats, values: Floats) -> Floats:
        return super()._weighted(round_to_bf16(weights), round_to_bf16(values))


def rounding_model(isa: str, dtype: str, int8: bool) -> type[RoundingModel]:
    """Return the arithmetic of an instruction set that need not be exact. Weights are floats: no
    activation is rounded to 8 bits for them. `int8`: the KV cache."""
    if cpu.module().matrix_unit_min_tokens(isa):
        return Bf16Products
    if dtype == "bfloat16" and cpu.module().has_fp16_products(isa):
        return Fp16Products
    return Int8Attention if int8 else Fp16Attention


def sum_bound(terms: int, roundoff: float = FP32_ROUNDOFF) -> float:
    """Return the largest error of a sum of products, in parts of Σ |x| · |w|.

    Each of n roundings errs by at most roundoff · Σ |x| · |w|, in a random direction: √n of them
    in the root mean square. Six of those cover a billion sums.
    """
    return 6 * float(np.sqrt(terms)) * roundoff


def other_order_bound(spec: ModelSpec, source: DummyWeights, int8: bool = False) -> float:
    """Return the largest difference of a logit that fp32 sums in another order may cause."""
    return _other_order_bound(spec, type(source), source.seed, int8)


@cache
def _other_order_bound(spec: ModelSpec, source: type[DummyWeights], seed: int, int8: bool) -> float:
    """The largest error over a prompt, drawn twice."""
    weights = source(spec, seed)
    random = np.random.default_rng(0)
    positions: Ints = np.arange(PROMPT_TOKENS, dtype=np.int32)
    ids = random.integers(0, spec.vocab_size, len(positions), dtype=np.int32)
    step = ids, np.zeros_like(positions), positions, positions
    expected = Reference(spec, weights, int8).logits(*step)
    moved = OtherOrder(spec, weights, int8)
    return MARGIN * max(float(np.abs(moved.logits(*step) - expected).max()) for _ in range(2))
