"""Sampling, adjusted logits and log-probabilities by interpreted Triton kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import cuda_cases as cases
from tests.kernels.interpreted.combinations import crossed
from twostroke.kernels.records import DrawParams

CPU = torch.device("cpu")
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(("vocab", "spread"), [(300, 1.0), (2048, 4.0), (9001, 0.05)])
def test_sampling_draws_what_the_reference_draws(vocab: int, spread: float) -> None:
    assert cases.check_sample(12, vocab, spread, CPU, SINGLE) == []


def test_sampling_among_fewer_tokens_than_top_k() -> None:
    assert cases.check_sample(12, 9, 1.0, CPU, SINGLE) == []


def test_of_equal_logits_the_first_are_kept() -> None:
    """More of them than there is room for candidates."""
    rows, k = 8, 20
    column = torch.ones(rows)
    keys = torch.arange(rows)
    limits = torch.full((rows,), k, dtype=torch.int32)
    logits = torch.zeros(rows, 3000)
    tokens = cases.cuda.sample(logits, DrawParams(column, limits, column, column * 0, keys, keys))
    assert int(tokens.max()) < k
    assert len(set(tokens.tolist())) > 3
    halved = cases.cuda.sample(
        logits, DrawParams(column, limits, column * 0.5, column * 0, keys, keys)
    )
    assert int(halved.max()) < k // 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_no_token_and_leave_the_other_rows_alone(
    bad: float, temperature: float
) -> None:
    logits = torch.randn(4, 3000)
    column, keys = torch.ones(4), torch.arange(4)
    limits = torch.tensor([0, 5, 5, 0], dtype=torch.int32)
    params = DrawParams(column * temperature, limits, column * 0.9, column * 0, keys, keys)
    healthy = cases.cuda.sample(logits, params).tolist()
    logits[1, 2999] = logits[3] = bad
    cells, write_at = torch.full((9,), 7, dtype=torch.int32), torch.tensor([8, 1, 3, 4])
    tokens = cases.cuda.sample(logits, params, cells=cells, write_at=write_at).tolist()
    assert tokens == [healthy[0], -1, healthy[2], -1]
    assert cells.tolist() == [7, 0, 7, healthy[2], 0, 7, 7, 7, healthy[0]]


@pytest.mark.parametrize(("vocab", "dtype"), crossed([300, 2049, 4128], [HALF, SINGLE], most=1))
def test_adjusted_logits_are_the_definitions_bit_for_bit(vocab: int, dtype: torch.dtype) -> None:
    assert cases.check_adjust(11, vocab, CPU, dtype) == (True, True, True)


@pytest.mark.parametrize(("vocab", "count"), [(300, 5), (5000, 20), (2048, 0), (80, 32)])
def test_logprobs_equal_the_definition(vocab: int, count: int) -> None:
    same, error = cases.check_logprobs(vocab, count, CPU, SINGLE)
    assert same
    assert error < 2e-6
