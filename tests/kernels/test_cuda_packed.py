"""The Triton kernels of weights of 4 and 8 bits: interpreted, against products in fp64 of what the
numbers stand for; and compiled for an H200.

As in `test_cuda_interpreted.py`, what is interpreted runs in a pytest of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels import hgmma, ptx
from tests.kernels.interpreted import INTERPRETED, run_interpreted
from twostroke.kernels.cuda import packed, packed_codes
from twostroke.kernels.packed import (
    Codes,
    PackedWeight,
    dequantised,
    pack,
    packed_weight,
    quantised,
)

if INTERPRETED:
    from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
    from tests.kernels.test_cuda_interpreted import (  # noqa: F401
        seeded,
        unwritten_memory_is_nan,
    )

    HALF = torch.float16

    def random_weight(
        columns: int, inner: int, group: int, kind: str = "", bits: int = 4
    ) -> PackedWeight:
        shape = (columns, inner // group)
        codes = torch.randint(0, 1 << bits, (columns, inner), dtype=torch.uint8)
        scale = (0.5 + torch.rand(shape)) * inner**-0.5 * 2.0 ** (2 - bits)
        zero = torch.randint(0, 1 << bits, shape, dtype=torch.uint8) if kind == "zero" else None
        offset = -scale * torch.rand(shape) * (1 << bits) if kind == "offset" else None
        return pack(Codes(bits, codes, scale, zero, offset))

    def check_products(rows: int, columns: int, weight: PackedWeight) -> float:
        """Twice: the first must leave the counters as they were. `columns`: of each half."""
        x = torch.randn(rows, weight.shape[1]).to(HALF)
        right = x.double() @ dequantised(weight, torch.float64).t()
        out = poisoned(rows, 2 * columns, like=x)
        assert packed.packed_product(x, weight, out=out) is out
        error = worst(out, right)
        error = largest(error, worst(packed.packed_product(x, weight), right))
        assert not weight.arrived.any()
        gated = F.silu(right[:, :columns]) * right[:, columns:]
        # Two roundings more: of each half, and of what the activation makes of them.
        acted = worst(packed.packed_gated_product(x, weight, "silu"), gated)
        return largest(error, acted / 2)

    FORMATS = [
        (128, "", 4),
        (128, "zero", 4),
        (64, "", 4),
        (32, "zero", 4),
        (32, "offset", 4),
        (32, "", 8),
        (32, "offset", 8),
        (16, "", 8),
    ]

    # One row is streamed; of 4 bits, tiles of 16, 64 and 128 rows.
    SIZES = [(1, 13), (13, 20), (40, 33), (70, 24)]

    @pytest.mark.parametrize(
        ("format", "rows", "columns"),
        [(f, *size) for n, f in enumerate(FORMATS) for size in SIZES[: 4 if n in (1, 7) else 2]],
        ids=str,
    )
    def test_products_equal_those_of_what_the_weight_stands_for(
        format: tuple[int, str, int], rows: int, columns: int
    ) -> None:
        weight = random_weight(2 * columns, 256, *format)
        assert check_products(rows, columns, weight) < BOUNDS[HALF]

    @pytest.mark.parametrize(("group", "kind", "bits"), [FORMATS[1], FORMATS[4]])
    def test_several_programs_share_the_columns_of_a_tile(group: int, kind: str, bits: int) -> None:
        weight = random_weight(40, 2048, group, kind, bits)
        tuned = packed.choice(5, weight, gated=False)
        assert isinstance(tuned, packed.Tiling)
        assert tuned.splits > 1
        assert check_products(5, 20, weight) < BOUNDS[HALF]

    @pytest.mark.parametrize(("group", "kind", "bits"), FORMATS)
    def test_one_row_is_streamed(group: int, kind: str, bits: int) -> None:
        weight, x = random_weight(26, 256, group, kind, bits), torch.randn(1, 256).to(HALF)
        right = x.double() @ dequantised(weight, torch.float64).t()
        gated = F.silu(right[:, :13]) * right[:, 13:]
        for activation, expected in ((None, right), ("silu", gated)):
            tuned = packed.streaming(weight, gated=activation is not None)
            assert tuned is not None
            assert packed.choice(1, weight, activation is not None) == tuned
            found = packed.stream(x, weight, tuned, activation, False)
            assert worst(found, expected) < 2 * BOUNDS[HALF]

    @pytest.mark.parametrize(("group", "kind", "bits"), FORMATS)
    def test_many_rows_have_the_weight_dequantised(
        monkeypatch: pytest.MonkeyPatch, group: int, kind: str, bits: int
    ) -> None:
        monkeypatch.setattr(packed, "MOST_TILED", {4: 2, 8: 2})
        assert check_products(3, 6, random_weight(12, 256, group, kind, bits)) < BOUNDS[HALF]

    @pytest.mark.parametrize(
        ("inner", "group", "block"), [(320, 64, 64), (192, 32, 64), (256, 256, 128), (96, 96, 32)]
    )
    def test_blocks_are_as_large_as_a_row_and_its_groups_allow(
        inner: int, group: int, block: int
    ) -> None:
        weight = random_weight(12, inner, group, "zero")
        assert weight.block == block
        assert check_products(3, 6, weight) < BOUNDS[HALF]

    def test_these_sizes_have_every_way() -> None:
        weight = random_weight(80, 512, 128)
        assert packed.choice(1, weight, gated=False) == packed.Streaming(4, 4, 1, 2)
        ways = [packed.choice(n, weight, gated=False) for n in (2, 9, 40, 100, 300)]
        assert [way and way.rows for way in ways] == [8, 16, 64, 128, None]
        bytes_ = random_weight(80, 512, 128, bits=8)
        ways = [packed.choice(n, bytes_, gated=False) for n in (5, 40, 128, 130)]
        assert [way and way.rows for way in ways] == [16, 64, 128, None]
        assert [way and way.weight_first for way in ways] == [False, True, True, None]
        for inner, group, gated, expected in (
            (384, 128, False, (4, 1, 1, 2)),
            (4096, 128, True, (2, 2, 1, 2)),
            (4096, 16, False, (4, 16, 1, 2)),
        ):
            wide = random_weight(80, inner, group, bits=8)
            assert packed.choice(1, wide, gated) == packed.Streaming(*expected)

    @pytest.mark.parametrize(
        ("bits", "inner", "group"), [(8, 576, 48), (8, 1408, 1408), (4, 1408, 1408), (4, 896, 128)]
    )
    def test_one_row_of_groups_that_are_no_power_of_two(bits: int, inner: int, group: int) -> None:
        weight, x = random_weight(6, inner, group, "", bits), torch.randn(1, inner).to(HALF)
        right = x.double() @ dequantised(weight, torch.float64).t()
        assert isinstance(packed.choice(1, weight, gated=False), packed.Streaming)
        assert worst(packed.packed_product(x, weight), right) < BOUNDS[HALF]

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("depth", [1, 2, 4, 8])
    def test_what_is_asked_for_past_the_end_of_a_row_counts_nothing(bits: int, depth: int) -> None:
        weight, x = random_weight(6, 640, 128, "zero", bits), torch.randn(1, 640).to(HALF)
        right = x.double() @ dequantised(weight, torch.float64).t()
        tuned = packed.Streaming(2, 1, 1, depth)
        assert worst(packed.stream(x, weight, tuned, None, False), right) < BOUNDS[HALF]

    def test_an_outlier_does_not_drown_the_rest_of_its_row() -> None:
        for bits in (4, 8):
            weight, x = random_weight(16, 512, 128, "", bits), torch.randn(1, 512)
            x[0, 100] = 1000
            x = x.to(HALF)
            right = x.double() @ dequantised(weight, torch.float64).t()
            others = x.clone()
            others[0, 100] = 0
            rest = others.double() @ dequantised(weight, torch.float64).t()
            found = packed.packed_product(x, weight).double() - right
            # Rounding the outputs alone is 2⁻¹¹ of what the outlier makes of them.
            assert float(found.abs().max()) < 2**-10 * float(right.abs().max())
            assert float(found.norm()) < 0.05 * float(rest.norm())

    @pytest.mark.parametrize(("group", "kind"), [(128, ""), (128, "zero"), (64, ""), (256, "zero")])
    def test_scales_may_be_taken_before_the_product(group: int, kind: str) -> None:
        weight, x = random_weight(80, 512, group, kind), torch.randn(40, 512).to(HALF)
        right = x.double() @ dequantised(weight, torch.float64).t()
        gated = F.silu(right[:, :40]) * right[:, 40:]
        tuned = packed.Tiling(64, 64, 1, 1, True, 4, 3, scaled=True)
        assert worst(packed.tiled(x, weight, tuned, None, False), right) < BOUNDS[HALF]
        assert worst(packed.tiled(x, weight, tuned, "silu", False), gated) < 2 * BOUNDS[HALF]

    def test_what_the_table_says_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
        weight = random_weight(80, 512, 128, "zero")
        assert packed.table_key(5, weight, False) == "4 128 zeros, 80×512, 16"
        for way in (
            (16, 64, 1, 2, 1, 4, 3),
            (8, 32, 2, 1, 1, 2, 3, 1),
            (),
        ):
            monkeypatch.setattr(packed, "TILES", {packed.table_key(5, weight, False): way})
            assert packed.choice(5, weight, False) == (packed.Tiling(*way) if way else None)
            x = torch.randn(5, 512).to(HALF)
            right = x.double() @ dequantised(weight, torch.float64).t()
            assert worst(packed.packed_product(x, weight), right) < BOUNDS[HALF]
        wide = random_weight(80, 512, 128, bits=8)
        monkeypatch.setattr(packed, "TILES", {packed.table_key(1, wide, False): (2, 4, 1)})
        assert packed.choice(1, wide, False) == packed.Streaming(2, 4, 1)

    def test_a_zero_or_a_nibble_in_anothers_place_is_noticed() -> None:
        weight = random_weight(80, 384, 128, "zero")
        right, x = dequantised(weight, torch.float64), torch.randn(3, 384).to(HALF)
        assert weight.zero is not None
        other = weight._replace(zero=weight.zero.roll(1, dims=1))
        assert worst(packed.packed_product(x, other), x.double() @ right.t()) > 0.05
        other = weight._replace(codes=weight.codes >> 4 | weight.codes << 4)
        assert worst(packed.packed_product(x, other), x.double() @ right.t()) > 0.05

    def test_scales_of_fp32_are_taken_as_they_are() -> None:
        weight = random_weight(80, 384, 128)
        wide = weight._replace(scale=weight.scale.float() * 1e-6)
        x = torch.randn(3, 384).to(HALF)
        right = x.double() @ dequantised(wide, torch.float64).t()
        found = packed.packed_product(x, wide, out=torch.empty(3, 80))
        assert worst(found, right) < 1e-6

else:
    from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401

    @pytest.mark.slow
    def test_packed_products_equal_their_definition_when_interpreted() -> None:
        run_interpreted(__file__)

    def unread_weight(
        columns: int, inner: int, group: int = 128, kind: str = "", bits: int = 4
    ) -> PackedWeight:
        shape = (columns, inner // group)
        codes = empty(columns, inner * bits // 8, dtype=torch.uint8)
        scale = empty(*shape, dtype=torch.float16)
        zero = empty(*shape, dtype=torch.uint8) if kind == "zero" else None
        offset = empty(*shape, dtype=torch.float16) if kind == "offset" else None
        return packed_weight(bits, codes, scale, zero, offset)

    CONVERSION = re.compile(r"cvt\.rn\.(f32|bf16|f16)\.[us](8|16|32)")

    @pytest.mark.parametrize(("group", "kind"), [(128, ""), (32, "offset")])
    def test_products_of_llama_3_1_8b_compile_without_conversions(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
        group: int,
        kind: str,
    ) -> None:
        o = unread_weight(4096, 4096, group, kind)
        gate_up = unread_weight(28672, 4096, group, kind)
        for rows in (9, 16, 32):
            packed.packed_product(empty(rows, 4096), o, pdl=True)
        for rows in (9, 16):
            packed.packed_gated_product(empty(rows, 4096), gate_up, "silu", pdl=True)
        # Where `stream_k` has none.
        tuned = packed.choice(128, gate_up, gated=True)
        assert tuned is not None
        packed.run(empty(128, 4096), gate_up, tuned, "silu", True)
        for kernel in compiled:
            code = kernel.asm["ptx"]
            assert spilled_bytes(kernel, tmp_path) == 0
            assert kernel.metadata.shared <= 227 << 10
            assert "griddepcontrol.wait" in code
            assert not CONVERSION.search(code)
            # Codes go from shared memory to where the matrix units have them, without shuffles.
            assert "ldmatrix.sync" in code
            # Tiles of 32 columns have the instructions of all GPUs, of 64 Hopper's own.
            assert re.search(
                r"wgmma\.mma_async\.sync\.aligned\.m64|mma\.sync\.aligned\.m16n8k16", code
            )

    def test_a_register_that_a_running_product_reads_is_noticed() -> None:
        product = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
        wait, write = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "HMUL2.BF16_V2 R5, R60, R61"
        other = write.replace("R5", "R8")
        assert set(hgmma.overwritten([product, write, wait])) == {write}
        assert hgmma.overwritten([product, wait, write]) == []
        assert hgmma.overwritten([product, other, wait]) == []
        # One may still run: that of this turn.
        some = wait.replace("0x0", "0x1")
        assert set(hgmma.overwritten([product, some, write])) == {write}

    def test_products_of_one_group_are_waited_for_together() -> None:
        first, last = (f"HGMMA.64x64x16.F32.BF16 R24, R{n}, gdesc[UR8], R24" for n in (4, 8))
        third, fourth = (line.replace("R4", "R12").replace("R8", "R16") for line in (first, last))
        groups = [first, f"{last}, gsb0", third, f"{fourth}, gsb0"]
        wait = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
        for register in (4, 8, 12, 16):
            write = f"HMUL2.BF16_V2 R{register + 3}, R60, R61"
            # All of the last group may still run, and none of the one before.
            found = hgmma.overwritten([*groups, wait, write])
            assert set(found) == ({write} if register >= 12 else set())
            assert set(hgmma.overwritten([*groups, write, wait])) == {write}
            none = hgmma.overwritten([*groups, wait.replace("0x1", "0x0"), write])
            assert none == []

    @pytest.mark.parametrize(("group", "kind"), [(32, ""), (16, ""), (32, "offset")])
    def test_a_product_is_waited_for_before_its_numbers_are_made_again(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
        group: int,
        kind: str,
    ) -> None:
        weight = unread_weight(4096, 4096, group, kind, 8)
        for rows in (64, 128):
            packed.packed_product(empty(rows, 4096), weight)
            packed.packed_gated_product(empty(rows, 4096), weight, "silu")
        for kernel in compiled:
            assert hgmma.PRODUCT.search("\n".join(hgmma.loop(kernel, tmp_path)))
            assert hgmma.overwritten(hgmma.loop(kernel, tmp_path)) == []

    @pytest.mark.parametrize(
        ("group", "kind", "bits"), [(32, "", 8), (128, "", 4), (32, "offset", 4)]
    )
    def test_one_row_has_asked_for_its_weight_before_it_waits(
        compiled: list[Any],  # noqa: F811
        tmp_path: Path,
        group: int,
        kind: str,
        bits: int,
    ) -> None:
        weight = unread_weight(4096, 4096, group, kind, bits)
        packed.packed_product(empty(1, 4096), weight, pdl=True)
        packed.packed_gated_product(empty(1, 4096), weight, "silu", pdl=True)
        for kernel in compiled:
            before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
            assert "evict_first" in before
            assert not CONVERSION.search(kernel.asm["ptx"])
            assert spilled_bytes(kernel, tmp_path) == 0

    def test_the_other_formats_compile(compiled: list[Any], tmp_path: Path) -> None:  # noqa: F811
        for group, kind, bits in ((128, "zero", 4), (32, "", 8), (16, "", 8)):
            weight = unread_weight(4096, 4096, group, kind, bits)
            for rows, dtype in ((1, BF16), (8, BF16), (8, torch.float16)):
                packed.packed_product(empty(rows, 4096, dtype=dtype), weight)
        packed.dequantise(unread_weight(4096, 4096, 128, "zero"), BF16)
        assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in compiled)

    def test_packed_products_compile_once_for_all_batches_of_one_tile(
        compiled: list[Any],  # noqa: F811
    ) -> None:
        o = unread_weight(4096, 4096)
        for rows in (9, 12, 16):
            packed.packed_product(empty(rows, 4096), o)
        assert len({kernel.hash for kernel in compiled}) == 1

    # ── inline assembly ─────────────────────────────────────────────────────────────────────

    CODES = (0x0123_4567, 0x89AB_CDEF, 0xF00F_807F, 0xFFFF_FFFF)

    @pytest.mark.parametrize("codes", CODES)
    def test_bytes_become_floats(codes: int) -> None:
        found = ptx.run(packed_codes.floats_asm(), 4, [codes])
        assert [ptx.to_float(bits) - 32768 for bits in found] == [
            codes >> 8 * n & 255 for n in range(4)
        ]

    @pytest.mark.parametrize("codes", CODES)
    def test_nibbles_become_floats_above_a_power_of_two(codes: int) -> None:
        found = [ptx.to_float(bits) for bits in ptx.run(packed_codes.floats_4_asm(), 8, [codes])]
        places = [(n, codes >> 16 * high + 4 * n & 15) for n in range(4) for high in range(2)]
        assert found == [(2048, 128)[n % 2] + code for n, code in places]

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize("kind", ["bf16", "f16"])
    def test_nibbles_become_whole_numbers(codes: int, kind: str) -> None:
        zeros = [0, 8, 15, 3]
        above = 128 if kind == "bf16" else 1024
        taken = [ptx.word(-above - zero, -above - zero, kind) for zero in zeros]
        found = ptx.run(packed_codes.whole_asm(kind), 4, [codes, *taken])
        for n, (bits, zero) in enumerate(zip(found, zeros, strict=True)):
            both = (codes >> 4 * n & 15, codes >> 16 + 4 * n & 15)
            assert ptx.halves(bits, kind) == [code - zero for code in both]

    @pytest.mark.parametrize("codes", CODES)
    @pytest.mark.parametrize("kind", ["bf16", "f16"])
    def test_bytes_become_scaled_numbers(codes: int, kind: str) -> None:
        factors, terms = [0.01, -0.5, 3.0, 0.0], [0.25, -1.0, 7.0, 1.5]
        given = [ptx.to_bits(value) for value in (*factors, *terms)]
        found = ptx.run(packed_codes.scaled_asm(kind), 2, [codes, *given])
        numbers = [number for word in found for number in ptx.halves(word, kind)]
        expected = [(codes >> 8 * n & 255) * factors[n] + terms[n] for n in range(4)]
        bound = 2.0**-8 if kind == "bf16" else 2.0**-10
        assert numbers == pytest.approx(expected, rel=bound)

    # ── rounding ────────────────────────────────────────────────────────────────────────────

    def test_a_matrix_is_rounded_better_than_without_a_search() -> None:
        torch.manual_seed(1)
        weight = torch.randn(64, 512)
        found = dequantised(pack(quantised(weight, 128)), torch.float32)
        error = float((found - weight).norm() / weight.norm())
        grouped = weight.view(64, 4, 128)
        unit = grouped.abs().amax(2, keepdim=True) / 7
        plain = float(((grouped / unit).round() * unit - grouped).norm() / weight.norm())
        assert error < 0.97 * plain
        assert error < 0.11

    def test_a_group_of_zeros_stays_zero_and_whole_numbers_stay() -> None:
        weight = torch.randint(-7, 8, (8, 256)).float()
        weight[:, 0] = -8
        weight[:, 128] = -8
        weight[3, 128:] = 0
        found = pack(quantised(weight, 128))
        assert found.num_bytes == 8 * (128 + 2 * 2)
        assert torch.equal(dequantised(found, torch.float32), weight)
