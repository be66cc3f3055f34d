"""The Triton kernels of fp8 weights: interpreted, against fp32 products of what the numbers stand
for; and compiled for an H200.

As in `test_cuda_interpreted.py`, what is interpreted runs in a pytest of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from twostroke.kernels.fp8 import (
    E4M3,
    Fp8Rows,
    Fp8Weight,
    dequantised,
    fp8_weight,
    quantised,
)

from twostroke.kernels.cuda import fp8
from twostroke.kernels.reference import Kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parents[2]

if INTERPRETED:
    from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
    from tests.kernels.test_cuda_interpreted import (  # noqa: F401
        seeded,
        unwritten_memory_is_nan,
    )

    HALF = torch.float16

    def random_weight(columns: int, inner: int, groups: int = 1) -> Fp8Weight:
        values, scale = quantised(torch.randn(columns, inner) * inner**-0.5)
        return fp8_weight(values, scale.unsqueeze(1) * (0.5 + torch.rand(columns, groups)))

    def check_products(rows: int, columns: int, inner: int, groups: int = 1) -> float:
        """Twice: the first must leave the counters as they were. `columns`: of each half."""
        x, weight = torch.randn(rows, inner).to(HALF), random_weight(2 * columns, inner, groups)
        right = x.double() @ dequantised(weight.values, weight.scale, torch.float64).t()
        out = poisoned(rows, 2 * columns, like=x)
        assert fp8.fp8_product(x, weight, out=out) is out
        error = worst(out, right)
        error = largest(error, worst(fp8.fp8_product(x, weight), right))
        assert not weight.arrived.any()
        gated = F.silu(right[:, :columns]) * right[:, columns:]
        return largest(error, worst(fp8.fp8_gated_product(x, weight, "silu"), gated))

    @pytest.mark.parametrize(
        ("rows", "columns", "inner", "groups"),
        [
            (1, 20, 2048, 1),  # streamed
            (1, 9, 1536, 1),
            (1, 7, 1024, 8),  # a scale for each 128 columns
            (1, 8, 128, 1),
            (5, 40, 512, 1),  # tiles, K shared by several programs
            (16, 33, 512, 4),
            (17, 40, 256, 1),
            (40, 40, 256, 1),  # the weight is the left operand
            (40, 40, 256, 2),
            (3, 24, 96, 1),  # no tile divides K
            (140, 24, 128, 1),  # two tiles of rows
            (260, 24, 128, 1),  # more rows than tiles have: dequantised
            (260, 24, 192, 3),
        ],
    )
    def test_products_equal_those_of_what_the_weight_stands_for(
        rows: int, columns: int, inner: int, groups: int
    ) -> None:
        assert check_products(rows, columns, inner, groups) < BOUNDS[HALF]

    def test_these_sizes_have_every_way() -> None:
        def way(rows: int, inner: int, groups: int, gated: bool = False) -> Any:
            return fp8.tiling(rows, random_weight(80, inner, groups), gated, quantised=False)

        def streamed(inner: int, groups: int = 1, gated: bool = False) -> Any:
            return fp8.streaming(random_weight(2, inner, groups), gated)

        assert [streamed(n).inner for n in (2048, 1536, 128)] == [1024, 512, 128]
        assert [streamed(n, gated=True).inner for n in (2048, 384)] == [512, 128]
        assert streamed(1024, 8).inner == 1024
        assert streamed(96) is None
        assert way(5, 512, 1).splits == 1
        assert way(5, 2048, 1).splits == 2
        assert (way(16, 512, 4).inner, way(16, 512, 8).inner) == (128, 64)
        assert [way(n, 256, 1).weight_first for n in (17, 33)] == [False, True]
        assert way(140, 128, 1).rows == 128
        assert way(3, 96, 1) is way(260, 128, 1) is None

    @pytest.mark.parametrize(("rows", "groups"), [(5, 16), (40, 1)])
    def test_several_programs_share_the_columns_of_a_tile(rows: int, groups: int) -> None:
        assert check_products(rows, 20, 2048, groups) < BOUNDS[HALF]

    def test_a_scale_in_anothers_place_is_noticed() -> None:
        right = fp8._group
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8, "_group", lambda weight: 2 * right(weight))
            assert check_products(5, 40, 512, 4) > 0.05

    @pytest.mark.parametrize("rows", [3, 33, 64])
    def test_quantised_rows_times_a_quantised_weight(rows: int) -> None:
        x, weight = torch.randn(rows, 512).to(HALF), random_weight(100, 512)
        rows8 = Kernels().fp8_rows(x)
        expected = Kernels().fp8_rows_product(rows8._replace(dtype=torch.float64), weight)
        assert fp8.tiling(rows, weight, gated=False, quantised=True) is not None
        out = poisoned(rows, 100, like=x)
        assert fp8.fp8_rows_product(rows8, weight, out=out) is out
        assert worst(out, expected) < BOUNDS[HALF]
        # What quantising costs: three bits of mantissa are 2^-4 of a number at the most.
        exact = x.double() @ dequantised(weight.values, weight.scale, torch.float64).t()
        assert 0.01 < worst(out, exact) < 0.05

    @pytest.mark.parametrize("rows", [20, 200])
    def test_the_gated_pair_of_quantised_rows(rows: int) -> None:
        """By tiles, by the library; quantised once more, or not."""
        rows8, weight = Kernels().fp8_rows(torch.randn(rows, 256).to(HALF)), random_weight(96, 256)
        given = (rows8, weight, "silu")
        wide = (rows8._replace(dtype=torch.float64), weight, "silu")
        expected = Kernels().fp8_rows_gated_product(*wide)
        bound = BOUNDS[torch.bfloat16] if rows == 200 else 2 * BOUNDS[HALF]  # the library's results
        assert worst(fp8.fp8_rows_gated_product(*given), expected) < bound
        again = fp8.fp8_rows_gated_product(*given, to_fp8=True)
        assert isinstance(again, Fp8Rows)
        # (What the interpreter rounds otherwise is in it.)
        assert worst(again.values.double() * again.scale.unsqueeze(1), expected) < 0.3

    @pytest.mark.parametrize("width", [64, 500, 1024])
    @pytest.mark.parametrize("gated", [False, True])
    def test_rows_are_quantised_as_the_definition_does(width: int, gated: bool) -> None:
        x = (3 * torch.randn(5, width * (2 if gated else 1))).to(HALF)
        x[3] = 0
        if gated:
            found = fp8.fp8_act_and_mul(x, "silu")
            expected = Kernels().fp8_rows(Kernels().act_and_mul(x, "silu"))
        else:
            found, expected = fp8.fp8_rows(x), Kernels().fp8_rows(x)
        assert found.dtype == HALF
        assert worst(found.scale, expected.scale) < 2e-3
        # The interpreter rounds some of what lies between two numbers otherwise; a GPU does not,
        # which `tests.gpu.formats_check` holds.
        assert (found.values.float() != expected.values.float()).float().mean() < 0.05
        assert not found.values[3].float().any()

    def test_a_matrix_that_the_library_does_not_take() -> None:
        x, weight = torch.randn(200, 104).to(HALF), random_weight(30, 104)
        rows8 = Kernels().fp8_rows(x)
        expected = Kernels().fp8_rows_product(rows8._replace(dtype=torch.float64), weight)
        assert worst(fp8.fp8_rows_product(rows8, weight), expected) < BOUNDS[HALF]

else:
    from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401

    def test_fp8_products_equal_their_definition_when_interpreted() -> None:
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
        child = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]

    def unread_weight(columns: int, inner: int, groups: int = 1) -> Fp8Weight:
        return fp8_weight(
            empty(columns, inner, dtype=E4M3), empty(columns, groups, dtype=torch.float32)
        )

    def test_products_of_llama_3_1_8b_compile_without_slow_conversions(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
    ) -> None:
        o, gate_up = unread_weight(4096, 4096), unread_weight(28672, 4096)
        for rows in (1, 8, 32, 64):
            fp8.fp8_product(empty(rows, 4096), o, pdl=True)
            fp8.fp8_gated_product(empty(rows, 4096), gate_up, "silu", pdl=True)
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
            x = Fp8Rows(empty(rows, 14336, dtype=E4M3), empty(rows, dtype=torch.float32), BF16)
            fp8.fp8_rows_product(x, down)
        for kernel in compiled:
            assert "wgmma.mma_async.sync.aligned.m64" in kernel.asm["ptx"]
            assert "f32.e4m3.e4m3" in kernel.asm["ptx"]
            assert spilled_bytes(kernel, tmp_path) == 0
        compiled.clear()
        fp8.fp8_rows(empty(3, 14336))
        fp8.fp8_act_and_mul(empty(3, 28672), "silu")
        assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in compiled)
        assert len(compiled) == 2

    def test_fp8_products_compile_once_for_all_batches_of_one_tile(
        compiled: list[Any],  # noqa: F811
    ) -> None:
        o = unread_weight(4096, 4096)
        for rows in (2, 9, 16):
            fp8.fp8_product(empty(rows, 4096), o)
        assert len({kernel.hash for kernel in compiled}) == 1
