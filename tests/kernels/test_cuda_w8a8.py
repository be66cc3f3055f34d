"""The Triton kernels of weights in fp8 and int8: interpreted, against fp32 products of what the
numbers stand for; and compiled for an H200.

As in `test_cuda_interpreted.py`, what is interpreted runs in a pytest of its own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels import hgmma, ptx
from tests.kernels.interpreted import INTERPRETED, run_interpreted
from twostroke.kernels import cuda
from twostroke.kernels.cuda import tiles, w8a8, w8a8_kernels
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import (
    E4M3,
    INT8,
    A8Rows,
    W8Weight,
    dequantised,
    quantised,
    w8_weight,
)

TYPES = pytest.mark.parametrize("type", [E4M3, INT8], ids=str)

if INTERPRETED:
    from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
    from tests.kernels.test_cuda_interpreted import (  # noqa: F401
        seeded,
        unwritten_memory_is_nan,
    )

    HALF = torch.float16

    def random_weight(
        columns: int, inner: int, groups: int = 1, type: torch.dtype = E4M3
    ) -> W8Weight:
        values, scale = quantised(torch.randn(columns, inner) * inner**-0.5, type)
        return w8_weight(values, scale.unsqueeze(1) * (0.5 + torch.rand(columns, groups)))

    def check_products(
        rows: int, columns: int, inner: int, groups: int = 1, type: torch.dtype = E4M3
    ) -> float:
        """Twice: the first must leave the counters as they were. `columns`: of each half."""
        x = torch.randn(rows, inner).to(HALF)
        weight = random_weight(2 * columns, inner, groups, type)
        right = x.double() @ dequantised(weight.values, weight.scale, torch.float64).t()
        out = poisoned(rows, 2 * columns, like=x)
        assert w8a8.w8_product(x, weight, out=out) is out
        error = worst(out, right)
        error = largest(error, worst(w8a8.w8_product(x, weight), right))
        assert not weight.arrived.any()
        gated = F.silu(right[:, :columns]) * right[:, columns:]
        return largest(error, worst(w8a8.w8_gated_product(x, weight, "silu"), gated))

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
            (64, 24, 128, 1),
            (65, 24, 192, 3),  # more rows than tiles have: dequantised
        ],
    )
    def test_products_equal_those_of_what_the_weight_stands_for(
        rows: int, columns: int, inner: int, groups: int
    ) -> None:
        assert check_products(rows, columns, inner, groups) < BOUNDS[HALF]

    @pytest.mark.parametrize(
        ("rows", "columns", "inner"),
        [(1, 9, 1024), (5, 20, 2048), (40, 40, 256), (260, 24, 128)],
    )
    def test_products_of_int8_weights_and_activations_as_they_are(
        rows: int, columns: int, inner: int
    ) -> None:
        assert check_products(rows, columns, inner, type=INT8) < BOUNDS[HALF]

    def test_these_sizes_have_every_way() -> None:
        def way(rows: int, inner: int, groups: int, gated: bool = False) -> Any:
            return w8a8.tiling(rows, random_weight(80, inner, groups), gated, quantised=False)

        def streamed(inner: int, groups: int = 1, gated: bool = False) -> Any:
            return w8a8.streaming(random_weight(2, inner, groups), gated)

        assert [streamed(n).step for n in (2048, 1536, 768, 128)] == [1024, 512, 256, 128]
        assert [streamed(n, gated=True).step for n in (2048, 384)] == [512, 128]
        assert streamed(1024, 8).step == 1024
        assert streamed(96) is streamed(384, 48) is None
        assert way(5, 512, 1).splits == 1
        assert way(5, 2048, 1).splits == 2
        assert (way(16, 512, 4).step, way(16, 512, 8).step) == (128, 64)
        assert [way(n, 256, 1).weight_first for n in (17, 33)] == [False, True]
        assert way(64, 128, 1).rows == 64
        assert way(3, 96, 1) is way(65, 128, 1) is None

    @TYPES
    @pytest.mark.parametrize("groups", [1, 5, 40])
    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_what_is_asked_for_past_the_end_of_a_row_counts_nothing(
        depth: int, groups: int, type: torch.dtype
    ) -> None:
        weight, x = random_weight(6, 640, groups, type=type), torch.randn(1, 640).to(HALF)
        right = x.double() @ dequantised(weight.values, weight.scale, torch.float64).t()
        gated = F.silu(right[:, :3]) * right[:, 3:]
        way = tiles.Streaming(2, 128, 1, depth)
        assert worst(w8a8.stream(x, weight, way, None, False), right) < BOUNDS[HALF]
        assert worst(w8a8.stream(x, weight, way, "silu", False), gated) < 2 * BOUNDS[HALF]

    @pytest.mark.parametrize(("rows", "groups"), [(5, 16), (40, 1)])
    def test_several_programs_share_the_columns_of_a_tile(rows: int, groups: int) -> None:
        assert check_products(rows, 20, 2048, groups) < BOUNDS[HALF]

    def test_a_scale_in_anothers_place_is_noticed() -> None:
        right = w8a8._group
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(w8a8, "_group", lambda weight: 2 * right(weight))
            assert check_products(5, 40, 512, 4) > 0.05

    @pytest.mark.parametrize("rows", [3, 33, 64])
    @TYPES
    def test_quantised_rows_times_a_quantised_weight(rows: int, type: torch.dtype) -> None:
        x, weight = torch.randn(rows, 512).to(HALF), random_weight(100, 512, type=type)
        rows8 = Kernels().a8_rows(x, type)
        expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
        assert w8a8.tiling(rows, weight, gated=False, quantised=True) is not None
        out = poisoned(rows, 100, like=x)
        assert w8a8.w8a8_product(rows8, weight, out=out) is out
        assert worst(out, expected) < BOUNDS[HALF]
        # What quantising costs: three bits of mantissa are 2^-4 of a number at the most, and a step
        # of int8 is 1/127 of the row's largest, some four times its usual size.
        exact = x.double() @ dequantised(weight.values, weight.scale, torch.float64).t()
        least, most = (0.01, 0.05) if type == E4M3 else (0.002, 0.02)
        assert least < worst(out, exact) < most

    @pytest.mark.parametrize(
        ("rows", "inner"),
        [(20, 4096), (100, 128), (300, 192), (1200, 64)],  # split K; one tile; two, three; bands
    )
    def test_sums_of_int8_are_exact(rows: int, inner: int) -> None:
        """The result is the definition's, rounded once: the same however it is cut."""
        weight = random_weight(72, inner, type=INT8)
        rows8 = Kernels().a8_rows(torch.randn(rows, inner).to(HALF), INT8)
        tuned = w8a8.int8_tiling(rows, weight, gated=False)
        assert tuned is not None
        assert (tuned.splits > 1) == (inner == 4096)
        found = w8a8.w8a8_product(rows8._replace(dtype=torch.float32), weight)
        expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
        assert worst(found, expected) < 1e-6
        assert not weight.arrived.any()

    def test_a_table_says_how_int8_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
        weight = random_weight(72, 256, type=INT8)
        assert w8a8.int8_key(40, weight, False) == "int8, 72×256, 64"
        assert w8a8.int8_key(5000, weight, True) == "int8, 72×256 gated, 1024"
        way = (32, 64, 64, 1, 1, 4, 3)
        monkeypatch.setattr(w8a8, "TILES", {"int8, 72×256, 64": way})
        assert w8a8.int8_tiling(40, weight, False) == w8a8.Tiling(*way)
        rows8 = Kernels().a8_rows(torch.randn(40, 256).to(HALF), INT8)
        expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
        assert worst(w8a8.w8a8_product(rows8, weight), expected) < BOUNDS[HALF]

    def test_a_row_whose_sums_int32_does_not_hold_has_no_tiles() -> None:
        long = W8Weight(*(torch.empty(2, n, dtype=INT8) for n in (132_160, 1, 1)))
        assert w8a8.int8_tiling(64, long, gated=False) is None
        fits = long._replace(values=long.values[:, :131_072])
        assert w8a8.int8_tiling(64, fits, gated=False) is not None

    @pytest.mark.parametrize("rows", [20, 200])
    @TYPES
    def test_the_gated_pair_of_quantised_rows(rows: int, type: torch.dtype) -> None:
        """By tiles, of fp8 by the library; quantised once more, or not."""
        rows8 = Kernels().a8_rows(torch.randn(rows, 256).to(HALF), type)
        weight = random_weight(96, 256, type=type)
        given = (rows8, weight, "silu")
        wide = (rows8._replace(dtype=torch.float64), weight, "silu")
        expected = Kernels().w8a8_gated_product(*wide)
        library = rows == 200 and type == E4M3
        bound = BOUNDS[torch.bfloat16] if library else 2 * BOUNDS[HALF]
        assert worst(w8a8.w8a8_gated_product(*given), expected) < bound
        again = w8a8.w8a8_gated_product(*given, to=type)
        assert isinstance(again, A8Rows)
        assert again.values.dtype == type
        # (What the interpreter rounds to e4m3 otherwise is in it.)
        found = again.values.double() * again.scale.unsqueeze(1)
        assert worst(found, expected) < (0.3 if type == E4M3 else 0.03)

    @pytest.mark.parametrize("width", [64, 500, 1024])
    @pytest.mark.parametrize("gated", [False, True])
    @TYPES
    def test_rows_are_quantised_as_the_definition_does(
        width: int, gated: bool, type: torch.dtype
    ) -> None:
        x = (3 * torch.randn(5, width * (2 if gated else 1))).to(HALF)
        x[3] = 0
        if gated:
            found = w8a8.a8_act_and_mul(x, "silu", type)
            expected = Kernels().a8_rows(Kernels().act_and_mul(x, "silu"), type)
        else:
            found, expected = w8a8.a8_rows(x, type), Kernels().a8_rows(x, type)
        assert found.dtype == HALF
        assert worst(found.scale, expected.scale) < 2e-3
        # The interpreter rounds some of what lies between two numbers of e4m3 otherwise; a GPU does
        # not, which `tests.gpu.formats_check` holds. Of the gated, an activation's last bit.
        share = 0.05 if type == E4M3 else 0.01 * gated
        assert (found.values.float() != expected.values.float()).float().mean() <= share
        assert not found.values[3].float().any()

    @pytest.mark.parametrize("width", [64, 500, 4096])
    @TYPES
    def test_a_norm_quantises_as_what_would_read_it(width: int, type: torch.dtype) -> None:
        x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
        x, residual, weight = x.to(HALF), residual.to(HALF), weight.to(HALF)
        again = residual.clone()
        found = cuda.add_rms_norm(x, residual, weight, 1e-5, to=type)
        expected = w8a8.a8_rows(cuda.add_rms_norm(x, again, weight, 1e-5), type)
        assert torch.equal(found.values.float(), expected.values.float())
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(residual, again)
        assert found.dtype == HALF

    @TYPES
    def test_a_matrix_that_no_tile_and_no_library_takes(type: torch.dtype) -> None:
        x, weight = torch.randn(200, 104).to(HALF), random_weight(30, 104, type=type)
        rows8 = Kernels().a8_rows(x, type)
        expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
        assert worst(w8a8.w8a8_product(rows8, weight), expected) < BOUNDS[HALF]

else:
    from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401

    @pytest.mark.slow
    def test_w8a8_products_equal_their_definition_when_interpreted() -> None:
        run_interpreted(__file__)

    def unread_weight(
        columns: int, inner: int, groups: int = 1, type: torch.dtype = E4M3
    ) -> W8Weight:
        return w8_weight(
            empty(columns, inner, dtype=type), empty(columns, groups, dtype=torch.float32)
        )

    def unread_rows(rows: int, inner: int, type: torch.dtype) -> A8Rows:
        return A8Rows(empty(rows, inner, dtype=type), empty(rows, dtype=torch.float32), BF16)

    def test_products_of_llama_3_1_8b_compile_without_slow_conversions(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
    ) -> None:
        o, gate_up = unread_weight(4096, 4096), unread_weight(28672, 4096)
        for rows in (1, 8, 32, 64):
            w8a8.w8_product(empty(rows, 4096), o, pdl=True)
            w8a8.w8_gated_product(empty(rows, 4096), gate_up, "silu", pdl=True)
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
        w8a8.a8_rows(empty(3, 14336), E4M3)
        w8a8.a8_act_and_mul(empty(3, 28672), "silu", INT8)
        cuda.add_rms_norm(empty(3, 4096), empty(3, 4096), empty(4096), 1e-5, pdl=True, to=E4M3)
        assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in compiled)
        assert len(compiled) == 3

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

    def test_fp8_products_compile_once_for_all_batches_of_one_tile(
        compiled: list[Any],  # noqa: F811
    ) -> None:
        o = unread_weight(4096, 4096)
        for rows in (2, 9, 16):
            w8a8.w8_product(empty(rows, 4096), o)
        assert len({kernel.hash for kernel in compiled}) == 1

    CONVERSION = re.compile(r"cvt\.rn\.(f32|bf16|f16)\.[us](8|16|32)")

    def test_int8_products_compile_without_conversions(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
    ) -> None:
        o, gate_up = unread_weight(4096, 4096, type=INT8), unread_weight(28672, 4096, type=INT8)
        for rows in (1, 8):
            w8a8.w8_product(empty(rows, 4096), o, pdl=True)
            w8a8.w8_gated_product(empty(rows, 4096), gate_up, "silu", pdl=True)
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
