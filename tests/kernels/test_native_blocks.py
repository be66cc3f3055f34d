"""GGUF block types in every native format that holds them, and no other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.kernels.test_native import (
    BLOCK_TYPES,
    FORMAT_OF,
    RESIDUES,
    SCALES_AT,
    activations,
    assert_product,
    assert_tokens_do_not_see_each_other,
    blocks,
    each_isa,
    weights,
)
from twostroke.kernels import cpu
from twostroke.model.gguf.block_types import LAYOUTS, BlockType
from twostroke.model.gguf.dequant import dequantize
from twostroke.model.gguf.iq_grids import grid_of

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

# Smallest first.
FORMATS = ["q4", "q4t", "q4f", "q4ts", "q8", "q8f", "q8s", "q8m"]
HELD_IN = {
    BlockType.Q4_0: ["q4", "q4f", "q8", "q8f", "q8s", "q8m"],
    BlockType.Q4_1: ["q4", "q4f", "q8f", "q8m"],
    BlockType.Q5_0: ["q8", "q8f", "q8s", "q8m"],
    BlockType.Q5_1: ["q8f", "q8m"],
    BlockType.Q8_0: ["q8", "q8f", "q8s", "q8m"],
    BlockType.Q2_K: ["q8m"],
    BlockType.Q3_K: ["q8s", "q8m"],
    BlockType.Q4_K: ["q4f", "q8f", "q8m"],
    BlockType.Q5_K: ["q8f", "q8m"],
    BlockType.Q6_K: ["q8s", "q8m"],
    BlockType.IQ4_NL: ["q4t", "q4ts", "q8", "q8f", "q8s", "q8m"],
    BlockType.IQ4_XS: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.MXFP4: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.IQ3_S: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.IQ3_XXS: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.IQ2_XXS: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.IQ2_XS: ["q4ts", "q8s", "q8m"],
    BlockType.IQ2_S: ["q4ts", "q8s", "q8m"],
    BlockType.IQ1_S: ["q4t", "q4ts", "q8f", "q8s", "q8m"],
    BlockType.IQ1_M: ["q4ts", "q8s", "q8m"],
    BlockType.TQ1_0: ["q4t", "q4ts", "q8", "q8f", "q8s", "q8m"],
    BlockType.TQ2_0: ["q4t", "q4ts", "q8", "q8f", "q8s", "q8m"],
}
# Types with one letter choose their codes from the same table.
TABLES = {"IQ4_NL": "a", "IQ4_XS": "a", "MXFP4": "b", "IQ3_S": "c", "IQ3_XXS": "d"}
TABLES |= {"IQ2_XXS": "e", "IQ2_XS": "e", "IQ2_S": "e", "IQ1_S": "f", "IQ1_M": "f"}
TABLES |= {"TQ1_0": "g", "TQ2_0": "g"}
PAIRS = [(type, format) for type, formats in HELD_IN.items() for format in formats]

each_pair = pytest.mark.parametrize(("type", "format"), PAIRS, ids=str)


@each_isa
@each_pair
def test_a_format_that_holds_a_type_has_its_values_to_the_last_bit(
    type: BlockType, format: str, isa: str
) -> None:
    for rows in RESIDUES if type not in TABLES else (1, 7, 33):
        w = weights(type, isa, rows, 64, format=format)
        assert np.array_equal(w.unpacked(), w.values), rows


@each_isa
@each_pair
def test_a_format_that_holds_a_type_multiplies_it_as_float64_does(
    type: BlockType, format: str, isa: str
) -> None:
    for rows, tokens in ((1, 1), (7, 3), (17, 9), (40, 33)):
        w = weights(type, isa, rows, 300, biased=True, format=format)
        x = activations(tokens, w.values.shape[1])
        assert_product(w, x)
    assert_tokens_do_not_see_each_other(w, activations(70, w.values.shape[1]), "again")


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=str)
def test_other_formats_refuse_the_type(type: BlockType) -> None:
    raw = np.zeros((1, 256 // LAYOUTS[type].elements * LAYOUTS[type].num_bytes), np.uint8)
    halves_are_slow = matrix_bytes("q4") == matrix_bytes("q4f")
    for format in ("bf16", "f32", *FORMATS):
        if format in HELD_IN[type] or (format == "q4" and type == "Q4_K" and halves_are_slow):
            continue
        matrix = cpu.module().Matrix(format, 1, 256)
        with pytest.raises(ValueError, match="do not fit"):
            matrix.put_blocks(str(type), raw, np.zeros(1, np.int32), grid_of(type))


def matrix_bytes(format: str) -> int:
    return int(cpu.module().Matrix(format, 64, 256).num_bytes)


def test_formats_are_in_the_order_of_their_size() -> None:
    sizes = [matrix_bytes(format) for format in FORMATS]
    assert sizes[1:] == sorted(sizes[1:])  # the first is the third where halves are slow to read
    assert sizes[0] in (sizes[1], sizes[2])
    assert [size / (64 * 8) for size in sizes[1:]] == [20, 24, 24, 34, 40, 40, 48]


def test_types_that_stand_side_by_side_have_the_smallest_format_that_holds_all() -> None:
    for count in (1, 2, 3):
        for types in itertools.product(BLOCK_TYPES, repeat=count):
            formats = [f for f in FORMATS if all(f in HELD_IN[type] for type in types)]
            one_table = len({TABLES.get(type) for type in types}) == 1
            common = [f for f in formats if one_table or f not in ("q4t", "q4ts")]
            found = cpu.module().common_format([str(type) for type in types])
            assert found == common[0], types
    assert {t: cpu.module().common_format([str(t)]) for t in BLOCK_TYPES} == FORMAT_OF


MIXED = [("Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q4_1", "Q3_K", "Q5_0"), ("IQ4_NL", "IQ4_XS")]
MIXED += [("IQ4_XS", "Q6_K"), ("IQ2_XS", "IQ2_XXS"), ("IQ2_XXS", "IQ3_XXS"), ("MXFP4", "Q8_0")]


@each_isa
@pytest.mark.parametrize("types", MIXED)
def test_rows_of_different_types_in_one_matrix_keep_their_values(
    types: tuple[str, ...], isa: str
) -> None:
    random = np.random.default_rng(3)
    rows, cols = 21, 512
    places = random.permutation(rows * len(types)).astype(np.int32).reshape(len(types), rows)
    matrix = cpu.module().Matrix(cpu.module().common_format(list(types)), places.size, cols, isa)
    expected = np.empty((places.size, cols), np.float32)
    for name, place in zip(types, places, strict=True):
        raw = blocks(BlockType(name), rows, cols, random)
        matrix.put_blocks(name, raw, place, grid_of(BlockType(name)))
        expected[place] = dequantize(raw, BlockType(name), (rows, cols))
    out = np.empty_like(expected)
    matrix.rows(out, isa)
    assert np.array_equal(out, expected)


@each_isa
@pytest.mark.parametrize("type", BLOCK_TYPES, ids=str)
def test_a_row_that_is_put_again_has_only_its_new_values(type: BlockType, isa: str) -> None:
    random = np.random.default_rng(4)
    matrix = cpu.module().Matrix(FORMAT_OF[type], 5, 256, isa)
    places = np.arange(5, dtype=np.int32)
    for _ in range(2):
        raw = blocks(type, 5, 256, random)
        matrix.put_blocks(str(type), raw, places, grid_of(type))
    out = np.empty((5, 256), np.float32)
    matrix.rows(out, isa)
    assert np.array_equal(out, dequantize(raw, type, (5, 256)))


@each_isa
def test_scales_at_the_end_of_half_precision_are_right_or_refused(isa: str) -> None:
    """−8 times a Q4_0 scale above 8188 is no half."""
    raw = np.zeros((1, 18), np.uint8)
    raw[:, 2:] = np.arange(16) * 16 + 1
    native, place = cpu.module(), np.zeros(1, np.int32)
    for scale, format in itertools.product((8188.0, 8192.0, 65504.0), ("q4", "q4f")):
        raw[0, :2] = np.array([scale], np.float16).view(np.uint8)
        matrix = native.Matrix(format, 1, 32, isa)
        in_halves = matrix.num_bytes < native.Matrix("q4f", 1, 32, isa).num_bytes
        if scale > 8188 and in_halves:
            with pytest.raises(OverflowError, match="more than fp16 holds"):
                matrix.put_blocks("Q4_0", raw, place)
            continue
        matrix.put_blocks("Q4_0", raw, place)
        out = np.empty((1, 32), np.float32)
        matrix.rows(out, isa)
        assert np.array_equal(out, dequantize(raw, BlockType.Q4_0, (1, 32)))


@each_isa
@pytest.mark.parametrize("type", BLOCK_TYPES, ids=str)
def test_the_last_bit_of_a_scale_is_told_apart(type: BlockType, isa: str) -> None:
    """Negative control: equality to the last bit would notice one."""
    random = np.random.default_rng(6)
    raw = blocks(type, 3, 256, random)
    matrix = cpu.module().Matrix(FORMAT_OF[type], 3, 256, isa)
    changed = raw.copy()
    elements, size = LAYOUTS[type]
    changed.reshape(3, 256 // elements, size)[:, :, SCALES_AT[type][0]] ^= 1
    matrix.put_blocks(str(type), changed, np.arange(3, dtype=np.int32), grid_of(type))
    out = np.empty((3, 256), np.float32)
    matrix.rows(out, isa)
    assert not np.array_equal(out, dequantize(raw, type, (3, 256)))


def test_floats_are_rounded_only_to_the_formats_that_are_asked_for() -> None:
    dense = np.zeros((1, 32), np.float32)
    for format in ("q8f", "q8s", "q8m"):
        with pytest.raises(ValueError, match="not rounded"):
            cpu.module().Matrix(format, 1, 32).put_floats(dense, np.zeros(1, np.int32))


def test_a_matrix_has_one_table_and_a_type_its_own_grid() -> None:
    """Tables and grids that do not fit are refused: codes would be other numbers."""
    native, random, place = cpu.module(), np.random.default_rng(5), np.zeros(1, np.int32)
    matrix = native.Matrix("q4ts", 1, 256)
    out = np.full((1, 256), np.nan, np.float32)
    matrix.rows(out)
    assert not out.any()  # nothing has been put there yet
    raw = {t: blocks(BlockType(t), 1, 256, random) for t in ("IQ2_XXS", "IQ2_S", "IQ3_S")}
    matrix.put_blocks("IQ2_XXS", raw["IQ2_XXS"], place, grid_of(BlockType.IQ2_XXS))
    with pytest.raises(ValueError, match="the table of another type"):
        matrix.put_blocks("IQ3_S", raw["IQ3_S"], place, grid_of(BlockType.IQ3_S))
    for grid in (None, grid_of(BlockType.IQ2_XXS), grid_of(BlockType.IQ3_S)):
        with pytest.raises(ValueError, match="grid does not belong"):
            matrix.put_blocks("IQ2_S", raw["IQ2_S"], place, grid)
    with pytest.raises(ValueError, match="grid does not belong"):
        native.Matrix("q8", 1, 32).put_blocks("Q8_0", np.zeros((1, 34), np.uint8), place, grid)
