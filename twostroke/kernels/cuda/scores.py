"""What both attentions share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr(
    "tf32x3"
)  # of products of fp32, on the matrix units: as good as fp32's own


@triton.jit
def in_log2(score, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled, capped where the model caps, and in units of log 2, for exp2."""
    if SOFTCAP:
        # tanh from exp2: 1 − 2 / (1 + e^2x), which is right at both ends.
        power = tl.exp2(score * (scale / softcap) * (2 * LOG2E))
        score = softcap * (1.0 - 2.0 / (1.0 + power)) * LOG2E
    else:
        score = score * (scale * LOG2E)
    return score
