"""The activation functions of MLPs, as data that all backends share."""

from __future__ import annotations

from typing import Literal, NamedTuple


class ClampedSwiglu(NamedTuple):
    """(up + 1) · gate · sigmoid(alpha · gate), with gate clamped to at most `limit` and up clamped
    to ±`limit`. The arithmetic is in fp32; only the result is rounded."""

    kind: Literal["clamped_swiglu"] = "clamped_swiglu"  # Triton kernels read this as element 0
    alpha: float = 1.702
    limit: float = 7.0


# The function of the gate, whose result is multiplied by up. "gelu" is the exact form, with erf.
Activation = Literal["silu", "gelu_tanh", "gelu"] | ClampedSwiglu
