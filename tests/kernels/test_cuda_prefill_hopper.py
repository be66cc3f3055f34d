"""Prefill attention for Hopper: where the copy engine reads, which chunks it is for, and the kernel
compiled for an H200.

Triton's interpreter has no Gluon: `tests.gpu.kernels_check` compares results on a GPU.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels import hgmma  # noqa: E402
from tests.kernels.test_cuda_compiles import (  # noqa: E402, F401
    BF16,
    Case,
    compiled,
    empty,
    pool,
)
from tests.kernels.test_cuda_stream_k import product_loops  # noqa: E402
from twostroke.kernels import cuda  # noqa: E402
from twostroke.kernels.cuda import prefill_hopper, stream_k  # noqa: E402
from twostroke.kernels.cuda.prefill_hopper import FAR, MIN_CONTINUED, TUNINGS, choose  # noqa: E402
from twostroke.kernels.records import PrefillWork  # noqa: E402

pytestmark = pytest.mark.skipif(not stream_k.GLUON_IS_TESTED, reason="another Gluon")


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Any:
    """Clear the caches of values that a test replaces."""
    cached = (stream_k.is_hopper, stream_k.num_multiprocessors, prefill_hopper._variant)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


# ── where the copy engine reads ─────────────────────────────────────────────────────────────


def lines_read(descriptor: Any, at: list[int], line: int) -> list[int | None]:
    """Return the address of each line of the box at these coordinates, as 64 bits; None: outside of
    the tensor, which is read as zeros. `line`: the dimension of lines."""
    base, width = descriptor.base.data_ptr(), descriptor.base.itemsize
    found: list[int | None] = []
    for n in range(descriptor.block_shape[line]):
        place = [each + n * (index == line) for index, each in enumerate(at)]
        inside = all(0 <= x < size for x, size in zip(place, descriptor.shape, strict=True))
        offset = sum(x * stride for x, stride in zip(place, descriptor.strides, strict=True))
        found.append((base + offset * width) % 2**64 if inside else None)
    return found


def test_tiles_of_chunks_are_their_lines_and_zeros_behind_them() -> None:
    own = empty(100, 48, 128)[:, 32:]
    descriptor = prefill_hopper.own_descriptor(own.flatten(1), 128, 64)
    assert descriptor.base.data_ptr() == own.data_ptr()  # a beginning outside of memory faults
    for first, size in ((0, 100), (10, 70), (99, 1), (0, 64)):
        for tile, head in product(range(0, size, 64), (0, 15)):
            # As `_produce` has it.
            at = [FAR, first + size, FAR - size + tile, head * 128]
            lines = [own[first + n, head].data_ptr() for n in range(tile, min(size, tile + 64))]
            expected = lines + [None] * (64 - len(lines))
            assert lines_read(descriptor, at, 2) == expected


@pytest.mark.parametrize("dim", [64, 256])
def test_pages_are_their_lines_in_use_and_zeros_behind_them(dim: int) -> None:
    for cached in pool(8, dim):
        descriptor = prefill_hopper.page_descriptor(cached)
        assert descriptor.base.data_ptr() == cached.data_ptr()
        for page, used, column in product(range(len(cached)), range(17), (0, 7 * dim)):
            # As `_fetch_pages` has it.
            at = [page, FAR, FAR - 16 + used, 16 - used, column]
            lines = [cached[page, n].flatten()[column].data_ptr() for n in range(used)]
            assert lines_read(descriptor, at, 3) == lines + [None] * (16 - used)


def test_strides_are_those_that_the_engine_takes() -> None:
    descriptors = [prefill_hopper.own_descriptor(empty(100, 2048), 128, 64)]
    descriptors += [prefill_hopper.page_descriptor(cached) for cached in pool(8, 128)]
    for descriptor in descriptors:
        assert descriptor.strides[-1] == 1
        assert len(descriptor.shape) <= 5
        assert all(0 < size < 2**31 for size in descriptor.shape)
        for stride in descriptor.strides[:-1]:
            assert 0 < stride * 2 < 2**40
            assert stride * 2 % 16 == 0


# ── which chunks it is for ──────────────────────────────────────────────────────────────────


def test_long_chunks_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_hopper, "is_hopper", lambda: True)
    for dim, tuned in TUNINGS.items():
        least, case = tuned.min_tokens, Case(32, 8, dim)
        q, view, own = case.queries(1), case.view(1), case.qkv(1)[:, 32:]
        assert choose(least, q, view, own) == tuned
        assert choose(least - 1, q, view, own) is None
        continued = min(least, MIN_CONTINUED)
        assert choose(continued, q, view, None) == tuned
        assert choose(continued - 1, q, view, None) is None
        assert choose(least, q.float(), view, own.float()) is None
        assert choose(least, q, view, own.half()) is None
        assert choose(least, q, view, own.flatten(1)[:, 1:-1].unsqueeze(1)) is None  # unaligned
    other = Case(32, 8, 80)
    assert choose(2**20, other.queries(1), other.view(1), other.qkv(1)[:, 32:]) is None
    wide = Case(96, 1, 128)  # a group of more heads than a consumer has rows
    assert choose(2**20, wide.queries(1), wide.view(1), wide.qkv(1)[:, 96:]) is None
    monkeypatch.setattr(prefill_hopper, "is_hopper", lambda: False)
    case = Case(32, 8, 128)
    assert choose(2**20, case.queries(1), case.view(1), case.qkv(1)[:, 32:]) is None


# ── compiled ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.full
@pytest.mark.parametrize(
    ("dim", "paged", "window", "softcap", "sinks", "dtype"),
    [
        (128, False, None, 0.0, False, BF16),
        (128, True, 100, 5.0, True, torch.float16),
        (64, False, 100, 0.0, True, BF16),
        (64, True, None, 0.0, False, BF16),
        (256, False, None, 5.0, False, BF16),
        (256, True, None, 0.0, False, BF16),
    ],
)
def test_sums_and_weights_stay_in_registers(
    compiled: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dim: int,
    paged: bool,
    window: int | None,
    softcap: float,
    sinks: bool,
    dtype: torch.dtype,
) -> None:
    tuned = TUNINGS[dim]
    monkeypatch.setattr(prefill_hopper, "choose", lambda *_: tuned)
    case = Case(32, 8, dim, window, softcap, dtype, sinks=sinks)
    ints = empty(3, dtype=torch.int32)
    first, continued = (0, 300) if paged else (300, 0)
    work = PrefillWork(ints[:2], ints[:2], ints, 300, first, continued, ())
    qkv = case.qkv(300)
    cuda.prefill_attention(
        qkv[:, :32], case.view(300), case.rule, work, out=case.queries(300), chunk_kv=qkv[:, 32:]
    )
    (kernel,) = compiled
    loops = product_loops(kernel, tmp_path)
    assert len(loops) >= 2 * tuned.consumers
    for lines in loops:
        assert sum(line.startswith(("LDL", "STL")) for line in lines) <= 2  # of some 200 registers
        assert not hgmma.overwritten(lines)
