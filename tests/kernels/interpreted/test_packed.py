"""Products with weights of 4 and 8 bits by interpreted Triton kernels, against products of the same
numbers in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
from twostroke.kernels.cuda import packed
from twostroke.kernels.packed import Codes, PackedWeight, dequantised, pack
from twostroke.kernels.records import DEFAULT_CONTEXT

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
        tuned = packed.choose_streaming(weight, gated=activation is not None)
        assert tuned is not None
        assert packed.choice(1, weight, activation is not None) == tuned
        found = packed.launch_streaming(x, weight, tuned, activation, DEFAULT_CONTEXT)
        assert worst(found, expected) < 2 * BOUNDS[HALF]


@pytest.mark.parametrize(("group", "kind", "bits"), FORMATS)
def test_many_rows_have_the_weight_dequantised(
    monkeypatch: pytest.MonkeyPatch, group: int, kind: str, bits: int
) -> None:
    monkeypatch.setattr(packed, "MAX_TILED", {4: 2, 8: 2})
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
    assert (
        worst(packed.launch_streaming(x, weight, tuned, None, DEFAULT_CONTEXT), right)
        < BOUNDS[HALF]
    )


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
    assert worst(packed.launch_tiled(x, weight, tuned, None, DEFAULT_CONTEXT), right) < BOUNDS[HALF]
    assert (
        worst(packed.launch_tiled(x, weight, tuned, "silu", DEFAULT_CONTEXT), gated)
        < 2 * BOUNDS[HALF]
    )


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
