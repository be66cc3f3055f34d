"""The bounds of an instruction set are computed on every machine, also where the set is missing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.reference_model import Reference
from tests.kernels.rounding_model import (
    Bf16Products,
    Fp16Products,
    Int8Attention,
    RoundingModel,
)
from tests.kernels.test_native_model import NAMES, spec_of
from tests.loud import Loud


@pytest.mark.parametrize("model", [Bf16Products, Fp16Products, Int8Attention])
@pytest.mark.parametrize("name", NAMES)
def test_a_rounding_model_errs_a_little(name: str, model: type[RoundingModel]) -> None:
    spec = spec_of(name)
    positions = np.arange(40, dtype=np.int32)
    step = positions % spec.vocab_size, np.zeros_like(positions), positions, positions
    expected = Reference(spec, Loud(spec)).logits(*step)
    rounded = model(spec, Loud(spec)).logits(*step)
    assert np.abs(rounded - expected).mean() > 1e-5 * np.abs(expected).mean()
    assert np.corrcoef(rounded.ravel(), expected.ravel())[0, 1] > 0.99
