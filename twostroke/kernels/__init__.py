"""What a backend offers the decoder. `reference` defines each function; others equal it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernels(Protocol):
    """A module with these functions is a backend. Shapes and meaning: see `reference`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def store_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor
    ) -> None: ...

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        start: int,
        scale: float,
        window: int | None,
    ) -> Tensor: ...

    def decode_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        lengths: Tensor,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor: ...
