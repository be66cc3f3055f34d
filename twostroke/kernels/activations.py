"""The activations that MLPs have, as data: every set of kernels reads the same."""

from __future__ import annotations

from typing import Literal, NamedTuple


class ClampedSwiglu(NamedTuple):
    """(up + 1) · gate · sigmoid(alpha · gate), where the gate is at most `limit` and up
    within ±`limit`; in fp32, rounded once."""

    kind: Literal["clamped_swiglu"] = "clamped_swiglu"  # first, where Triton's kernels look for it
    alpha: float = 1.702
    limit: float = 7.0


# A name is of what the gate goes through before it is multiplied by up. "gelu": by erf
Activation = Literal["silu", "gelu_tanh", "gelu"] | ClampedSwiglu
