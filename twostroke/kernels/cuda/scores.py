"""Scale, softcap and sinks of attention scores, for prefill and decode.

The products of attention have the precision `tf32x3`, which affects only fp32 inputs: three tf32
products on the tensor cores, as exact as fp32. Constants are defined inside the functions, because
Triton compares a kernel's module-level constants at every launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr):
    """Return the factor that converts scores to exponents of exp2. The factor is applied after the
    maximum is known: the product and the subtraction of the maximum are then one instruction."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return LOG2E if SOFTCAP else scale * LOG2E


@triton.jit
def sink_of(at, there):
    """Start the online softmax of each row with its sink, if `there`. Return the maximum as an
    exponent of exp2, and the sum of the weights."""
    LOG2E: tl.constexpr = 1.4426950408889634
    max_score = tl.load(at, mask=there, other=float("-inf")) * LOG2E
    return max_score, tl.where(there, 1.0, 0.0)


@triton.jit
def capped(score, scale, softcap, SOFTCAP: tl.constexpr):
    """Return softcap · tanh(score · scale / softcap). Without a softcap return the score unscaled,
    because `unit_of` then contains the scale."""
    if SOFTCAP:
        # tanh from exp2: 1 − 2 / (1 + e^2x), which does not overflow to NaN for large |x|.
        LOG2E: tl.constexpr = 1.4426950408889634
        power = tl.exp2(score * (scale / softcap) * (2 * LOG2E))
        score = softcap * (1.0 - 2.0 / (1.0 + power))
    return score
