"""The comparisons of `cuda_check` on the CPU, with the reference kernels.

`tests/kernels/interpreted/test_executor.py` has them with interpreted Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.checked_kernels import CheckedKernels
from tests.equivalence.harness import small_spec
from tests.gpu import cuda_check
from tests.gpu.reference_check import SPECS


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """torch's own bf16 products: oneDNN's need a CPU with bf16 units, and where there are none it
    is asked for each, and says so with its call stack."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def test_every_way_to_schedule_equals_the_reference() -> None:
    spec = small_spec(**SPECS["qwen3"])
    found = cuda_check.compare_tokens("qwen3", spec, torch.device("cpu"))
    assert len(list(found)) == len(cuda_check.WAYS) + 1


@pytest.mark.parametrize("name", ["qwen3", "two groups"])
def test_every_step_of_a_forced_text_is_compared_in_bf16(name: str) -> None:
    spec = dict(cuda_check.small_models())[name]
    found = list(cuda_check.compare_logprobs(name, spec, torch.device("cpu")))
    assert len(found) == len(cuda_check.FORCED)
    assert all("100 steps" in said for said in found)


def test_a_wrong_position_makes_the_comparison_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: decode turns by one position too far."""
    attend = CheckedKernels.rope_decode_attention

    def shifted(self: CheckedKernels, *args: Any, **kwargs: Any) -> torch.Tensor:
        qkv, rope, positions, *others = args
        return attend(self, qkv, rope, positions + 1, *others, **kwargs)

    monkeypatch.setattr(CheckedKernels, "rope_decode_attention", shifted)
    spec = small_spec(**SPECS["qwen3"])
    with pytest.raises(AssertionError, match="of the reference's"):
        list(cuda_check.compare_logprobs("qwen3", spec, torch.device("cpu")))
