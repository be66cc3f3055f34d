"""Products with 16-bit and 32-bit weights by interpreted Triton kernels, against `definitions`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import cuda_cases as cases
from tests.kernels.cuda_cases import BOUNDS
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.records import DEFAULT_CONTEXT

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedSwiglu(limit=0.8)])
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(1, 65, 1024), (1, 7, 1536), (2, 9, 2048), (4, 33, 512), (5, 34, 256), (3, 20, 80)],
)
def test_products_equal_the_definition(
    rows: int, columns: int, inner: int, activation: Activation, dtype: torch.dtype
) -> None:
    error = cases.check_products(rows, columns, inner, CPU, dtype, activation, DEFAULT_CONTEXT)
    assert error < BOUNDS[dtype]
