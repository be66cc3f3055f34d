"""What `cuda_check` does on a GPU, done on the CPU: the script stays right, and where Triton can
interpret its kernels, those write the reference's tokens through the whole executor."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checked_kernels import CheckedKernels
from tests.equivalence.harness import small_spec
from tests.gpu import cuda_check
from tests.gpu.reference_check import SPECS

ROOT = Path(__file__).parents[2]
INTERPRETED = """
import torch
import tests.kernels.interpreted
from tests.gpu import cuda_check
from twostroke.kernels.cuda.backend import CudaKernels
cuda_check.kernels_of = CudaKernels
cuda_check.PROMPTS = [[(7 * n * n + size) % 512 for n in range(size)] for size in (5, 30)]
cuda_check.OUTPUT = 6
cuda_check.WAYS = {"chunked and mixed": {"max_num_batched_tokens": 20, "max_num_seqs": 2}}
models = dict(cuda_check.small_models())
for name in ("two groups", "post norm, full q/k norm"):
    for passed in cuda_check.compare_tokens(name, models[name], torch.device("cpu")):
        print("equal:", passed)
"""


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
        return attend(self, *args[:6], args[6] + 1, *args[7:], **kwargs)

    monkeypatch.setattr(CheckedKernels, "rope_decode_attention", shifted)
    spec = small_spec(**SPECS["qwen3"])
    with pytest.raises(AssertionError, match="of the reference's"):
        list(cuda_check.compare_logprobs("qwen3", spec, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("triton") or not (ROOT / "twostroke/kernels/cuda").is_dir(),
    reason="needs Triton and its kernels",
)
def test_the_triton_kernels_interpreted_write_the_reference_tokens() -> None:
    """In a process of its own: Triton decides at its import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal:") == 2 * 2
