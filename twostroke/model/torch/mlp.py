"""The MLP of a layer: dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    ExpertWeights,
    RoutingRule,
    StepContext,
)
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import MLPSpec
from twostroke.model.describe.tensor_parallel import Ranks
from twostroke.model.formats.linear import Activations, Linear, num_rows
from twostroke.model.torch.meta import fields_to_meta


class MLP(Protocol):
    def __call__(self, x: Activations, context: StepContext = DEFAULT_CONTEXT) -> torch.Tensor:
        """`x` is quantised only if `quantised_dtype` returns a type."""
        ...

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        """See `Linear.quantised_dtype`."""
        ...

    def to_meta(self) -> MLP:
        """Return the same MLP without memory, for compiling kernels ahead."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMLP:
    spec: MLPSpec
    gate_up: Linear  # or up alone
    down: Linear
    kernels: Kernels

    def __call__(self, x: Activations, context: StepContext = DEFAULT_CONTEXT) -> torch.Tensor:
        activation = self.spec.activation
        if self.spec.gated:
            to = self.down.quantised_dtype(num_rows(x))
            inner = self.gate_up.gated_product(x, activation, context, to=to)
        else:
            inner = self.kernels.activate(self.gate_up.product(x, context), activation)
        return self.down.product(inner, context)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return self.gate_up.quantised_dtype(rows)

    def to_meta(self) -> DenseMLP:
        return DenseMLP(self.spec, self.gate_up.to_meta(), self.down.to_meta(), self.kernels)


@dataclass(frozen=True, slots=True)
class ExpertsMLP:
    """A mixture of experts. The router is in the model's dtype if that represents all of its values
    exactly, otherwise in fp32. Each of several ranks has some channels of every expert. All ranks
    choose the same experts, because they read the same bits. Their results are summed."""

    rule: RoutingRule
    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction: torch.Tensor | None
    stacked: ExpertWeights
    shared: DenseMLP | None
    shared_gate: torch.Tensor | None
    kernels: Kernels
    ranks: Ranks

    def __call__(self, x: Activations, context: StepContext = DEFAULT_CONTEXT) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        chosen, weights = self.kernels.route(
            x, self.router, self.router_bias, self.correction, self.rule, context
        )
        out = self.kernels.experts(x, chosen, weights, self.stacked, context)
        if self.shared is not None:
            shared = self.shared(x, context)
            if self.shared_gate is not None:
                shared *= (x.float() @ self.shared_gate).sigmoid().unsqueeze(1).to(x.dtype)
            out.add_(shared)
        return self.ranks.all_reduce(out)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return None

    def to_meta(self) -> ExpertsMLP:
        return fields_to_meta(self)
