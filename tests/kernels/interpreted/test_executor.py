"""Tokens of the whole executor with interpreted Triton kernels, against the reference's tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import cuda_check
from twostroke.kernels.cuda.backend import CudaKernels

MODELS = dict(cuda_check.small_models())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two groups", marks=pytest.mark.full),
        pytest.param("post norm, full q/k norm", marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_the_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[(7 * n * n + size) % 512 for n in range(size)] for size in (5, 30)]
    ways = {"chunked and mixed": {"max_num_batched_tokens": 20, "max_num_seqs": 2}}
    monkeypatch.setattr(cuda_check, "kernels_of", CudaKernels)
    monkeypatch.setattr(cuda_check, "PROMPTS", prompts)
    monkeypatch.setattr(cuda_check, "OUTPUT", 3)
    monkeypatch.setattr(cuda_check, "WAYS", ways)
    found = cuda_check.compare_tokens(name, MODELS[name], torch.device("cpu"), ways)
    assert list(found) == [f"{name}: chunked and mixed"]
