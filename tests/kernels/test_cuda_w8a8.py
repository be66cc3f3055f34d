"""The Triton kernels of weights in fp8 and int8, compiled for an H200."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import hgmma, ptx
from tests.kernels.definitions import DEPENDENT
from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401
from twostroke.kernels import cuda
from twostroke.kernels.cuda import tiles, w8a8, w8a8_kernels
from twostroke.kernels.w8a8 import E4M3, INT8, QuantizedActivations, W8Weight, w8_weight

TYPES = pytest.mark.parametrize("type", [E4M3, INT8], ids=str)


def unread_weight(columns: int, inner: int, groups: int = 1, type: torch.dtype = E4M3) -> W8Weight:
    return w8_weight(empty(columns, inner, dtype=type), empty(columns, groups, dtype=torch.float32))


def unread_rows(rows: int, inner: int, type: torch.dtype) -> QuantizedActivations:
    return QuantizedActivations(
        empty(rows, inner, dtype=type), empty(rows, dtype=torch.float32), BF16
    )


@pytest.mark.full
def test_products_of_llama_3_1_8b_compile_without_slow_conversions(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    o, gate_up = unread_weight(4096, 4096), unread_weight(28672, 4096)
    for rows in (1, 8, 32, 64):
        w8a8.w8_product(empty(rows, 4096), o, context=DEPENDENT)
        w8a8.w8_gated_product(empty(rows, 4096), gate_up, "silu", context=DEPENDENT)
    for kernel in compiled:
        code = kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) == 0
        assert kernel.metadata.shared <= 227 << 10
        assert "griddepcontrol.wait" in code
        assert "cvt.bf16.f16" not in code  # a quarter of the rate of the way round by fp32
    for kernel in compiled[2:]:
        assert "fma.rn.bf16x2" in kernel.asm["ptx"]
        assert "cvt.rn.f16x2.e4m3x2" not in kernel.asm["ptx"]
    for kernel in compiled[:2]:  # one row has asked for its weight before it waits
        before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert "evict_first" in before


def test_quantised_rows_go_to_the_matrix_units_as_they_are(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    down = unread_weight(4096, 14336)
    for rows in (32, 64, 128):
        w8a8.w8a8_product(unread_rows(rows, 14336, E4M3), down)
    for kernel in compiled:
        assert "wgmma.mma_async.sync.aligned.m64" in kernel.asm["ptx"]
        assert "f32.e4m3.e4m3" in kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) == 0
    compiled.clear()
    w8a8.quantise_activations(empty(3, 14336), E4M3)
    w8a8.quantised_act_and_mul(empty(3, 28672), "silu", INT8)
    cuda.add_rms_norm(empty(3, 4096), empty(3, 4096), empty(4096), 1e-5, context=DEPENDENT, to=E4M3)
    assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in compiled)
    assert len(compiled) == 3


@pytest.mark.full
@TYPES
def test_a_product_is_waited_for_before_its_numbers_are_made_again(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    type: torch.dtype,
) -> None:
    for rows, inner in ((64, 4096), (64, 14336)):
        w8a8.w8_product(empty(rows, inner), unread_weight(4096, inner, type=type))
    for kernel in compiled:
        assert hgmma.PRODUCT.search("\n".join(hgmma.loop(kernel, tmp_path)))
        assert hgmma.overwritten(hgmma.loop(kernel, tmp_path)) == []


@pytest.mark.full
def test_fp8_products_compile_once_for_all_batches_of_one_tile(
    compiled: list[Any],  # noqa: F811
) -> None:
    o = unread_weight(4096, 4096)
    for rows in (2, 9, 16):
        w8a8.w8_product(empty(rows, 4096), o)
    assert len({kernel.hash for kernel in compiled}) == 1


CONVERSION = re.compile(r"cvt\.rn\.(f32|bf16|f16)\.[us](8|16|32)")


@pytest.mark.full
def test_int8_products_compile_without_conversions(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    o, gate_up = unread_weight(4096, 4096, type=INT8), unread_weight(28672, 4096, type=INT8)
    for rows in (1, 8):
        w8a8.w8_product(empty(rows, 4096), o, context=DEPENDENT)
        w8a8.w8_gated_product(empty(rows, 4096), gate_up, "silu", context=DEPENDENT)
    for kernel in compiled:
        assert not CONVERSION.search(kernel.asm["ptx"])
    compiled.clear()
    for rows in (32, 128, 4096):
        w8a8.w8a8_product(unread_rows(rows, 4096, INT8), o)
        w8a8.w8a8_gated_product(unread_rows(rows, 4096, INT8), gate_up, "silu")
    for kernel in compiled:
        assert re.search(
            r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8", kernel.asm["ptx"]
        )
        assert spilled_bytes(kernel, tmp_path) == 0
        assert kernel.metadata.shared <= 227 << 10


def test_a_gpu_with_less_shared_memory_has_fewer_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned = w8a8.Tiling(128, 128, 128, 1, False, 8, 4)
    assert tiles.fitted(tuned, 128 * 256) is tuned
    monkeypatch.setattr(tiles, "shared_bytes", lambda: 99 << 10)
    assert tiles.fitted(tuned, 128 * 256) == replace(tuned, num_stages=3)


@pytest.mark.parametrize("word", [0x0001_7F80, 0xFF7F_8001, 0x8181_FE02, 0xFFFF_FFFF])
def test_int8_becomes_wider_exactly(word: int) -> None:
    numbers = [(word >> 8 * n & 255 ^ 128) - 128 for n in range(4)]
    found = ptx.run(w8a8_kernels.INT8_F32, 4, [word])
    assert [ptx.to_float(bits) for bits in found] == numbers
    for source, kind in ((w8a8_kernels.INT8_F16, "f16"), (w8a8_kernels.INT8_BF16, "bf16")):
        pairs = ptx.run(source, 2, [word])
        assert [number for pair in pairs for number in ptx.halves(pair, kind)] == numbers
