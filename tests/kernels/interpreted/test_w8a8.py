"""Products with weights in fp8 and int8 by interpreted Triton kernels, against wider products of
the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels.cuda_cases import BOUNDS, largest, poisoned, worst
from twostroke.kernels import cuda
from twostroke.kernels.cuda import tiles, w8a8
from twostroke.kernels.records import DEFAULT_CONTEXT
from twostroke.kernels.reference import Kernels
from twostroke.kernels.w8a8 import (
    E4M3,
    INT8,
    QuantizedActivations,
    W8Weight,
    dequantised,
    quantised,
    w8_weight,
)

HALF = torch.float16
TYPES = pytest.mark.parametrize("type", [E4M3, INT8], ids=str)


def random_weight(columns: int, inner: int, groups: int = 1, type: torch.dtype = E4M3) -> W8Weight:
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
        return w8a8.choose_tiling(rows, random_weight(80, inner, groups), gated, quantised=False)

    def streamed(inner: int, groups: int = 1, gated: bool = False) -> Any:
        return w8a8.choose_streaming(random_weight(2, inner, groups), gated)

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
    assert worst(w8a8.launch_streaming(x, weight, way, None, DEFAULT_CONTEXT), right) < BOUNDS[HALF]
    assert (
        worst(w8a8.launch_streaming(x, weight, way, "silu", DEFAULT_CONTEXT), gated)
        < 2 * BOUNDS[HALF]
    )


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
    rows8 = Kernels().quantise_activations(x, type)
    expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
    assert w8a8.choose_tiling(rows, weight, gated=False, quantised=True) is not None
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
    rows8 = Kernels().quantise_activations(torch.randn(rows, inner).to(HALF), INT8)
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
    rows8 = Kernels().quantise_activations(torch.randn(40, 256).to(HALF), INT8)
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
    rows8 = Kernels().quantise_activations(torch.randn(rows, 256).to(HALF), type)
    weight = random_weight(96, 256, type=type)
    given = (rows8, weight, "silu")
    wide = (rows8._replace(dtype=torch.float64), weight, "silu")
    expected = Kernels().w8a8_gated_product(*wide)
    library = rows == 200 and type == E4M3
    bound = BOUNDS[torch.bfloat16] if library else 2 * BOUNDS[HALF]
    assert worst(w8a8.w8a8_gated_product(*given), expected) < bound
    again = w8a8.w8a8_gated_product(*given, to=type)
    assert isinstance(again, QuantizedActivations)
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
        found = w8a8.quantised_act_and_mul(x, "silu", type)
        expected = Kernels().quantise_activations(Kernels().act_and_mul(x, "silu"), type)
    else:
        found, expected = (
            w8a8.quantise_activations(x, type),
            Kernels().quantise_activations(x, type),
        )
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
    expected = w8a8.quantise_activations(cuda.add_rms_norm(x, again, weight, 1e-5), type)
    assert torch.equal(found.values.float(), expected.values.float())
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(residual, again)
    assert found.dtype == HALF


@TYPES
def test_a_matrix_that_no_tile_and_no_library_takes(type: torch.dtype) -> None:
    x, weight = torch.randn(200, 104).to(HALF), random_weight(30, 104, type=type)
    rows8 = Kernels().quantise_activations(x, type)
    expected = Kernels().w8a8_product(rows8._replace(dtype=torch.float64), weight)
    assert worst(w8a8.w8a8_product(rows8, weight), expected) < BOUNDS[HALF]
