"""Products with matrices in fp16, on machines that compute in it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.native_pair import Pair, heads
from tests.kernels.rounding_model import FP16_ROUNDOFF, FP16_RUN_PRODUCT, sum_bound
from tests.kernels.test_native import (
    ISAS,
    RESIDUES,
    TOKENS,
    Floats,
    Weights,
    activations,
    assert_tokens_do_not_see_each_other,
    error_of,
)
from tests.kernels.test_native_model import STEPS, assert_exact, assert_near_the_reference
from tests.loud import Loud
from tests.specs import make_spec as small_spec
from twostroke.kernels import cpu
from twostroke.model.weights import ALL_ROWS

FP16_ISAS = [isa for isa in ISAS if cpu.module().has_fp16_products(isa)]

pytestmark = [
    pytest.mark.skipif(not FP16_ISAS, reason="no instruction set here multiplies fp16"),
    pytest.mark.parametrize("isa", FP16_ISAS),
]


def bfloat16(x: Floats) -> Floats:
    """To the nearest below: which of the two does not matter here."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def fp16_weights(
    isa: str, rows: int, cols: int, biased: bool = False, scale: float = 0.5
) -> Weights:
    random = np.random.default_rng([rows, cols])
    values = bfloat16(random.normal(0, scale, (rows, cols)).astype(np.float32))
    places = random.permutation(rows).astype(np.int32)
    matrix = cpu.module().Matrix("f16", rows, cols, isa)
    matrix.put_floats(values[places], places)
    bias = np.zeros(rows, np.float32)
    if biased:
        bias = random.normal(0, 2, rows).astype(np.float32)
        matrix.put_bias(bias[places], places)
    return Weights(matrix, isa, "f16", values, np.abs(values.astype(np.float64)), bias)


def assert_products(w: Weights, x: Floats) -> None:
    assert error_of(w, x, "exact") <= sum_bound(x.shape[1])
    assert error_of(w, x, "rounded") <= sum_bound(FP16_RUN_PRODUCT + 1, FP16_ROUNDOFF)


def test_bfloat16_is_held_exactly(isa: str) -> None:
    for n in RESIDUES:
        for w in (fp16_weights(isa, n, 64), fp16_weights(isa, 5, n)):
            assert np.array_equal(w.unpacked(), w.values), n


def test_the_smallest_weights_lose_their_last_bits_only(isa: str) -> None:
    w = fp16_weights(isa, 16, 64, scale=1e-8)
    assert np.abs(w.unpacked() - w.values).max() <= 2.0**-33


def test_products_equal_float64_for_every_number_of_rows_and_columns(isa: str) -> None:
    for n in RESIDUES:
        assert_products(fp16_weights(isa, n, 96), activations(3, 96))
        assert_products(fp16_weights(isa, 9, n, biased=True), activations(17, n))


def test_products_equal_float64_for_every_number_of_tokens(isa: str) -> None:
    for tokens in TOKENS:
        assert_products(fp16_weights(isa, 40, 576, biased=True), activations(tokens, 576))


def test_a_token_has_the_same_bits_whoever_is_with_it(isa: str) -> None:
    assert_tokens_do_not_see_each_other(fp16_weights(isa, 37, 300), activations(70, 300), "rounded")


def test_sums_of_the_largest_numbers_stay_in_range(isa: str) -> None:
    """All of one sign, weights at the end of the range of fp16: nothing cancels."""
    matrix = cpu.module().Matrix("f16", 8, 64, isa)
    matrix.put_floats(np.full((8, 64), 255, np.float32), np.arange(8, dtype=np.int32))
    for size in (1e-30, 1.0, 1e30):
        for tokens in (1, 20):
            out = np.empty((tokens, 8), np.float32)
            matrix.multiply(np.full((tokens, 64), size, np.float32), out, isa)
            assert np.allclose(out, 64 * 255 * size, rtol=8e-3)


def test_other_instruction_sets_say_that_they_have_no_such_products(isa: str) -> None:
    for other in set(ISAS) - set(FP16_ISAS):
        with pytest.raises(ValueError, match="no matmul for this format"):
            cpu.module().Matrix("f16", 8, 32, other)


class Rounded(Loud):
    """Weights rounded to bfloat16, as in a file."""

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        weight = super().floats(name, rows)
        return bfloat16(weight) if weight.ndim == 2 else weight


SPECS = {
    "plain": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "head_dim_64": heads(2, 1, 64),
    "inner_50": {"intermediate_size": 50},
    "hidden_50_vocabulary_301": {"hidden_size": 50, "vocab_size": 301},
}


@pytest.mark.parametrize("name", SPECS)
def test_models_in_fp16_give_the_logits_of_the_reference(name: str, isa: str) -> None:
    spec = small_spec(**SPECS[name])
    exact = Pair(spec, isa, source=Rounded(spec), dtype="bfloat16")
    assert_exact(exact)
    rounded = Pair(spec, isa, exact=False, source=Rounded(spec), dtype="bfloat16")
    assert_near_the_reference(rounded)


def test_a_prompt_in_fp16_has_the_same_bits_whoever_is_with_it(isa: str) -> None:
    spec = small_spec()
    pair = Pair(spec, isa, exact=False, source=Rounded(spec), dtype="bfloat16")
    alone = [pair.step((), [(0, 0, 40)]), pair.step((), [(1, 0, 3)]), pair.step((), [(2, 0, 90)])]
    together = pair.step((), [(0, 0, 40), (1, 0, 3), (2, 0, 90)])
    assert np.array_equal(np.concatenate(alone), together)


def test_a_model_with_a_weight_that_fp16_cannot_hold_runs_all_the_same(isa: str) -> None:
    class Outlier(Rounded):
        def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
            weight = super().floats(name, rows)
            if name == "layers.1.down":
                weight = weight.copy()
                weight[0, 0] = 300
            return weight

    spec = small_spec()
    pair = Pair(spec, isa, source=Outlier(spec), dtype="bfloat16")
    assert max(pair.difference(*step) for step in STEPS["mixed"]) <= pair.tolerance
