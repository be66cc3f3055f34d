"""The Triton kernels of latent attention: interpreted, against plain ones in float64; and compiled
for an H200.

As in `test_cuda_interpreted.py`, what is interpreted runs in a pytest of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.interpreted import INTERPRETED, run_interpreted

HALF, SINGLE = torch.float16, torch.float32

if INTERPRETED:
    from tests.kernels import latent_cases as cases
    from tests.kernels.cuda_cases import BOUNDS
    from tests.kernels.latent_cases import Sizes
    from tests.kernels.test_cuda_interpreted import (  # noqa: F401
        seeded,
        unwritten_memory_is_nan,
    )
    from twostroke.kernels.cuda import latent_prefill
    from twostroke.kernels.cuda.latent import Tuning, tuning

    CPU = torch.device("cpu")
    SMALL = Sizes(4, 24, 8, 10, 12, page=4)  # nothing is a power of two
    EVEN = Sizes(20, 32, 16, 16, 16)

    @pytest.mark.parametrize("dtype", [HALF, SINGLE])
    @pytest.mark.parametrize(
        ("sizes", "lengths", "splits"),
        [
            (SMALL, [1, 0, 7, 63, 64, 65], 1),
            (SMALL, [1, 0, 7, 63, 64, 65, 300], 3),
            (EVEN, [129, 0, 16, 17], 2),  # twenty heads: a tile is not full
            (replace(EVEN, page=32, num_heads=70), [128], 3),
            (SMALL, [300], 40),  # more splits than tiles
            (replace(cases.V2_LITE, rank=128), [150], 2),
        ],
    )
    def test_decode_equals_the_definition(
        sizes: Sizes, lengths: list[int], splits: int, dtype: torch.dtype
    ) -> None:
        assert cases.check_decode(sizes, lengths, splits, CPU, dtype) < BOUNDS[dtype]

    @pytest.mark.parametrize("positions_first", [False, True])
    @pytest.mark.parametrize("queries", [1, 3])
    @pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (1, 0.0), (40, 2.0)])
    def test_decode_with_a_window_a_softcap_and_several_queries(
        window: int | None, softcap: float, queries: int, positions_first: bool
    ) -> None:
        sizes = replace(SMALL, window=window, softcap=softcap)
        tuned = Tuning(16, 32, positions_first, 4, 2, 1)
        for splits in (1, 4):
            lengths = [queries, 0, 34, 100]
            error = cases.check_decode(sizes, lengths, splits, CPU, SINGLE, queries, tuned)
            assert error < BOUNDS[SINGLE]

    @pytest.mark.parametrize("dtype", [HALF, SINGLE])
    @pytest.mark.parametrize(
        ("sizes", "chunks"),
        [
            (SMALL, [(0, 1), (0, 31), (5, 40)]),
            (SMALL, [(64, 2), (0, 130), (63, 40)]),
            (EVEN, [(0, 17)]),
            (replace(EVEN, page=32, num_heads=3), [(40, 9), (200, 16)]),
        ],
    )
    def test_prefill_equals_the_definition(
        sizes: Sizes, chunks: list[tuple[int, int]], dtype: torch.dtype
    ) -> None:
        assert cases.check_prefill(sizes, chunks, CPU, dtype) < 2 * BOUNDS[dtype]

    @pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (None, 2.0), (20, 2.0)])
    def test_prefill_with_a_window_and_a_softcap(window: int | None, softcap: float) -> None:
        sizes = replace(SMALL, window=window, softcap=softcap)
        error = cases.check_prefill(sizes, [(0, 40), (70, 20), (63, 1)], CPU, SINGLE)
        assert error < 2 * BOUNDS[SINGLE]

    def test_keys_and_values_of_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
        """Of five heads four and one, and each alone."""
        sizes, chunks = replace(SMALL, num_heads=5), [(0, 30), (40, 24)]
        for room in (64 * 4 * 22 * 2, 1):
            monkeypatch.setattr(latent_prefill, "EXPANDED_BYTES", room)
            assert cases.check_prefill(sizes, chunks, CPU, HALF) < 2 * BOUNDS[HALF]

    @pytest.mark.parametrize(("dtype", "norm"), [(HALF, HALF), (HALF, SINGLE), (SINGLE, SINGLE)])
    @pytest.mark.parametrize("sizes", [SMALL, EVEN])
    def test_norm_rope_and_store_equal_the_definition(
        sizes: Sizes, dtype: torch.dtype, norm: torch.dtype
    ) -> None:
        bound = max(BOUNDS[dtype], BOUNDS[norm])
        assert cases.check_rope_store(sizes, 5, norm, CPU, dtype) < bound

    @pytest.mark.parametrize(("dtype", "kv_dtype"), [(SINGLE, HALF), (HALF, SINGLE)])
    def test_a_cache_of_another_type_than_the_model(
        dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        sizes = replace(SMALL, kv_dtype=kv_dtype)
        bound = max(BOUNDS[dtype], BOUNDS[kv_dtype])
        assert cases.check_decode(sizes, [1, 0, 65], 2, CPU, dtype) < BOUNDS[dtype]
        assert cases.check_prefill(sizes, [(0, 20), (30, 9)], CPU, dtype) < 2 * BOUNDS[dtype]
        assert cases.check_rope_store(sizes, 5, SINGLE, CPU, dtype) < bound

    def test_a_position_too_few_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
        right = cases.expected
        monkeypatch.setattr(
            cases,
            "expected",
            lambda q, keys, values, start, sizes: right(q, keys, values, start - 1, sizes),
        )
        assert cases.check_decode(SMALL, [50], 2, CPU, SINGLE) > 0.01
        assert cases.check_prefill(SMALL, [(40, 9)], CPU, SINGLE) > 0.01

    def test_these_sizes_have_every_tuning() -> None:
        found = [tuning(heads, 576, 2) for heads in (4, 20, 70)]
        assert len({(one.members, one.positions_first) for one in found}) == 3

else:
    from tests.kernels.test_cuda_compiles import compiled, empty, spilled_bytes  # noqa: F401

    @pytest.mark.slow
    def test_the_kernels_equal_their_definitions_when_interpreted() -> None:
        run_interpreted(__file__)

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
        where = (keys, empty(4, 8, dtype=torch.int32), rows, rows, 0.1, None, 0.0)
        given: dict[str, Any] = {"out": q, "queries": queries}
        cuda.latent_decode_attention(q, q_rope, *where, splits, scratch, **given)

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

    def test_fp32_and_the_other_kernels_compile(compiled: list[Any], tmp_path: Path) -> None:  # noqa: F811
        from twostroke.kernels import cuda

        run_decode(16, 4, dtype=torch.float32)
        assert compiled[0].metadata.shared <= 227 << 10
        compiled.clear()
        q, projected, kv = empty(3, 16, 192), empty(3, 576), empty(3, 576)
        keys, angles = empty(9, 2, 16, 1, 576)[:, 1], empty(99, 32, dtype=torch.float32)
        slots, ints = empty(3, dtype=torch.int64), empty(8, dtype=torch.int32)
        where = (angles, angles, slots, slots, keys)
        cuda.latent_rope_store(q, projected, empty(512), 1e-6, *where, kv=kv)
        chunks = (empty(4, 8, dtype=torch.int32), ints[:2], ints[:2], ints[:3])
        cuda.latent_prefill_attention(
            q,
            keys,
            empty(16, 256, 512),
            *chunks,
            0.1,
            None,
            0.0,
            out=empty(3, 16, 128),
            chunk_kv=kv,
            spans=[(0, 2), (9, 10)],
            max_first=2,
        )
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
