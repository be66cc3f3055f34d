"""The reference kernels, with assertions on their arguments: for executors on a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from twostroke.kernels.records import (
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    KVView,
    PrefillWork,
    StepContext,
)
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

    def prefill_attention(
        self,
        q: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: PrefillWork,
        *,
        out: Tensor,
        chunk_kv: Tensor,
    ) -> Tensor:
        """A first chunk may be attended to by its own keys and values: the cache must have the
        same ones, if the row has any blocks."""
        self.called.append("prefill_attention")
        rows, starts, ends = work.rows.tolist(), work.starts.tolist(), work.cu_tokens.tolist()
        assert ends[-1] == q.shape[0] == work.num_tokens
        sizes = [end - first for first, end in pairwise(ends)]
        largest = {True: 0, False: 0}
        for row, start, size, at in zip(rows, starts, sizes, ends[:-1], strict=True):
            largest[start == 0] = max(largest[start == 0], size)
            if start == 0 and kv.tables[row].any():
                both = [gather(x, kv.tables[row], 0, size, q.dtype) for x in (kv.keys, kv.values)]
                cached = torch.cat(both, 1)
                held = cached.any(dim=2).all()  # not passed by a window
                part = chunk_kv[at : at + size].to(kv.keys.dtype).to(q.dtype)
                assert not held or torch.equal(part, cached)
        assert largest == {True: work.max_first, False: work.max_continued}
        return super().prefill_attention(q, kv, rule, work, out=out, chunk_kv=chunk_kv)

    def decode_attention(
        self,
        q: Tensor,
        kv: KVView,
        rule: AttentionRule,
        work: DecodeWork,
        context: StepContext = DEFAULT_CONTEXT,
        *,
        out: Tensor,
    ) -> Tensor:
        self.called.append("decode_attention")
        assert work.scratch == (q.shape[0], work.splits)
        assert len(work.rows) == len(work.lengths)
        return super().decode_attention(q, kv, rule, work, context, out=out)

    def decode_splits(self, batch: int, num_kv_heads: int, max_len: int) -> int:
        return max(1, min(64 // (batch * num_kv_heads), max_len // 256))

    def decode_scratch(
        self, batch: int, num_heads: int, head_dim: int, splits: int, device: torch.device
    ) -> Any:
        return batch, splits
