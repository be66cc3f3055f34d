"""Norms, activations and copies of blocks by interpreted Triton kernels, against `definitions`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import cuda_cases as cases
from tests.kernels import definitions
from tests.kernels.cuda_cases import BOUNDS
from twostroke.kernels.activations import Activation, ClampedSwiglu
from twostroke.kernels.cuda.copy_blocks import copy_blocks

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32
CLAMPED = ClampedSwiglu(limit=0.8)


@pytest.mark.parametrize("num_words", [1, 4096, 5000])
@pytest.mark.parametrize("pairs", [[[3, 1]], [[0, 8], [5, 2], [5, 3]]])
def test_copy_blocks(num_words: int, pairs: list[list[int]]) -> None:
    source = torch.randint(-(2**62), 2**62, (6, num_words))
    target = torch.zeros(9, num_words, dtype=torch.int64)
    copy_blocks(source, target, torch.tensor(pairs))
    expected = torch.zeros_like(target)
    for there, here in pairs:
        expected[here] = source[there]
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("norm", [HALF, SINGLE])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 576), (3, 33)])
def test_norms_equal_the_definition(
    rows: int, width: int, norm: torch.dtype, dtype: torch.dtype
) -> None:
    bound = max(BOUNDS[dtype], BOUNDS[norm])
    assert cases.check_norms(rows, width, CPU, dtype, norm) < bound


def test_a_norm_in_fp32_is_rounded_once() -> None:
    """Weights of 1 + 2⁻¹¹ show it: rounded to fp16 they would be 1."""
    x = torch.randn(4, 256).half()
    weight = torch.full((256,), 1 + 2.0**-11)
    out = cases.cuda.rms_norm(x, weight, 1e-6)
    wide = x.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + 2.0**-11)
    assert (out == exact.half()).float().mean() > 0.99
    twice = definitions.rms_norm(x, weight.half(), 1e-6)
    assert (twice == exact.half()).float().mean() < 0.9


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", CLAMPED])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 576), (3, 33)])
def test_activations_equal_the_definition(
    rows: int, width: int, activation: Activation, dtype: torch.dtype
) -> None:
    assert cases.check_act_and_mul(rows, width, CPU, dtype, activation) < BOUNDS[dtype]


def test_activations_of_large_numbers_are_finite() -> None:
    gate = torch.tensor([-3e38, -1e5, -30.0, 0.0, 30.0, 1e5, 3e38])
    gate_up = torch.cat([gate, torch.ones(7)]).unsqueeze(0)
    right = torch.tensor([[0.0, 0.0, 0.0, 0.0, 30.0, 1e5, 3e38]])
    for activation in ("silu", "gelu_tanh", "gelu"):
        out = cases.cuda.act_and_mul(gate_up, activation)
        assert torch.allclose(out, right, atol=1e-11)
    gate_up[0, :2] = torch.tensor([float("nan"), -3e38])
    out = cases.cuda.act_and_mul(gate_up, CLAMPED)
    assert out[0, 0].isnan()
    right = definitions.act_and_mul(gate_up, CLAMPED)
    assert torch.allclose(out[:, 1:], right[:, 1:], atol=1e-11)
