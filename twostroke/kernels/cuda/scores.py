"""What both attentions do to a score.

Their products name the precision `tf32x3`, which only fp32 feels: three products on the matrix
units, as good as fp32's own. Constants stand inside the functions: Triton compares what a kernel
reads of its module at every launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_of(scale, SOFTCAP: tl.constexpr):
    """What a score is to be multiplied by for exp2. Left to the end, where it costs nothing: the
    product and the subtraction of the largest are one instruction."""
    LOG2E: tl.constexpr = 1.4426950408889634
    return LOG2E if SOFTCAP else scale * LOG2E


@triton.jit
def sink_of(at, there):
    """A softmax that begins with a sink where `there`: the largest score so far, in powers of two,
    and the sum of weights."""
    LOG2E: tl.constexpr = 1.4426950408889634
    best = tl.load(at, mask=there, other=float("-inf")) * LOG2E
    return best, tl.where(there, 1.0, 0.0)


@triton.jit
def capped(score, scale, softcap, SOFTCAP: tl.constexpr):
    """As the product is, or scaled and bent towards ±softcap where the model does so."""
    if SOFTCAP:
        # tanh from exp2: 1 − 2 / (1 + e^2x), which is right at both ends.
        LOG2E: tl.constexpr = 1.4426950408889634
        power = tl.exp2(score * (scale / softcap) * (2 * LOG2E))
        score = softcap * (1.0 - 2.0 / (1.0 + power))
    return score
