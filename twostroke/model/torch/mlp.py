"""What a layer of torch's backends has for its MLP: a dense one, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from twostroke.kernels.reference import Kernels
from twostroke.model.describe.spec import ExpertsSpec, MLPSpec
from twostroke.model.describe.tensor_parallel import ONE_RANK, Ranks
from twostroke.model.formats.linear import Activations, Linear, num_rows


class MLP(Protocol):
    def __call__(self, x: Activations, *, pdl: bool = False) -> torch.Tensor:
        """`x` is quantised only if `a8_type` has said so."""
        ...

    def a8_type(self, rows: int) -> torch.dtype | None:
        """As of `Linear`."""
        ...

    def to_meta(self) -> MLP:
        """The same without memory, for compiling ahead."""
        ...


@dataclass(frozen=True, slots=True)
class DenseMLP:
    spec: MLPSpec
    gate_up: Linear  # or up alone
    down: Linear
    kernels: Kernels

    def __call__(self, x: Activations, *, pdl: bool = False) -> torch.Tensor:
        activation = self.spec.activation
        if self.spec.gated:
            to = self.down.a8_type(num_rows(x))
            inner = self.gate_up.gated_product(x, activation, pdl=pdl, to=to)
        else:
            inner = self.kernels.activate(self.gate_up.product(x, pdl=pdl), activation)
        return self.down.product(inner, pdl=pdl)

    def a8_type(self, rows: int) -> torch.dtype | None:
        return self.gate_up.a8_type(rows)

    def to_meta(self) -> DenseMLP:
        return DenseMLP(self.spec, self.gate_up.to_meta(), self.down.to_meta(), self.kernels)


@dataclass(frozen=True, slots=True)
class ExpertsMLP:
    """The experts' weights are stacked: [experts, out, in]. The router's are in the model's dtype
    where that has all of their values, else in fp32. Of several ranks each has channels of every
    expert: what they read has the same bits, so that all of them choose the same experts, and their
    results add up."""

    spec: ExpertsSpec
    rule: Mapping[str, Any]  # of its routing
    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction: torch.Tensor | None
    gate_up: torch.Tensor  # or up alone
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    shared: DenseMLP | None
    shared_gate: torch.Tensor | None
    kernels: Kernels
    ranks: Ranks

    def __call__(self, x: Activations, *, pdl: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        chosen, weights = self.kernels.route(
            x, self.router, self.router_bias, self.correction, **self.rule, pdl=pdl
        )
        out = self.kernels.experts(
            x,
            chosen,
            weights,
            self.gate_up,
            self.gate_up_bias,
            self.down,
            self.down_bias,
            self.spec.expert.activation,
            self.spec.expert.gated,
            pdl=pdl,
        )
        if self.shared is not None:
            shared = self.shared(x, pdl=pdl)
            if self.shared_gate is not None:
                shared *= (x.float() @ self.shared_gate).sigmoid().unsqueeze(1).to(x.dtype)
            out.add_(shared)
        return self.ranks.all_reduce(out)

    def a8_type(self, rows: int) -> torch.dtype | None:
        return None

    def to_meta(self) -> ExpertsMLP:
        return ExpertsMLP(*(_to_meta(getattr(self, field.name)) for field in fields(self)))


def _to_meta(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to("meta")
    if isinstance(part, Ranks):
        return ONE_RANK
    return part.to_meta() if isinstance(part, DenseMLP) else part
