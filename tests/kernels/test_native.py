"""The native products: packed weights hold what they should, and are multiplied as they should be.

The definition is float64 numpy over the weights as `model/gguf/dequant.py` reads them. Bounds are
stated against the largest number that a sum could pass through, so that they hold for any values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels.rounding_model import sum_bound
from tests.model.gguf.gguf_files import SCALES_AT as OTHER_SCALES_AT
from tests.model.gguf.gguf_files import put_scales
from tests.support import round_to_bf16
from twostroke.kernels import cpu
from twostroke.model.gguf.block_types import LAYOUTS, BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.gguf.iq_grids import grid_of

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

ISAS = cpu.module().isas() if cpu.available() else []
FORMAT_OF = {  # block types are packed as the file has them
    BlockType.Q4_0: "q4",
    BlockType.Q4_1: "q4",
    BlockType.Q5_0: "q8",
    BlockType.Q5_1: "q8f",
    BlockType.Q8_0: "q8",
    BlockType.Q2_K: "q8m",
    BlockType.Q3_K: "q8s",
    BlockType.Q4_K: "q4f",
    BlockType.Q5_K: "q8f",
    BlockType.Q6_K: "q8s",
    BlockType.IQ4_NL: "q4t",
    BlockType.IQ4_XS: "q4t",
    BlockType.MXFP4: "q4t",
    BlockType.IQ3_S: "q4t",
    BlockType.IQ3_XXS: "q4t",
    BlockType.IQ2_XXS: "q4t",
    BlockType.IQ2_XS: "q4ts",
    BlockType.IQ2_S: "q4ts",
    BlockType.IQ1_S: "q4t",
    BlockType.IQ1_M: "q4ts",
    BlockType.TQ1_0: "q4t",
    BlockType.TQ2_0: "q4t",
}
BLOCK_TYPES = list(FORMAT_OF)
SCALES_AT = {type: (0, 2) if type.endswith("_1") else (0,) for type in BLOCK_TYPES}
SCALES_AT |= OTHER_SCALES_AT
FLOAT_FORMATS = ["q8", "q4", "bf16", "f32"]  # packed from floats
ALL_KINDS = [*BLOCK_TYPES, *FLOAT_FORMATS]
# Types that differ from another one only in how a file has them: `test_native_blocks.py` is enough.
READ_ALIKE = {t for t in BLOCK_TYPES if "q4t" in FORMAT_OF[t]} - {"IQ4_NL", "IQ4_XS", "IQ2_XS"}
KINDS = [kind for kind in ALL_KINDS if kind not in READ_ALIKE]
TOKENS = [*range(1, 10), 16, 17, 33, 70]
WAYS = ["exact", "rounded", "residual"]
RESIDUES = range(1, 34)  # every remainder of 16 and of 32, and one beyond


def product_bound(format: str, cols: int) -> float:
    """Return the largest error in parts of a sum's reach, Σ |x| · (the largest |w| its block could
    hold). Floats are added one by one. Codes are added exactly in blocks of 32, whose scales and
    offsets are applied in fp32: four roundings a block."""
    return sum_bound(cols if format in ("f32", "bf16") else 4 * -(-cols // 32))


Floats = npt.NDArray[np.float32]


@dataclass
class Weights:
    """A packed matrix, and what it should hold."""

    matrix: object
    isa: str
    format: str
    values: Floats  # [rows, cols]
    reach: npt.NDArray[np.float64]  # [rows, cols]: the largest that a weight of this block can be
    bias: Floats  # [rows], or zeros

    def multiply(self, x: Floats, way: str) -> Floats:
        out = np.full((len(x), len(self.values)), np.nan, np.float32)
        self.matrix.multiply(  # type: ignore[attr-defined]
            np.ascontiguousarray(x),
            out,
            self.isa,
            exact=way == "exact",
            with_residual=way == "residual",
        )
        return out

    def unpacked(self) -> Floats:
        out = np.full(self.values.shape, np.nan, np.float32)
        self.matrix.rows(out, self.isa)  # type: ignore[attr-defined]
        return out


def weights(
    kind: str,
    isa: str,
    rows: int,
    cols: int,
    biased: bool = False,
    seed: int = 0,
    format: str | None = None,
) -> Weights:
    """At least so many columns: block types have whole blocks."""
    random = np.random.default_rng([seed, rows, cols, ALL_KINDS.index(kind)])
    places = random.permutation(rows).astype(np.int32)
    format = format or FORMAT_OF.get(kind, kind)  # type: ignore[call-overload]
    cols = whole_blocks(kind, cols)
    matrix = cpu.module().Matrix(format, rows, cols, isa)
    if kind in BLOCK_TYPES:
        raw = blocks(BlockType(kind), rows, cols, random)
        values = dequantize(raw, BlockType(kind), (rows, cols))
        matrix.put_blocks(str(kind), raw[places], places, grid_of(BlockType(kind)))
    else:
        dense = random.normal(0, 0.5, (rows, cols)).astype(np.float32)
        values = packed_values(format, dense)
        matrix.put_floats(dense[places], places)
    bias = np.zeros(rows, np.float32)
    if biased:
        bias = random.normal(0, 2, rows).astype(np.float32)
        matrix.put_bias(bias[places], places)
    return Weights(matrix, isa, format, values, reach_of(format, values), bias)


def whole_blocks(kind: str, cols: int) -> int:
    size = LAYOUTS[BlockType(kind)].elements if kind in BLOCK_TYPES else 1
    return -(-cols // size) * size


def blocks(
    type: BlockType, rows: int, cols: int, random: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """Any codes; scales of either sign, of which some are 0 or too small for a normal half."""
    elements, size = LAYOUTS[type]
    raw = random.integers(0, 256, (rows, cols // elements, size), np.uint8)
    for at in SCALES_AT[type]:
        scales = random.normal(0, 0.05, raw.shape[:2]).astype(np.float16)
        odd = random.random(scales.shape)
        scales[odd < 0.05] = 0
        scales[odd > 0.95] = np.float16(3e-6)
        put_scales(raw, type, at, scales)
    return raw.reshape(rows, -1)


def packed_values(format: str, dense: Floats) -> Floats:
    """Round floats to a format: the definition of `native/src/pack.cpp`."""
    if format == "f32":
        return dense
    if format == "bf16":
        return round_to_bf16(dense)
    parts = in_blocks(dense)
    if format == "q8":
        scale = halved(np.abs(parts).max(-1, keepdims=True) / np.float32(127))
        code = np.clip(np.rint(parts / scale), -127, 127)
        values = scale * code
    else:  # a block's range takes in 0
        least = halved(np.minimum(parts.min(-1, keepdims=True), 0))
        most = np.maximum(parts.max(-1, keepdims=True), 0)
        scale = halved((most - np.minimum(parts.min(-1, keepdims=True), 0)) / np.float32(15))
        code = np.clip(np.rint((parts - least) / scale), 0, 15)
        values = scale * code + least
    return values.reshape(len(dense), -1)[:, : dense.shape[1]].astype(np.float32)


def halved(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def in_blocks(x: npt.NDArray) -> npt.NDArray:
    """[rows, cols] → [rows, blocks, 32], zeros behind."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))
    return padded.reshape(len(x), -1, 32)


def reach_of(format: str, values: Floats) -> npt.NDArray[np.float64]:
    """Sums over codes pass through larger numbers than the weights: 4-bit codes are taken from 0
    and shifted afterwards, 8-bit ones on some machines from 128."""
    if format in ("bf16", "f32"):
        return np.abs(values.astype(np.float64))
    largest = np.abs(in_blocks(values)).max(-1, keepdims=True).astype(np.float64)
    reach = np.broadcast_to(3 * largest, in_blocks(values).shape)
    return reach.reshape(len(values), -1)[:, : values.shape[1]]


def activations(tokens: int, cols: int, seed: int = 0) -> Floats:
    """No value lies so near the middle between two codes that rounding `x / scale` would decide,
    nor does what is left of it."""
    random = np.random.default_rng([seed, tokens, cols])
    x = random.normal(0, 1, (tokens, cols)).astype(np.float32)
    x *= random.uniform(0.01, 30, (tokens, 1)).astype(np.float32)
    for _ in range(50):
        parts = in_blocks(x)
        scale, code = codes_of(parts)
        near = is_near_the_middle(parts, scale)
        rest = rest_of(parts, scale, code)
        near[coarsest(scale)] |= is_near_the_middle(rest, codes_of(rest)[0])
        if not near.any():
            return x
        x[near.reshape(tokens, -1)[:, :cols]] = 0
    raise AssertionError("there are always some")


def codes_of(parts: Floats) -> tuple[Floats, Floats]:
    """Scales and codes, before these are rounded."""
    scale = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
    return scale, parts * (np.float32(1) / np.where(scale > 0, scale, np.float32(1)))


def is_near_the_middle(parts: Floats, scale: Floats) -> npt.NDArray[np.bool_]:
    code = parts / np.where(scale > 0, scale, np.float32(1))
    return np.abs(np.abs(code - np.floor(code)) - 0.5) < 1e-3


def coarsest(scale: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the indices of each token's block with the largest scale."""
    return np.arange(len(scale)), scale[..., 0].argmax(1)


def rest_of(parts: Floats, scale: Floats, code: Floats) -> Floats:
    """Return the parts of the coarsest block that its codes do not represent."""
    seen = scale.astype(np.float64) * np.rint(code)
    return (parts - seen)[coarsest(scale)].astype(np.float32)


def rounded(x: Floats, with_residual: bool = False) -> npt.NDArray[np.float64]:
    """Activations as products see them: whole numbers of a 127th of the block's largest.
    `with_residual`: and what that leaves of the coarsest block, likewise."""
    parts = in_blocks(x)
    scale, code = codes_of(parts)
    seen = scale.astype(np.float64) * np.rint(code)
    if with_residual:
        rest_scale, rest_code = codes_of(rest_of(parts, scale, code))
        seen[coarsest(scale)] += rest_scale.astype(np.float64) * np.rint(rest_code)
    return seen.reshape(len(x), -1)[:, : x.shape[1]]


def error_of(w: Weights, x: Floats, way: str) -> float:
    """The largest error of a product, in parts of its reach."""
    seen = x.astype(np.float64)
    if way != "exact" and w.format not in ("bf16", "f16", "f32"):
        seen = rounded(x, way == "residual")
    expected = seen @ w.values.astype(np.float64).T + w.bias
    reach = np.abs(seen) @ w.reach.T + np.abs(w.bias) + 1e-30
    got = w.multiply(x, way)
    assert np.isfinite(got).all()
    return float((np.abs(got - expected) / reach).max())


def assert_product(w: Weights, x: Floats) -> None:
    for way in WAYS:
        assert error_of(w, x, way) <= product_bound(w.format, x.shape[1]), way


each_isa = pytest.mark.parametrize("isa", ISAS)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


# What a matrix holds


@each_isa
@each_kind
def test_packed_rows_hold_exactly_the_values_of_the_file(kind: str, isa: str) -> None:
    for rows in RESIDUES:
        w = weights(kind, isa, rows, 64)
        assert np.array_equal(w.unpacked(), w.values), rows


@each_isa
@pytest.mark.parametrize("format", FLOAT_FORMATS)
def test_floats_of_any_row_length_are_packed_to_the_nearest_value(format: str, isa: str) -> None:
    for cols in RESIDUES:
        w = weights(format, isa, 5, cols)
        assert np.array_equal(w.unpacked(), w.values), cols


@each_isa
@pytest.mark.parametrize(("format", "codes"), [("q8", 254), ("q4", 15)])
def test_quantised_floats_are_off_by_at_most_half_a_step(format: str, codes: int, isa: str) -> None:
    """A step is the range of a block over its codes; the scale as a half adds one part in 2^11."""
    dense = np.random.default_rng(1).normal(0, 1, (48, 256)).astype(np.float32)
    matrix = cpu.module().Matrix(format, 48, 256, isa)
    matrix.put_floats(dense, np.arange(48, dtype=np.int32))
    out = np.empty_like(dense)
    matrix.rows(out, isa)
    parts = in_blocks(dense)
    spread = parts.max(-1) - parts.min(-1) if format == "q4" else 2 * np.abs(parts).max(-1)
    step = (spread / codes)[..., None]
    assert np.abs(in_blocks(out) - parts).max() > 0
    assert (np.abs(in_blocks(out) - parts) <= step * (0.5 + codes * 2.0**-10)).all()


@each_isa
def test_a_row_of_zeros_stays_zero_in_every_format(isa: str) -> None:
    x = activations(9, 40)
    for format in FLOAT_FORMATS:
        matrix = cpu.module().Matrix(format, 3, 40, isa)
        matrix.put_floats(np.zeros((2, 40), np.float32), np.array([0, 2], np.int32))
        out = np.full((9, 3), np.nan, np.float32)
        matrix.multiply(x, out, isa, False)
        assert np.array_equal(out, np.zeros_like(out)), format


# Products


@each_isa
@each_kind
def test_products_equal_float64_for_every_number_of_rows(kind: str, isa: str) -> None:
    x = activations(3, whole_blocks(kind, 96))
    for rows in RESIDUES:
        assert_product(weights(kind, isa, rows, 96), x)


@each_isa
@pytest.mark.parametrize("format", FLOAT_FORMATS)
def test_products_equal_float64_for_every_number_of_columns(format: str, isa: str) -> None:
    for cols in RESIDUES:
        assert_product(weights(format, isa, 5, cols, biased=True), activations(10, cols))


@each_isa
@each_kind
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_products_equal_float64_for_every_number_of_tokens(
    kind: str, biased: bool, isa: str
) -> None:
    w = weights(kind, isa, 37, 96, biased)
    for tokens in TOKENS:
        assert_product(w, activations(tokens, w.values.shape[1]))


@each_isa
def test_products_of_random_shapes_equal_float64(isa: str) -> None:
    random = np.random.default_rng(5)
    for seed in range(4 * len(KINDS)):
        kind = KINDS[seed % len(KINDS)]
        rows, cols = int(random.integers(1, 200)), whole_blocks(kind, int(random.integers(1, 1200)))
        w = weights(kind, isa, rows, cols, bool(random.integers(2)), seed)
        assert_product(w, activations(int(random.choice(TOKENS)), cols, seed))


@each_isa
@pytest.mark.parametrize("kind", [BlockType.Q4_1, BlockType.Q8_0, BlockType.Q2_K], ids=str)
@pytest.mark.parametrize("cols", [512 * 32, 520 * 32])
def test_rows_too_long_for_one_panel_or_to_be_kept_unpacked_are_multiplied_the_same(
    cols: int, kind: str, isa: str
) -> None:
    w, x = weights(kind, isa, 9, cols), activations(70, cols)
    assert_product(w, x)
    assert_tokens_do_not_see_each_other(w, x, "rounded")


@each_isa
@each_kind
@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_the_same_product_to_the_bit_whoever_is_with_it(
    kind: str, way: str, isa: str
) -> None:
    w = weights(kind, isa, 45, 160, biased=True)
    assert_tokens_do_not_see_each_other(w, activations(70, w.values.shape[1]), way)


def assert_tokens_do_not_see_each_other(w: Weights, x: Floats, way: str) -> None:
    whole = w.multiply(x, way)
    for tokens in TOKENS:
        first = len(x) - tokens
        for part in (
            slice(0, tokens),
            slice(first, len(x)),
            slice(first // 2, first // 2 + tokens),
        ):
            assert np.array_equal(w.multiply(x[part], way), whole[part]), (tokens, part)


@each_isa
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in BLOCK_TYPES], ids=str)
def test_the_coarsest_block_once_more_takes_off_what_an_outlier_costs(kind: str, isa: str) -> None:
    w = weights(kind, isa, 45, 512)
    x = activations(9, w.values.shape[1])
    x[:, 100] = 40 * np.abs(x).max(1)
    exact = x.astype(np.float64) @ w.values.astype(np.float64).T + w.bias
    off = {way: float(np.square(w.multiply(x, way) - exact).sum()) for way in WAYS[1:]}
    assert off["residual"] < 0.02 * off["rounded"]


@each_isa
def test_a_half_is_rounded_to_the_even_code(isa: str) -> None:
    """Row k of the matrix is 1 at column k; 127 makes the block's scale 1."""
    raw = np.zeros((32, 34), np.uint8)
    raw[:, :2] = np.full((32, 1), 1, np.float16).view(np.uint8)
    raw[np.arange(32), 2 + np.arange(32)] = 1
    matrix = cpu.module().Matrix("q8", 32, 32, isa)
    matrix.put_blocks("Q8_0", raw, np.arange(32, dtype=np.int32))
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]
    out = np.empty((1, 32), np.float32)
    matrix.multiply(x, out, isa, False)
    assert out[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@each_isa
@each_kind
def test_the_largest_codes_and_activations_overflow_nothing(kind: str, isa: str) -> None:
    """All weights and all activations at one end of their range: the largest sums there are."""
    for sign in (1, -1):
        for fill in (0x00, 0x7F, 0x80, 0x81, 0xFF):
            matrix = cpu.module().Matrix(FORMAT_OF.get(kind, kind), 4, 256, isa)  # type: ignore[call-overload]
            places = np.arange(4, dtype=np.int32)
            if kind in BLOCK_TYPES:
                type = BlockType(kind)
                elements, size = LAYOUTS[type]
                raw = np.full((4, 256 // elements, size), fill, np.uint8)
                for at, scale in zip(SCALES_AT[type], (0.5, 0.25), strict=False):
                    put_scales(raw, type, at, np.full(raw.shape[:2], scale, np.float16))
                values = dequantize(raw.reshape(4, -1), type, (4, 256))
                matrix.put_blocks(str(kind), raw.reshape(4, -1), places, grid_of(type))
            else:
                values = np.full((4, 256), fill - 128, np.float32)
                matrix.put_floats(values, places)
            x = np.full((9, 256), sign * 127, np.float32)
            out = np.empty((9, 4), np.float32)
            for exact in (True, False):
                matrix.multiply(x, out, isa, exact)
                expected = x.astype(np.float64) @ values.astype(np.float64).T
                np.testing.assert_allclose(out, expected, rtol=2e-3, atol=1e-3)


@each_isa
def test_activations_of_zero_and_of_hardly_anything_give_nothing(isa: str) -> None:
    for kind in KINDS:
        w = weights(kind, isa, 8, 64)
        for value in (0.0, 1e-44, 1e-39, 1e-37):
            got = w.multiply(np.full((9, w.values.shape[1]), value, np.float32), "rounded")
            assert np.abs(got).max() < 1e-28, (kind, value)


# Mistakes


@each_isa
@each_kind
def test_one_code_that_differs_is_told_apart(kind: str, isa: str) -> None:
    """Negative control: the bounds are far below the least change that a file can have."""
    w = weights(kind, isa, 20, 96)
    x = activations(5, w.values.shape[1])
    assert_product(w, x)
    row, col = np.argwhere(np.abs(w.values) > 0.05)[7]
    w.values[row, col] *= np.float32(0.9)
    for way in WAYS:
        assert error_of(w, x, way) > 5 * product_bound(w.format, x.shape[1]), way
    assert not np.array_equal(w.unpacked(), w.values)


@each_isa
def test_a_matrix_refuses_what_does_not_fit_it(isa: str) -> None:
    native = cpu.module()
    places = np.arange(4, dtype=np.int32)
    q8 = native.Matrix("q8", 4, 64, isa)
    blocks_of_q8 = np.zeros((4, 68), np.uint8)
    dense = np.zeros((4, 64), np.float32)
    refused = [
        (lambda: native.Matrix("q5", 4, 64, isa), "there is no format 'q5'"),
        (lambda: native.Matrix("q8", 0, 64, isa), "rows and columns"),
        (lambda: native.Matrix("q8", 4, 64, "mmx"), "no kernels for 'mmx'"),
        (lambda: q8.put_blocks("Q4_1", np.zeros((4, 40), np.uint8), places), "do not fit"),
        (lambda: q8.put_blocks("Q4_2", blocks_of_q8, places), "no block type is called 'Q4_2'"),
        (lambda: q8.put_blocks("Q8_0", blocks_of_q8[:, :34].copy(), places), "do not hold"),
        (lambda: q8.put_blocks("Q8_0", blocks_of_q8, places[:3]), "every row needs a place"),
        (lambda: q8.put_blocks("Q8_0", blocks_of_q8, places + 1), "place of a row is outside"),
        (lambda: q8.put_floats(dense, places - 1), "place of a row is outside"),
        (lambda: q8.put_floats(dense[:, :32].copy(), places), "rows have another length"),
        (lambda: q8.put_bias(np.zeros(4, np.float32), places * 2), "place of a row is outside"),
        (lambda: q8.multiply(dense[:, :32].copy(), dense, isa), "another shape"),
        (lambda: q8.multiply(dense, np.zeros((4, 5), np.float32), isa), "another shape"),
        (lambda: q8.rows(np.zeros((4, 63), np.float32), isa), "another shape"),
    ]
    for wrong, words in refused:
        with pytest.raises(ValueError, match=words):
            wrong()
    for wrong_type in (
        lambda: q8.put_floats(dense[0], places),
        lambda: q8.put_floats(dense, places.reshape(2, 2)),
        lambda: q8.put_floats(None, places),
        lambda: q8.multiply(dense, None, isa),
    ):
        with pytest.raises(TypeError):
            wrong_type()


def read_only(a: Floats) -> Floats:
    a.flags.writeable = False
    return a


@each_isa
@pytest.mark.parametrize(
    "out",
    [
        np.zeros((2, 4), np.float64),
        np.zeros((2, 4), np.int32),
        np.zeros((4, 2), np.float32).T,
        np.zeros((2, 8), np.float32)[:, ::2],
        read_only(np.zeros((2, 4), np.float32)),
    ],
    ids=["float64", "int32", "transposed", "apart", "read_only"],
)
def test_results_are_never_written_into_a_copy_that_nobody_sees(out: Floats, isa: str) -> None:
    matrix = cpu.module().Matrix("f32", 4, 8, isa)
    matrix.put_floats(np.ones((4, 8), np.float32), np.arange(4, dtype=np.int32))
    with pytest.raises(TypeError):
        matrix.multiply(np.ones((2, 8), np.float32), out, isa)
    assert not out.any()
