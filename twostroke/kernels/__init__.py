"""What a backend offers the decoder. `reference` defines each function; others equal it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a fused kernel may do for its neighbours; no result depends on it."""

    early: bool = False  # be set up before the launch in front has ended
    weight: Tensor | None = None  # [N, K] of the product that follows
    num_bytes: int = 0  # how much of it to read ahead


class FusedKernels(Protocol):
    """A backend of fewer, larger kernels, for a device that should never wait for its host: each
    is a whole stage over everything in a step, and may be recorded in a graph. A row of length 0
    and a slot below 0 are padding."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, ahead: Ahead | None = None
    ) -> Tensor: ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """`residual += x` in place, then its norm."""
        ...

    def silu_and_mul(self, gate_up: Tensor, *, ahead: Ahead | None = None) -> Tensor: ...

    def few_rows_product(self, x: Tensor, weight: Tensor, *, ahead: Ahead | None = None) -> Tensor:
        """x @ weight.T, for at most sixteen rows."""
        ...

    def rope_store(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        num_heads: int,
        num_kv_heads: int,
        out: Tensor | None = None,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """Norm and rotate [T, (H + 2K) · D], put keys and values in the cache; q as [T, H, D]."""
        ...

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        chunk_rows: Tensor,
        chunk_starts: Tensor,
        cu_tokens: Tensor,
        max_chunk: int,
        scale: float,
        window: int | None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """All chunks: tokens [cu_tokens[c], cu_tokens[c + 1]) are positions from chunk_starts[c]
        of the sequence in tables[chunk_rows[c]]."""
        ...

    def decode_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
        splits: int,
        scratch: Any,
        softcap: float = 0.0,
        out: Tensor | None = None,
        *,
        ahead: Ahead | None = None,
    ) -> Tensor: ...

    def rope_decode_attention(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        scale: float,
        window: int | None,
        splits: int,
        scratch: Any,
        softcap: float = 0.0,
        out: Tensor | None = None,
        *,
        ahead: Ahead | None = None,
    ) -> Tensor:
        """`rope_store`, then `decode_attention`, where each token is the last of its sequence: at
        position `lengths` − 1, in a block that is in no other table."""
        ...

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int: ...

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: Any
    ) -> Any: ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        key0: Tensor,
        key1: Tensor,
    ) -> Tensor:
        """A token a row; temperature 0 is greedy, top_k 0 is all. The logits stay as they are."""
        ...
