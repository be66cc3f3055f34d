"""The Triton kernels of experts, compiled for an H200."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.test_cuda_compiles import BF16, compiled, empty, spilled_bytes  # noqa: F401
from twostroke.kernels.activations import ClampedSwiglu
from twostroke.kernels.records import ExpertWeights, RoutingRule, StepContext


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 64, 1024, 4096])
def test_a_layer_of_qwen3_30b_a3b_compiles_and_fits_in_registers(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    tokens: int,
) -> None:
    from twostroke.kernels.cuda import experts as cuda

    rule = RoutingRule(8, "softmax", True, 1.0, 1, 1, "max")
    context = StepContext(tokens == 1)
    gate_up, down = empty(128, 1536, 2048), empty(128, 2048, 768)
    chosen, weights = cuda.route(empty(tokens, 128), None, None, rule, context)
    stacked = ExpertWeights(gate_up, None, down, None, "silu", True)
    cuda.mix_experts(empty(tokens, 2048), chosen, weights, stacked, context)
    tiled = ["sort", "grouped_matmul", "grouped_matmul", "combine"]
    names = ["route", *(["stream_up", "stream_down"] if tokens == 1 else tiled)]
    assert [kernel.metadata.name for kernel in compiled] == names
    products = [kernel for kernel in compiled if kernel.metadata.name == "grouped_matmul"]
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) == 0
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == context.dependent_launch
    for kernel in products:
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # sixteen bytes a thread
        assert ("wgmma" in kernel.asm["ptx"]) == (tokens >= 1024)
        if tokens < 1024:
            assert 2 * (kernel.metadata.shared + 1024) <= 228 << 10  # two on a multiprocessor


@pytest.mark.full
@pytest.mark.parametrize("tokens", [1, 1024])
def test_a_layer_of_gpt_oss_compiles_and_fits_in_registers(
    compiled: list[Any],  # noqa: F811
    tmp_path: Path,
    tokens: int,
) -> None:
    from twostroke.kernels.cuda import experts as cuda

    gate_up, down = empty(32, 5760, 2880), empty(32, 2880, 2880)
    chosen = torch.zeros(tokens, 4, dtype=torch.int32)
    weights = empty(tokens, 4, dtype=torch.float32)
    biases = empty(32, 5760), empty(32, 2880)
    stacked = ExpertWeights(gate_up, biases[0], down, biases[1], ClampedSwiglu(), True)
    cuda.mix_experts(empty(tokens, 2880), chosen, weights, stacked)
    for kernel in compiled:
        assert kernel.metadata.shared <= 227 << 10
        assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.full
def test_experts_compile_once_for_batches_of_one_tiling(
    compiled: list[Any],  # noqa: F811
) -> None:
    from twostroke.kernels.cuda import experts as cuda

    gate_up, down = empty(128, 1536, 2048), empty(128, 2048, 768)
    for tokens in (70, 90, 100):
        chosen = torch.zeros(tokens, 8, dtype=torch.int32)
        weights = empty(tokens, 8, dtype=torch.float32)
        stacked = ExpertWeights(gate_up, None, down, None, "silu", True)
        cuda.mix_experts(empty(tokens, 2048), chosen, weights, stacked)
    assert len(compiled) == 12
    assert len({kernel.hash for kernel in compiled}) == 4
