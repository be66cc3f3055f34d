"""The reference kernels, with assertions on what they are given: for executors on a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from twostroke.kernels.reference import Kernels, gather


class CheckedKernels(Kernels):
    def __init__(self) -> None:
        self.called: list[str] = []

    def rope_store(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called.append("rope_store")
        return super().rope_store(*args, **kwargs)

    def rope_decode_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called.append("rope_decode_attention")
        return super().rope_decode_attention(*args, **kwargs)

    def prefill_attention(  # type: ignore[override]
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: Tensor,
        chunk_rows: Tensor,
        chunk_starts: Tensor,
        cu_tokens: Tensor,
        max_continued: int,
        *how: Any,
        out: Tensor,
        chunk_kv: Tensor,
        max_first: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """First chunks may be attended to by their own keys and values: these must be what the
        cache has, if the row has any blocks."""
        self.called.append("prefill_attention")
        rows, starts, ends = chunk_rows.tolist(), chunk_starts.tolist(), cu_tokens.tolist()
        assert ends[-1] == q.shape[0]
        sizes = [end - first for first, end in pairwise(ends)]
        largest = {True: 0, False: 0}
        for row, start, size, at in zip(rows, starts, sizes, ends[:-1], strict=True):
            largest[start == 0] = max(largest[start == 0], size)
            if start == 0 and tables[row].any():
                cached = torch.cat(
                    [gather(x, tables[row], 0, size, q.dtype) for x in (keys, values)], 1
                )
                held = cached.any(dim=2).all()  # not passed by a window
                part = chunk_kv[at : at + size].to(keys.dtype).to(q.dtype)
                assert not held or torch.equal(part, cached)
        assert largest == {True: max_first, False: max_continued}
        where = (tables, chunk_rows, chunk_starts, cu_tokens, max_continued)
        more: dict[str, Any] = {"out": out, "chunk_kv": chunk_kv, "max_first": max_first}
        more["sinks"] = sinks
        return super().prefill_attention(q, keys, values, *where, *how, **more)

    def decode_attention(self, *args: Any, **more: Any) -> Tensor:
        self.called.append("decode_attention")
        q, _, _, _, rows, lengths, _, _, _, splits, scratch = args
        assert scratch == (q.shape[0], splits)
        assert len(rows) == len(lengths)
        return super().decode_attention(*args, **more)

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        return max(1, min(64 // (batch * num_kv_heads), max_len // 256))

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> Any:
        return batch, splits
