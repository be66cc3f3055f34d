"""Linear layers. A weight format packs once at load and knows two products.

Few rows (decode) stream the packed bytes once; many rows (prefill) feed the matrix units. Which
one runs follows from the number of rows, inside the format; the decoder does not ask.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    num_bytes: int

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class DenseLinear:
    """Unpacked weights: torch's one product serves any number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
