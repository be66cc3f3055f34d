"""Latent attention by interpreted Triton kernels, against plain ones in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import latent_cases as cases
from tests.kernels.cuda_cases import BOUNDS
from tests.kernels.latent_cases import Sizes
from twostroke.kernels.cuda import latent_prefill
from twostroke.kernels.cuda.latent import LatentDecodeTuning, tuning

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32
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
    tuned = LatentDecodeTuning(16, 32, positions_first, 4, 2, 1)
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
    """Five heads are computed as four and one, and each alone."""
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
def test_a_cache_of_another_type_than_the_model(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
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
