"""Linear layers of the torch backends: a class for each weight format, with its products and bytes.

A matrix is packed once, at load. Each class chooses the product by the number of rows: few rows
(decode) stream the packed bytes once, many rows (prefill) use the matrix units. No other code
depends on the format of a matrix. If several ranks share a model, each rank has a part of a matrix,
and a wrapper combines the outputs of the parts (`SummedLinear`, `GatheredLinear`,
`SplitEmbedding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import torch

from twostroke.kernels.activations import Activation
from twostroke.kernels.packed import PackedWeight
from twostroke.kernels.records import DEFAULT_CONTEXT, StepContext
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import E4M3, INT8, QuantizedActivations, W8Weight
from twostroke.model.describe.tensor_parallel import Ranks

# Up to this number of rows (tokens), a weight in fp8 or int8 is multiplied with unquantised
# activations. For more rows it is faster to quantise the activations to the same type.
WEIGHT_ONLY_ROWS = {E4M3: 1, INT8: 16}

Activations = torch.Tensor | QuantizedActivations


def num_rows(x: Activations) -> int:
    return len(x if isinstance(x, torch.Tensor) else x.values)


class Linear(Protocol):
    """x ↦ x Wᵀ + b with W of (out, in)."""

    num_bytes: int

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x Wᵀ + b. `x` is quantised only if `quantised_dtype` returns a type."""
        ...

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Activations:
        """Return activation(gate x) · up x, where W is a gate and, below it, an up projection.
        `to`: the type that the next layer would quantise the result to."""
        ...

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        """Return the type that a product of `rows` rows quantises its activations to; None if it
        does not quantise them."""
        ...

    def to_meta(self) -> Linear:
        """Return the same layer without memory, for compiling ahead."""
        ...


class ScalableLinear(Linear, Protocol):
    """A linear layer whose weights can be multiplied row by row, while a model is loaded."""

    def scale_rows(self, factors: torch.Tensor) -> None:
        """Multiply each row of the weights by its factor, [out] in fp32. Biases do not change."""
        ...


class DenseLinear:
    """Weights in the model's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.weight, self.bias, self._kernels = weight, bias, kernels
        self.num_bytes = weight.numel() * weight.element_size()

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self.bias is None:
            return self._kernels.product(x, self.weight, context, out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self.bias is None:
            return self._kernels.gated_product(x, self.weight, activation, context)
        return self._kernels.act_and_mul(self.product(x), activation, context)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return None

    def scale_rows(self, factors: torch.Tensor) -> None:
        self.weight.mul_(factors.to(self.weight.dtype).unsqueeze(1))

    def to_meta(self) -> DenseLinear:
        bias = None if self.bias is None else self.bias.to("meta")
        return DenseLinear(self.weight.to("meta"), bias, self._kernels)


class W8Linear:
    """Weights in fp8 or int8 with a scale for each row or block. Few rows of activations are
    multiplied unquantised. More rows are quantised token by token to the weight's type, unless the
    weight has scales of blocks or the checkpoint keeps its activations in 16 bits."""

    def __init__(
        self,
        weight: W8Weight,
        bias: torch.Tensor | None,
        kernels: Kernels,
        weight_only: bool = False,
    ) -> None:
        self.weight, self.bias, self._kernels = weight, bias, kernels
        self._weight_only = weight_only or weight.is_grouped
        self.num_bytes = weight.num_bytes

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self._quantised(x, context)
        if isinstance(x, torch.Tensor):
            made = self._kernels.w8_product(x, self.weight, context, out=out)
        else:
            made = self._kernels.w8a8_product(x, self.weight, context, out=out)
        return made if self.bias is None else made.add_(self.bias)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> Activations:
        kernels = self._kernels
        if self.bias is not None:
            return kernels.act_and_mul(self.product(x, context), activation, context)
        rows = self._quantised(x, context)
        if isinstance(rows, torch.Tensor):
            return kernels.w8_gated_product(rows, self.weight, activation, context)
        return kernels.w8a8_gated_product(rows, self.weight, activation, context, to=to)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        dtype = self.weight.dtype
        return None if self._weight_only or rows <= WEIGHT_ONLY_ROWS[dtype] else dtype

    def _quantised(self, x: Activations, context: StepContext) -> Activations:
        if not isinstance(x, torch.Tensor):
            return x
        to = self.quantised_dtype(len(x))
        return x if to is None else self._kernels.quantise_activations(x, to, context)

    def scale_rows(self, factors: torch.Tensor) -> None:
        self.weight.scale.mul_(factors.unsqueeze(1))

    def to_meta(self) -> W8Linear:
        bias = None if self.bias is None else self.bias.to("meta")
        return W8Linear(self.weight.to_meta(), bias, self._kernels, self._weight_only)


class PackedLinear:
    """Weights of 4 or 8 bits in groups that share a scale; activations are not quantised."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, kernels: Kernels) -> None:
        self.weight, self.bias, self._kernels = weight, bias, kernels
        self.num_bytes = weight.num_bytes

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        made = self._kernels.packed_product(x, self.weight, context, out=out)
        return made if self.bias is None else made.add_(self.bias)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self.bias is None:
            return self._kernels.packed_gated_product(x, self.weight, activation, context)
        return self._kernels.act_and_mul(self.product(x, context), activation, context)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return None

    def scale_rows(self, factors: torch.Tensor) -> None:
        self.weight = self.weight.with_scaled_rows(factors)

    def to_meta(self) -> PackedLinear:
        bias = None if self.bias is None else self.bias.to("meta")
        return PackedLinear(self.weight.to("meta"), bias, self._kernels)


class StackedLinear:
    """Matrices one below another in different formats: one product for each."""

    def __init__(self, parts: Sequence[PackedLinear], kernels: Kernels) -> None:
        self._parts, self._kernels = parts, kernels
        self.num_bytes = sum(part.num_bytes for part in parts)

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.cat([part.product(x, context) for part in self._parts], dim=1, out=out)

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        return self._kernels.act_and_mul(self.product(x, context), activation)

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return None

    def scale_rows(self, factors: torch.Tensor) -> None:
        rows = [part.weight.shape[0] for part in self._parts]
        for part, own in zip(self._parts, torch.split(factors, rows), strict=True):
            part.scale_rows(own)

    def to_meta(self) -> StackedLinear:
        return StackedLinear([part.to_meta() for part in self._parts], self._kernels)


class SummedLinear:
    """Some columns of a matrix. The products of the ranks are summed. The first rank adds the
    bias."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self.num_bytes = part.num_bytes

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._ranks.all_reduce(self._part.product(x, context, out=out))

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> NoReturn:
        raise TypeError("the parts of a gated product cannot be summed")

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return self._part.quantised_dtype(rows)

    def to_meta(self) -> Linear:
        return self._part.to_meta()


class GatheredLinear:
    """Some rows of a matrix of `size` rows. The first rank gets the outputs of all ranks."""

    def __init__(self, part: Linear, size: int, ranks: Ranks) -> None:
        self._part, self._size, self._ranks = part, size, ranks
        self.num_bytes = part.num_bytes

    def product(
        self,
        x: Activations,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        own = self._part.product(x, context)
        parts = self._ranks.gather(own)
        if self._ranks.rank:
            return own
        whole = own.new_empty(len(own), self._size) if out is None else out
        width = own.shape[1]
        for n, part in enumerate(parts):
            place = whole[:, n * width : (n + 1) * width]
            place.copy_(part[:, : place.shape[1]])
        return whole

    def gated_product(
        self,
        x: Activations,
        activation: Activation,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        to: torch.dtype | None = None,
    ) -> NoReturn:
        raise TypeError("the outputs of a gated product are not gathered")

    def quantised_dtype(self, rows: int) -> torch.dtype | None:
        return self._part.quantised_dtype(rows)

    def to_meta(self) -> Linear:
        ranks = Ranks(self._ranks.rank, self._ranks.size)
        return GatheredLinear(self._part.to_meta(), self._size, ranks)


class Embedding:
    """The token embedding: a row of the weight for each token id."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def rows(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.index_select(self.weight, 0, token_ids, out=out)

    def to_meta(self) -> Embedding:
        return Embedding(self.weight.to("meta"))


class SplitEmbedding(Embedding):
    """This rank's rows of the token embedding, from token id `first` on."""

    def __init__(self, weight: torch.Tensor, first: int, ranks: Ranks) -> None:
        super().__init__(weight)
        self._first, self._ranks = first, ranks

    def rows(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        own = token_ids - self._first
        elsewhere = (own < 0) | (own >= len(self.weight))
        found = super().rows(own.masked_fill_(elsewhere, 0), out)
        return self._ranks.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))
