"""The Triton kernels compiled for an H200 on a machine without one: Triton brings its assembler.

The interpreter takes what the compiler does not; this finds it before a GPU is asked.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.kernels.no_gpu import NoGPU  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the calls of a test compile instead of launching."""
    found: list[Any] = []

    def compile_only(kernel: Any, grid: object) -> Any:
        def call(*args: Any, **options: Any) -> None:
            found.append(kernel.run(*args, grid=grid, warmup=True, **options))

        return call

    monkeypatch.setattr(JITFunction, "__getitem__", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGPU(pytest.fail))
    return found


def spilled_bytes(kernel: Any, tmp_path: Path) -> int:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found.group(1))


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def pool(num_kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(9, 16, num_kv_heads, dim), empty(9, 16, num_kv_heads, dim)


ATTENTION = [
    (32, 8, 128, None, 0.0),
    (28, 4, 80, 100, 0.0),
    (8, 4, 256, 100, 30.0),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim", "window", "softcap"), ATTENTION)
def test_attention_compiles_and_fits_in_registers(
    compiled: list[Any],
    tmp_path: Path,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    window: int | None,
    softcap: float,
) -> None:
    """Decode attention of queries and of QKV products, then prefill attention."""
    from twostroke.kernels import cuda

    q, (keys, values) = empty(2, num_heads, dim), pool(num_kv_heads, dim)
    tables, row = empty(2, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    where, wide = (keys, values, tables, row, row), (num_heads + 2 * num_kv_heads) * dim
    norm, angles = empty(dim), empty(99, dim // 2, dtype=torch.float32)
    slots = empty(2, dtype=torch.int64)
    for batch, splits in ((2, 1), (2, 4), (300, 1)):
        scratch = cuda.decode_scratch(2, num_heads, dim, splits, torch.device("cpu"))
        how = (0.1, window, splits, scratch, softcap)
        cuda.decode_attention(empty(batch, num_heads, dim), *where, *how)
        for weight in (None, norm):
            make = (weight, weight, 1e-6, angles, angles, slots)
            cuda.rope_decode_attention(empty(batch, wide), *make, *where, *how)
    ends = empty(3, dtype=torch.int32)
    cuda.prefill_attention(q, keys, values, tables, row, row, ends, 2, 0.1, window, softcap)
    assert len(compiled) == 10
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # sixteen bytes a thread
        assert spilled_bytes(kernel, tmp_path) <= 64
    assert "wgmma" in compiled[-1].asm["ptx"]


def test_nothing_waits_between_the_loads_of_a_new_token(compiled: list[Any]) -> None:
    """Tiles of one layout: a single exchange between threads before the context is read, which
    the key needs anyway; with a norm, whose sums stay within a warp, as well."""
    from twostroke.kernels import cuda

    keys, values = pool(8, 128)
    tables, row = empty(2, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    scratch = cuda.decode_scratch(2, 32, 128, 4, torch.device("cpu"))
    angles, slots = empty(99, 64, dtype=torch.float32), empty(2, dtype=torch.int64)
    where = (slots, keys, values, tables, row, row, 0.1, None, 4, scratch)
    for weight in (None, empty(128)):
        cuda.rope_decode_attention(empty(2, 6144), weight, weight, 1e-6, angles, angles, *where)
    for kernel in compiled:
        before, _ = kernel.asm["ptx"].split("cp.async.cg.shared.global", 1)
        assert before.count("bar.sync") == 1
        assert before.count("ld.global.v4.b32") >= 12


@pytest.mark.parametrize("dim", [128, 256])
def test_attention_in_fp32_fits_in_shared_memory(compiled: list[Any], dim: int) -> None:
    from twostroke.kernels import cuda

    q, keys = (empty(*size, dtype=torch.float32) for size in ((2, 8, dim), (9, 16, 4, dim)))
    tables, row = empty(2, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    scratch = cuda.decode_scratch(2, 8, dim, 4, torch.device("cpu"))
    where = (keys, keys, tables, row, row, 0.1, None, 4, scratch)
    cuda.decode_attention(q, *where)
    qkv, angles, weight = (
        empty(*size, dtype=torch.float32) for size in ((2, 16 * dim), (99, dim // 2), (dim,))
    )
    slots = empty(2, dtype=torch.int64)
    cuda.rope_decode_attention(qkv, weight, weight, 1e-6, angles, angles, slots, *where)
    ends = empty(3, dtype=torch.int32)
    cuda.prefill_attention(q, keys, keys, tables, row, row, ends, 2, 0.1, None)
    assert all(kernel.metadata.shared <= 227 << 10 for kernel in compiled)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "max_len", "splits"),
    [
        (1, 8, 131072, 33),
        (8, 8, 8192, 4),
        (32, 8, 8192, 1),
        (256, 8, 131072, 1),
        (1, 8, 100, 1),
        (1, 8, 1024, 8),
        (1, 1, 131072, 64),
    ],
)
def test_splits_fill_the_card_and_are_no_shorter_than_they_need(
    batch: int, kv_heads: int, max_len: int, splits: int
) -> None:
    from twostroke.kernels import cuda

    assert cuda.decode_splits(batch, kv_heads, max_len) == splits


def test_products_and_launches_that_are_set_up_early(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels import cuda

    scratch = cuda.decode_scratch(2, 32, 128, 4, torch.device("cpu"))
    tables, row = empty(2, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    where = (*pool(8, 128), tables, row, row)
    for early in (False, True):
        cuda.add_rms_norm(empty(2, 4096), empty(2, 4096), empty(4096), 1e-5, early=early)
        cuda.silu_and_mul(empty(2, 8192), early=early)
        query = empty(2, 32, 128)
        cuda.decode_attention(query, *where, 0.1, None, 4, scratch, early=early)
        cuda.product(empty(1, 4096), empty(4096, 4096), early=early)
        cuda.gated_product(empty(1, 4096), empty(8192, 4096), early=early)
        cuda.gated_product(empty(16, 4096), empty(8192, 4096), early=early)
    assert len(compiled) == 12
    for index, kernel in enumerate(compiled):
        code, early = kernel.asm["ptx"], index >= 6
        assert ("griddepcontrol.wait" in code) == early
        assert bool(kernel.metadata.launch_pdl) == early
        assert spilled_bytes(kernel, tmp_path) == 0
    # A product of one row has asked for its weight before it waits.
    for kernel in compiled[9:11]:
        before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert "evict_first" in before


def test_a_first_chunk_is_fetched_by_the_hardware(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels import cuda

    tables, row = empty(2, 64, dtype=torch.int32), empty(2, dtype=torch.int32)
    ends, qkv = empty(3, dtype=torch.int32), empty(64, 48, 128)
    how = (tables, row, row, ends, 32, 0.1, None)
    cuda.prefill_attention(qkv[:, :32], *pool(8, 128), *how, own=qkv[:, 32:], max_fresh=32)
    fresh, later = compiled
    assert "cp.async.bulk.tensor" in fresh.asm["ptx"]
    assert "cp.async.bulk.tensor" not in later.asm["ptx"]
    for kernel in compiled:
        assert "wgmma" in kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) <= 64
    assert 2 * (fresh.metadata.shared + 1024) <= 228 << 10  # two on a multiprocessor


def test_kernels_compile_once_for_all_batches(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels import cuda

    keys, values = pool(8, 128)
    weight, angles = empty(128), empty(99, 64, dtype=torch.float32)
    for tokens in (1, 3, 64):
        where = [torch.zeros(tokens + 1, dtype=torch.int64)[1:]] * 2
        cuda.rope_store(
            empty(tokens, 32 * 128),
            weight,
            weight,
            1e-6,
            angles,
            angles,
            *where,
            keys,
            values,
            16,
            8,
        )
        cuda.add_rms_norm(empty(tokens, 4096), empty(tokens, 4096), empty(4096), 1e-5)
        cuda.silu_and_mul(empty(tokens, 28672))
        column = empty(tokens, dtype=torch.float32)
        whole = empty(tokens, dtype=torch.int32)
        cuda.sample(empty(tokens, 151936), column, whole, column, column, whole, whole)
        rows = torch.zeros(tokens + 1, dtype=torch.int32)[1:]
        scratch = cuda.decode_scratch(tokens, 16, 128, 4, torch.device("cpu"))
        tables = empty(2, 64, dtype=torch.int32)
        make = (weight, weight, 1e-6, angles, angles, where[1])
        how = (keys, values, tables, rows, rows, 0.1, None, 4, scratch)
        cuda.rope_decode_attention(empty(tokens, 32 * 128), *make, *how)
    assert len({kernel.hash for kernel in compiled}) == len(compiled) // 3
    for kernel in compiled[:3]:
        assert spilled_bytes(kernel, tmp_path) == 0
        assert "ld.global.v4.b32" in kernel.asm["ptx"].replace("L1::evict_last.", "")


def test_sampling_kernels_compile_once_for_all_batches(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.exec.device_sampling import DeviceSampler
    from twostroke.kernels import cuda

    history = torch.zeros(8, 129, dtype=torch.int32)
    sampler = DeviceSampler(8, 151936, history, cuda, torch.device("cpu"))
    logits, tokens = empty(8, 151936), torch.zeros(8, dtype=torch.int32)
    for count in (1, 3, 8):
        lines = np.arange(count)
        drawn = sampler.draw(logits, lines, lines, lines, {}, *(lines,) * 6)
        sampler.advance(drawn, tokens)
        sampler.logprobs(logits, lines, history[0, 1:], 2 * count)
    names = ["_adjust", "_scan_tiles", "_choose", "_advance", "_scan", "_merge"]
    assert [kernel.metadata.name for kernel in compiled] == names * 3
    assert len({kernel.hash for kernel in compiled}) == len(names)
    spills = {name: spilled_bytes(kernel, tmp_path) for name, kernel in zip(names, compiled)}  # noqa: B905
    assert {name for name, spilled in spills.items() if spilled} <= {"_choose"}, spills
    for name in ("_adjust", "_scan"):
        wide = compiled[names.index(name)].asm["ptx"].replace("L1::evict_last.", "")
        assert "ld.global.v4.b32" in wide
    assert "fma.rn.f32" not in compiled[0].asm["ptx"]  # rounded as the definition is
