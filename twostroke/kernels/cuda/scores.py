"""Scores of prefill and decode attention: scale, softcap and sinks.

The products of attention name the precision `tf32x3`, which affects fp32 alone: three products on
the matrix units, as exact as in fp32. Constants are written inside the functions, because Triton
compares a kernel's module-level constants at every launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr):
    """Return the factor of a score for exp2. The factor is applied last, where it costs nothing:
    the product and the subtraction of the largest score are one instruction."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return LOG2E if SOFTCAP else scale * LOG2E


@triton.jit
def sink_of(at, there):
    """Begin a softmax with a sink, where `there`: return the largest score so far, in powers of
    two, and the sum of weights."""
    LOG2E: tl.constexpr = 1.4426950408889634
    best = tl.load(at, mask=there, other=float("-inf")) * LOG2E
    return best, tl.where(there, 1.0, 0.0)


@triton.jit
def capped(score, scale, softcap, SOFTCAP: tl.constexpr):
    """Scale a score and bend it towards ±softcap, where the model has a softcap; otherwise return
    it unchanged."""
    if SOFTCAP:
        # tanh from exp2: 1 − 2 / (1 + e^2x), which is right at both ends.
        LOG2E: tl.constexpr = 1.4426950408889634
        power = tl.exp2(score * (scale / softcap) * (2 * LOG2E))
        score = softcap * (1.0 - 2.0 / (1.0 + power))
    return score
