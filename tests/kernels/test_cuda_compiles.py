"""The Triton kernels compiled for an H200 on a machine without one: Triton brings its assembler.

The interpreter takes what the compiler does not; this finds it before a GPU is asked.
"""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.kernels.definitions import DEPENDENT  # noqa: E402
from tests.kernels.no_gpu import NoGPU  # noqa: E402
from twostroke.kernels.activations import Activation, ClampedSwiglu  # noqa: E402
from twostroke.kernels.records import (  # noqa: E402
    DEFAULT_CONTEXT,
    AttentionRule,
    DecodeWork,
    DrawParams,
    KVView,
    PrefillWork,
    Rope,
    StepContext,
)
from twostroke.kv.block_layout import side_bytes  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BF16 = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, triton_cache: Path) -> list[Any]:
    """Kernels that the calls of a test compile instead of launching."""
    found: list[Any] = []

    def compile_only(kernel: Any, grid: object) -> Any:
        def call(*args: Any, **options: Any) -> None:
            found.append(kernel.run(*args, grid=grid, warmup=True, **options))

        return call

    monkeypatch.setattr(JITFunction, "__getitem__", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
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


def pool(
    num_kv_heads: int, dim: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one of two layers, block-major."""
    inner = (16, num_kv_heads, dim)
    if dtype == torch.int8:
        data = empty(9, 2, 2, side_bytes(*inner, 1, scaled=True), dtype=dtype)
        data = data[..., : math.prod(inner)].unflatten(-1, inner)
    else:
        data = empty(9, 2, 2, *inner, dtype=dtype)
    return data[:, 1, 0], data[:, 1, 1]


class Case:
    """Arguments of the attention kernels."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        window: int | None = None,
        softcap: float = 0.0,
        dtype: torch.dtype = BF16,
        kv_dtype: torch.dtype | None = None,
        sinks: bool = False,
        scaled: bool = False,
    ) -> None:
        self.query_scales = empty(99, dtype=torch.float32) if scaled else None
        self.sinks = empty(num_heads, dtype=torch.float32) if sinks else None
        self.num_heads, self.num_kv_heads, self.dim, self.dtype = (
            num_heads,
            num_kv_heads,
            dim,
            dtype,
        )
        self.keys, self.values = pool(num_kv_heads, dim, kv_dtype or dtype)
        self.tables, self.rows = empty(2, 64, dtype=torch.int32), empty(300, dtype=torch.int32)
        self.angles = empty(99, dim // 2, dtype=torch.float32)
        self.slots = empty(300, dtype=torch.int64)
        self.rule = AttentionRule(0.1, window, softcap, sinks=self.sinks)

    def queries(self, tokens: int) -> torch.Tensor:
        return empty(tokens, self.num_heads, self.dim, dtype=self.dtype)

    def qkv(self, tokens: int) -> torch.Tensor:
        return empty(tokens, self.num_heads + 2 * self.num_kv_heads, self.dim, dtype=self.dtype)

    def view(self, tokens: int) -> KVView:
        return KVView(self.keys, self.values, self.tables, self.slots[:tokens])

    def rope(self, norm: torch.dtype | None) -> Rope:
        weight = None if norm is None else empty(self.dim, dtype=norm)
        return Rope(self.angles, self.angles, self.query_scales, weight, weight, 1e-6)

    def decode_work(self, batch: int, splits: int, queries: int = 1) -> DecodeWork:
        row = self.rows[:batch]
        return DecodeWork(row, row, queries, splits, self.scratch(splits))

    def decode(
        self, batch: int, splits: int, queries: int = 1, context: StepContext = DEFAULT_CONTEXT
    ) -> None:
        from twostroke.kernels import cuda

        q, work = self.queries(batch * queries), self.decode_work(batch, splits, queries)
        cuda.decode_attention(q, self.view(batch), self.rule, work, context, out=q)

    def rope_decode(self, batch: int, splits: int, norm: torch.dtype | None = None) -> None:
        from twostroke.kernels import cuda

        qkv, positions = self.qkv(batch).flatten(1), self.slots[:batch]
        work, out = self.decode_work(batch, splits), self.queries(batch)
        view = self.view(batch)
        cuda.rope_decode_attention(qkv, self.rope(norm), positions, view, self.rule, work, out=out)

    def rope_store(self, norm: torch.dtype | None = None) -> None:
        from twostroke.kernels import cuda

        cuda.rope_store(self.qkv(3).flatten(1), self.rope(norm), self.slots[:3], self.view(3))

    def prefill(self, chunk_kv: bool, context: int = 0) -> None:
        """First chunks, by their own keys and values; then continued ones, after `context`."""
        from twostroke.kernels import cuda

        qkv, row = self.qkv(64), self.rows[:2]
        q, others = qkv[:, : self.num_heads], qkv[:, self.num_heads :]
        work = PrefillWork(row, row, self.rows[:3], 64, 32, 32, [(context, context + 32)])
        own = others if chunk_kv else None
        out = self.queries(64)
        cuda.prefill_attention(q, self.view(64), self.rule, work, out=out, chunk_kv=own)

    def scratch(self, splits: int) -> Any:
        from twostroke.kernels import cuda

        return cuda.decode_scratch(2, self.num_heads, self.dim, splits, torch.device("cpu"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "window", "softcap"),
    [(32, 8, 128, None, 0.0), (28, 4, 80, 100, 0.0), (8, 4, 256, 100, 30.0)],
)
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
    case = Case(num_heads, num_kv_heads, dim, window, softcap)
    for batch, splits in ((2, 1), (2, 4), (300, 1)):
        case.decode(batch, splits)
        for norm in (None, BF16):
            case.rope_decode(batch, splits, norm)
    case.prefill(chunk_kv=False)
    assert len(compiled) == 10
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # sixteen bytes a thread
        assert spilled_bytes(kernel, tmp_path) <= 64
    assert "wgmma" in compiled[-1].asm["ptx"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "queries"),
    [
        ((32, 8, 128), 2),
        ((32, 8, 128, 100), 5),
        ((8, 1, 128), 5),
        ((8, 4, 256, 100, 30.0), 5),
        ((8, 1, 256), 5),
    ],
)
def test_attention_of_several_queries_a_row(
    compiled: list[Any], tmp_path: Path, case: tuple[Any, ...], queries: int
) -> None:
    for splits in (1, 4):
        Case(*case).decode(2, splits, queries)
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) <= 64


@pytest.mark.full
@pytest.mark.parametrize("case", [(32, 8, 128), (8, 4, 256, 100_000, 30.0), (64, 8, 64)])
def test_a_short_chunk_after_a_long_context(
    compiled: list[Any], tmp_path: Path, case: tuple[Any, ...]
) -> None:
    Case(*case).prefill(chunk_kv=True, context=30_000)
    first, continued = compiled
    assert "atom" in continued.asm["ptx"]
    assert "atom" not in first.asm["ptx"]
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 128  # in the merge, once for each tile


@pytest.mark.full
def test_attention_with_sinks(compiled: list[Any], tmp_path: Path) -> None:
    """As gpt-oss has it."""
    case = Case(64, 8, 64, window=128, sinks=True)
    case.decode(2, 4, 5)
    case.rope_decode(2, 4)
    case.prefill(chunk_kv=True)
    assert len(compiled) == 4
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 64


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("norm", [None, BF16], ids=str)
def test_queries_with_scales(
    compiled: list[Any], tmp_path: Path, norm: torch.dtype | None, kv_dtype: torch.dtype | None
) -> None:
    case = Case(32, 8, 128, scaled=True, kv_dtype=kv_dtype)
    case.rope_decode(2, 4, norm)
    case.rope_store(norm)
    assert len(compiled) == 2
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 64


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32])
def test_a_cache_of_another_type_than_the_model(
    compiled: list[Any], tmp_path: Path, dim: int, kv_dtype: torch.dtype
) -> None:
    case = Case(8, 2, dim, kv_dtype=kv_dtype)
    case.decode(2, 4)
    case.rope_decode(2, 4, BF16)
    case.prefill(chunk_kv=True)  # reads the cache: what is there was rounded
    case.rope_store(BF16)
    assert len(compiled) == 4
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 64


@pytest.mark.full
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_an_8_bit_cache(compiled: list[Any], tmp_path: Path, kv_dtype: torch.dtype) -> None:
    case = Case(32, 8, 128, kv_dtype=kv_dtype)
    case.decode(2, 4)
    case.rope_decode(300, 1, BF16)
    case.prefill(chunk_kv=True)  # what is computed was rounded as what is cached: two kernels
    case.rope_store(BF16)
    assert len(compiled) == 5
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) <= 64
    fp8 = "cvt.rn.f16x2.e4m3x2" in compiled[0].asm["ptx"]
    assert fp8 == (kv_dtype == torch.float8_e4m3fn)


def test_norms_with_weights_in_fp32(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels import cuda

    weight, case = empty(4096, dtype=torch.float32), Case(8, 4, 256)
    cuda.rms_norm(empty(2, 4096), weight, 1e-6)
    cuda.add_rms_norm(empty(2, 4096), empty(2, 4096), weight, 1e-6)
    case.rope_store(torch.float32)
    case.rope_decode(2, 4, torch.float32)
    assert len(compiled) == 4
    for kernel in compiled:
        assert spilled_bytes(kernel, tmp_path) <= 64


def test_nothing_waits_between_the_loads_of_a_new_token(compiled: list[Any]) -> None:
    """Tiles of one layout: no exchange between threads before all are there, nor before the context
    is read but the key's own; with a norm, whose sums stay within a warp, as well."""
    case = Case(32, 8, 128)
    for norm in (None, BF16):
        case.rope_decode(2, 4, norm)
    for kernel in compiled:
        before, after = kernel.asm["ptx"].split("bar.sync", 1)
        assert before.count("ld.global.v4.b32") >= 12
        assert "ld.global.v4.b32" not in after.split("cp.async.cg.shared.global", 1)[0]


@pytest.mark.full
@pytest.mark.parametrize("dim", [128, 256])
def test_attention_in_fp32_fits_in_shared_memory(compiled: list[Any], dim: int) -> None:
    case = Case(8, 4, dim, dtype=torch.float32)
    case.decode(2, 4)
    case.rope_decode(2, 4, torch.float32)
    case.prefill(chunk_kv=False)
    assert all(kernel.metadata.shared <= 227 << 10 for kernel in compiled)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "max_len", "sms", "splits"),
    [
        (1, 8, 131072, 132, 33),
        (8, 8, 8192, 132, 4),
        (32, 8, 8192, 132, 1),
        (256, 8, 131072, 132, 1),
        (1, 8, 100, 132, 1),
        (1, 8, 1024, 132, 8),
        (1, 1, 131072, 132, 64),
        (1, 8, 131072, 20, 5),  # a smaller card
    ],
)
def test_splits_fill_the_card_and_are_no_shorter_than_they_need(
    batch: int, kv_heads: int, max_len: int, sms: int, splits: int
) -> None:
    from twostroke.kernels import cuda

    assert cuda.decode_splits(batch, kv_heads, max_len, sms) == splits


def test_a_device_is_asked_for_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.kernels import cuda
    from twostroke.kernels.cuda import splits

    asked: list[int] = []

    def properties(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(multi_processor_count=78 + index)

    splits._num_sms.cache_clear()
    assert cuda.num_sms(torch.device("cpu")) == 132
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [cuda.num_sms(torch.device("cuda", index)) for index in (0, 1, 0)] == [78, 79, 78]
    assert cuda.num_sms(torch.device("meta")) == 79
    assert asked == [0, 1]
    splits._num_sms.cache_clear()


@pytest.mark.parametrize(
    "activation",
    [pytest.param("silu", marks=pytest.mark.core), "gelu_tanh", "gelu", ClampedSwiglu()],
)
def test_products_and_dependent_launches(
    compiled: list[Any], tmp_path: Path, activation: Activation
) -> None:
    from twostroke.kernels import cuda

    case = Case(32, 8, 128)
    for context in (DEFAULT_CONTEXT, DEPENDENT):
        cuda.add_rms_norm(empty(2, 4096), empty(2, 4096), empty(4096), 1e-5, context=context)
        cuda.act_and_mul(empty(2, 8192), activation, context=context)
        case.decode(2, 4, context=context)
        cuda.product(empty(1, 4096), empty(4096, 4096), context=context)
        cuda.gated_product(empty(1, 4096), empty(8192, 4096), activation, context=context)
        cuda.gated_product(empty(16, 4096), empty(8192, 4096), activation, context=context)
    assert len(compiled) == 12
    for index, kernel in enumerate(compiled):
        code, dependent = kernel.asm["ptx"], index >= 6
        assert ("griddepcontrol.wait" in code) == dependent
        assert bool(kernel.metadata.launch_pdl) == dependent
        assert spilled_bytes(kernel, tmp_path) == 0
    # A product of one row has asked for its weight before it waits.
    for kernel in compiled[9:11]:
        before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert "evict_first" in before


@pytest.mark.parametrize(
    "case", [(32, 8, 128), (8, 4, 256), (8, 4, 256, 100, 30.0), (16, 2, 64, 100)]
)
def test_a_first_chunk_is_fetched_by_the_hardware(
    compiled: list[Any], tmp_path: Path, case: tuple[Any, ...]
) -> None:
    Case(*case).prefill(chunk_kv=True)
    first, continued = compiled
    assert "cp.async.bulk.tensor" in first.asm["ptx"]
    assert "cp.async.bulk.tensor" not in continued.asm["ptx"]
    for kernel in compiled:
        assert "wgmma" in kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) <= 64
    assert 2 * (first.metadata.shared + 1024) <= 228 << 10  # two on a multiprocessor


@pytest.mark.full
def test_kernels_compile_once_for_all_batches(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels import cuda

    kv = pool(8, 128)
    weight, angles = empty(128), empty(99, 64, dtype=torch.float32)
    for tokens, batch in ((1, 1), (3, 3), (64, 8)):
        slots, qkv = torch.zeros(tokens + 1, dtype=torch.int64)[1:], empty(tokens, 32 * 128)
        tables = empty(2, 64, dtype=torch.int32)
        rope, view = Rope(angles, angles, None, weight, weight, 1e-6), KVView(*kv, tables, slots)
        cuda.rope_store(qkv, rope, slots, view)
        cuda.add_rms_norm(empty(tokens, 4096), empty(tokens, 4096), empty(4096), 1e-5)
        cuda.act_and_mul(empty(tokens, 28672), "silu")
        column = empty(tokens, dtype=torch.float32)
        whole = empty(tokens, dtype=torch.int32)
        by = DrawParams(column, whole, column, column, whole, whole)
        cuda.sample(empty(tokens, 151936), by)
        # Attention has another kernel where a multiprocessor has more than two programs.
        rows, slots = torch.zeros(batch + 1, dtype=torch.int32)[1:], slots[:batch]
        scratch = cuda.decode_scratch(batch, 16, 128, 4, torch.device("cpu"))
        view, work = KVView(*kv, tables, slots), DecodeWork(rows, rows, 1, 4, scratch)
        rule, out = AttentionRule(0.1), empty(batch, 16, 128)
        cuda.rope_decode_attention(qkv[:batch], rope, slots, view, rule, work, out=out)
        cuda.decode_attention(out, view, rule, work, out=out)
    assert len({kernel.hash for kernel in compiled}) == len(compiled) // 3
    for kernel in compiled[:3]:
        assert spilled_bytes(kernel, tmp_path) == 0
        assert "ld.global.v4.b32" in kernel.asm["ptx"].replace("L1::evict_last.", "")


@pytest.mark.full
def test_sampling_kernels_compile_once_for_all_batches(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.exec.device_sampling import DeviceSampler
    from twostroke.kernels import cuda

    history = torch.zeros(8, 129, dtype=torch.int32)
    sampler = DeviceSampler(8, 151936, history, cuda, torch.device("cpu"))
    logits, tokens = empty(8, 151936), torch.zeros(8, dtype=torch.int32)
    for count in (1, 3, 8):
        lines = np.arange(count)
        drawn = sampler.draw(logits, lines, lines, lines, {}, DrawParams(*(lines,) * 6))
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


def test_blocks_are_copied_by_one_kernel_in_wide_loads(compiled: list[Any], tmp_path: Path) -> None:
    from twostroke.kernels.cuda.copy_blocks import copy_blocks

    pool = empty(64, 1 << 15, dtype=torch.int64)
    for count in (1, 7, 64):
        copy_blocks(pool, pool, torch.zeros(count, 2, dtype=torch.int64))
    assert len({kernel.hash for kernel in compiled}) == 1, "one, whatever is copied"
    assert spilled_bytes(compiled[-1], tmp_path) == 0
    assert "ld.global.v2.b64" in compiled[-1].asm["ptx"]
