"""The arrival counters of split-K products. Several programs compute the same output tile, each for
a part of K, and the last program to arrive adds the parts up. Each weight has its own counters."""

from __future__ import annotations

import torch
from torch import Tensor

ARRIVALS_COLUMNS = 32  # output columns that share a counter


def arrival_counters(weight: Tensor) -> Tensor:
    """Return the counters of a weight: int32, zero between launches."""
    counters = -(-len(weight) // ARRIVALS_COLUMNS)
    return torch.zeros(counters, dtype=torch.int32, device=weight.device)
