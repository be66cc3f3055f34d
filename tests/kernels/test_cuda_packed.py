"""The Triton kernels of weights of 4 and 8 bits, compiled for an H200."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import hgmma, ptx
from tests.kernels.definitions import DEPENDENT
from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401
from twostroke.kernels.cuda import packed, packed_codes
from twostroke.kernels.packed import PackedWeight, dequantised, pack, packed_weight, quantised


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


@pytest.mark.full
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
        packed.packed_product(empty(rows, 4096), o, context=DEPENDENT)
    for rows in (9, 16):
        packed.packed_gated_product(empty(rows, 4096), gate_up, "silu", context=DEPENDENT)
    # Where `stream_k` has none.
    tuned = packed.choice(128, gate_up, gated=True)
    assert tuned is not None
    packed.run(empty(128, 4096), gate_up, tuned, "silu", DEPENDENT)
    for kernel in compiled:
        code = kernel.asm["ptx"]
        assert spilled_bytes(kernel, tmp_path) == 0
        assert kernel.metadata.shared <= 227 << 10
        assert "griddepcontrol.wait" in code
        assert not CONVERSION.search(code)
        # Codes go from shared memory to where the matrix units have them, without shuffles.
        assert "ldmatrix.sync" in code
        # Tiles of 32 columns have the instructions of all GPUs, of 64 Hopper's own.
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64|mma\.sync\.aligned\.m16n8k16", code)


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


@pytest.mark.full
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


@pytest.mark.parametrize(("group", "kind", "bits"), [(32, "", 8), (128, "", 4), (32, "offset", 4)])
def test_one_row_has_asked_for_its_weight_before_it_waits(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    group: int,
    kind: str,
    bits: int,
) -> None:
    weight = unread_weight(4096, 4096, group, kind, bits)
    packed.packed_product(empty(1, 4096), weight, context=DEPENDENT)
    packed.packed_gated_product(empty(1, 4096), weight, "silu", context=DEPENDENT)
    for kernel in compiled:
        before, _ = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert "evict_first" in before
        assert not CONVERSION.search(kernel.asm["ptx"])
        assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.full
def test_the_other_formats_compile(compiled: list[Any], tmp_path: Path) -> None:  # noqa: F811
    for group, kind, bits in ((128, "zero", 4), (32, "", 8), (16, "", 8)):
        weight = unread_weight(4096, 4096, group, kind, bits)
        for rows, dtype in ((1, BF16), (8, BF16), (8, torch.float16)):
            packed.packed_product(empty(rows, 4096, dtype=dtype), weight)
    packed.dequantise(unread_weight(4096, 4096, 128, "zero"), BF16)
    assert all(spilled_bytes(kernel, tmp_path) == 0 for kernel in compiled)


@pytest.mark.full
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
