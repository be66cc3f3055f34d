"""The Triton kernels of latent attention, compiled for an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_cuda_compiles import compiled, empty, spilled_bytes  # noqa: F401
from twostroke.kernels.records import AttentionRule, DecodeWork, KVView, PrefillWork, Rope


def run_decode(
    heads: int, splits: int, queries: int = 1, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Sizes of DeepSeek's, but for the heads."""
    from twostroke.kernels import cuda

    ints = empty(8, dtype=torch.int32)
    q, rows, tokens = empty(2 * queries, heads, 512, dtype=dtype), ints[:2], 2 * queries
    q_rope = empty(tokens, heads, 192, dtype=dtype)[..., 128:]
    keys = empty(9, 2, 16, 1, 576, dtype=dtype)[:, 1]
    scratch = cuda.decode_scratch(tokens, heads, 512, splits, torch.device("cpu"))
    view = KVView(keys, keys, empty(4, 8, dtype=torch.int32), ints)
    work = DecodeWork(rows, rows, queries, splits, scratch)
    cuda.latent_decode_attention(q, q_rope, view, AttentionRule(0.1), work, out=q)


@pytest.mark.full
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (32, 1), (128, 1), (16, 3)])
def test_decode_compiles_and_reads_the_cache_once(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    heads: int,
    queries: int,
) -> None:
    for splits in (1, 4):
        run_decode(heads, splits, queries)
    assert [kernel.metadata.name for kernel in compiled] == [
        "_latent_decode",
        "_latent_decode",
        "_merge",
    ]
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 384
    # Scores and values are of the same place in shared memory.
    tuned = tuning_of(heads * queries)
    cached = tuned.num_stages * tuned.tile * 576 * 2
    exchanged = 48 << 10
    queries_bytes = tuned.members * 576 * 2
    for kernel in compiled[:2]:
        assert kernel.metadata.shared <= cached + queries_bytes + exchanged
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
        assert "wgmma" in kernel.asm["ptx"]


def tuning_of(members: int) -> Any:
    from twostroke.kernels.cuda import latent

    return latent.tuning(members, 576, 2)


@pytest.mark.full
def test_fp32_and_the_other_kernels_compile(compiled: list[Any], tmp_path: Path) -> None:  # noqa: F811
    from twostroke.kernels import cuda

    run_decode(16, 4, dtype=torch.float32)
    assert compiled[0].metadata.shared <= 227 << 10
    compiled.clear()
    q, projected, kv = empty(3, 16, 192), empty(3, 576), empty(3, 576)
    keys, angles = empty(9, 2, 16, 1, 576)[:, 1], empty(99, 32, dtype=torch.float32)
    slots, ints = empty(3, dtype=torch.int64), empty(8, dtype=torch.int32)
    view = KVView(keys, keys, empty(4, 8, dtype=torch.int32), slots)
    rope = Rope(angles, angles, k_norm=empty(512), norm_eps=1e-6)
    cuda.latent_rope_store(q, projected, rope, slots, view, out=kv)
    work = PrefillWork(ints[:2], ints[:2], ints[:3], 3, 2, 1, [(0, 2), (9, 10)])
    rule, out = AttentionRule(0.1), empty(3, 16, 128)
    cuda.latent_prefill_attention(q, empty(16, 256, 512), view, rule, work, out=out, chunk_kv=kv)
    names = ["_latent_rope_store", "_expanded_prefill", "_gather_entries", "_expanded_prefill"]
    assert [kernel.metadata.name for kernel in compiled] == names
    for kernel in compiled:
        assert spilled_bytes(kernel, tmp_path) <= 64
    for kernel in (compiled[1], compiled[3]):
        assert kernel.metadata.shared <= 227 << 10
        assert "wgmma" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("batch", "heads", "max_len", "splits"),
    [
        (1, 16, 32768, 128),  # a program a multiprocessor
        (1, 128, 32768, 64),
        (32, 16, 8192, 4),
        (70, 16, 32768, 11),  # seventy programs would leave half of them without
        (128, 16, 32768, 1),
        (1, 16, 100, 2),  # as many as there are tiles
        (1, 16, 1, 1),
    ],
)
def test_splits_are_those_that_are_done_first(
    batch: int, heads: int, max_len: int, splits: int
) -> None:
    from twostroke.kernels import cuda

    assert cuda.latent_decode_splits(batch, heads, 576, max_len, 132) == splits
