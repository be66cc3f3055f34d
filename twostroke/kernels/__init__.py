"""What a backend offers the decoder. `reference` defines each function; others equal it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.kernels.sampling import SamplingState

Attend = Callable[["Tensor", "Tensor"], object]  # over the keys and values of a layer


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


class FusedKernels(Protocol):
    """A backend of fewer, larger kernels, for a device that should never wait for its host: each
    is a whole stage over everything in a step, and may be recorded in a graph. A row of length 0
    and a slot below 0 are padding. `early`: the launch may be set up before the one in front has
    ended."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, early: bool = False) -> Tensor: ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        early: bool = False,
    ) -> Tensor:
        """`residual += x` in place, then its norm."""
        ...

    def silu_and_mul(self, gate_up: Tensor, *, early: bool = False) -> Tensor: ...

    def product(
        self, x: Tensor, weight: Tensor, early: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T"""
        ...

    def gated_product(self, x: Tensor, weight: Tensor, early: bool = False) -> Tensor:
        """`silu_and_mul` of the product."""
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
        early: bool = False,
    ) -> Tensor:
        """Norm and rotate [T, (H + 2K) · D], put keys and values in the cache: [T, H + 2K, D], in
        place if no `out` is given."""
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
        *,
        own: Tensor | None = None,
        max_fresh: int = 0,
    ) -> Tensor:
        """All chunks: tokens [cu_tokens[c], cu_tokens[c + 1]) are positions from chunk_starts[c]
        of the sequence in tables[chunk_rows[c]]. `own`: their keys and values, [T, 2K, D]; then
        `max_chunk` is of chunks that start later than 0, `max_fresh` of those that start there."""
        ...

    def bind_prefill_attention(
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
        out: Tensor,
        own: Tensor,
        max_fresh: int,
    ) -> Attend:
        """`prefill_attention` for every layer of a step: what is not a layer's own is looked at
        once. Keys and values here are those of any layer, of a cache like all the others'."""
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
        early: bool = False,
    ) -> Tensor: ...

    def bind_decode_attention(
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
        out: Tensor,
    ) -> Attend:
        """`decode_attention`, in the same way."""
        ...

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
        early: bool = False,
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
        *,
        out: Tensor | None = None,
        cells: Tensor | None = None,
        write_at: Tensor | None = None,
    ) -> Tensor:
        """`reference_sampling` defines this and the next three. The logits stay as they are."""
        ...

    def adjust_logits(
        self, logits: Tensor, samples: Tensor, state: SamplingState, masks: Tensor, out: Tensor
    ) -> Tensor: ...

    def advance_tokens(
        self, samples: Tensor, drawn: Tensor, state: SamplingState, out: Tensor
    ) -> None: ...

    def token_logprobs(
        self, logits: Tensor, which: Tensor, tokens: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def compile_ahead(self, run: Callable[[], object], of: object) -> None:
        """Make ready what `run` calls, on tensors without memory; it may be run or not. `of`: all
        that decides what it calls, of which the `repr` is the same in another process."""
        ...
