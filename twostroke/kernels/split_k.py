"""Split-K: several programs share the columns of a tile, each with a part of K, and the last one to
arrive adds the parts up. A weight brings the counters where they meet."""

from __future__ import annotations

import torch
from torch import Tensor

ARRIVALS_COLUMNS = 32  # of a product, that share a counter


def arrival_counters(weight: Tensor) -> Tensor:
    """Return the counters of a matrix: int32, zero between launches."""
    counters = -(-len(weight) // ARRIVALS_COLUMNS)
    return torch.zeros(counters, dtype=torch.int32, device=weight.device)
