"""Loads of logits, and the random noise of tokens, which `reference_sampling.gumbel` defines."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_logits(row_logits, token, VOCAB: tl.constexpr):
    return tl.load(row_logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def uniform_noise(key0, key1, token):
    """Return the uniform number in (0, 1) that `reference_sampling.gumbel` computes."""
    bits = _mix(token.to(tl.uint32) ^ key0.to(tl.uint32))
    bits = _mix(bits + key1.to(tl.uint32))
    uniform = (bits.to(tl.float32) + 0.5) * 2.0**-32
    return tl.minimum(uniform, 1.0 - 2.0**-24)


@triton.jit
def exponential_noise(uniform):
    """Return −log1p(−u). The Gumbel noise is −log of this."""
    # log1p(−u) = log(w) · u / (1 − w) with w = fl(1 − u): the rounding error of w cancels.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    return tl.where(lost == 0, uniform, -tl.log(rest) * (uniform / lost))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
