"""Weight formats of torch's backends: a matrix that knows its bytes, its shards and its products.

A format packs once at load. Few rows (decode) stream the packed bytes once, many rows (prefill)
feed the matrix units: which of the two runs follows from the number of rows, inside the format.
Nobody else asks which format a matrix has.
"""

from __future__ import annotations

from typing import Protocol

import torch

from twostroke.kernels.reference import Kernels


class Linear(Protocol):
    """x ↦ x Wᵀ + b with W of (out, in)."""

    num_bytes: int

    def product(
        self, x: torch.Tensor, *, pdl: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def gated_product(self, x: torch.Tensor, activation: str, *, pdl: bool = False) -> torch.Tensor:
        """W is a gate and, below it, an up projection: activation(gate x) · up x."""
        ...

    def shard_rows(self, index: int, count: int) -> Linear:
        """The index-th of `count` equal parts of the outputs."""
        ...

    def shard_columns(self, index: int, count: int) -> Linear:
        """Of the inputs; the parts' products add up to the whole one."""
        ...

    def to_meta(self) -> Linear:
        """The same without memory, for compiling ahead."""
        ...


class DenseLinear:
    """Weights as they are, in the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.weight, self.bias, self._kernels = weight, bias, kernels
        self.num_bytes = weight.numel() * weight.element_size()

    def product(
        self, x: torch.Tensor, *, pdl: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.bias is None:
            return self._kernels.product(x, self.weight, pdl=pdl, out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def gated_product(self, x: torch.Tensor, activation: str, *, pdl: bool = False) -> torch.Tensor:
        if self.bias is None:
            return self._kernels.gated_product(x, self.weight, activation, pdl=pdl)
        return self._kernels.act_and_mul(self.product(x), activation, pdl=pdl)

    def shard_rows(self, index: int, count: int) -> DenseLinear:
        bias = None if self.bias is None else self.bias.chunk(count)[index].clone()
        return DenseLinear(self.weight.chunk(count)[index].clone(), bias, self._kernels)

    def shard_columns(self, index: int, count: int) -> DenseLinear:
        bias = self.bias if index == 0 else None  # added once
        return DenseLinear(self.weight.chunk(count, 1)[index].contiguous(), bias, self._kernels)

    def to_meta(self) -> DenseLinear:
        bias = None if self.bias is None else self.bias.to("meta")
        return DenseLinear(self.weight.to("meta"), bias, self._kernels)
