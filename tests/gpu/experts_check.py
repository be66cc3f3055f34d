"""The kernels of experts on a GPU: right in bf16, and how fast against the bytes they must read.

    python -m tests.gpu.experts_check [--no-times | --no-checks] [--limit-s 60]

A layer of Qwen3-30B-A3B: 128 experts of 768 channels, 8 a token, hidden 2048. Outputs are compared
with a plain loop over the experts in fp32. Times are those of a CUDA graph over four layers with
weights of their own, told for all 48, beside what the bytes of the experts in use (or at many
tokens the operations) take at the rates of `report.py`. Ends with a JSON line and how many passed;
exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import torch.nn.functional as F

from tests.gpu.report import FLOPS, READ, tally
from tests.kernels.cuda_cases import BOUNDS, worst
from tests.kernels.definitions import DEPENDENT
from twostroke.kernels.cuda import experts as cuda
from twostroke.kernels.records import DEFAULT_CONTEXT, ExpertWeights, RoutingRule, StepContext

HIDDEN, INNER, EXPERTS, EACH, LAYERS = 2048, 768, 128, 8, 48
OWN = 4  # layers with weights of their own: many times the L2
EXPERT_BYTES = 3 * INNER * HIDDEN * 2
RULE = RoutingRule(EACH, "softmax", True, 1.0, 1, 1, "max")
DEVICE = torch.device("cuda")

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_layer() -> Layer:
    """Router, gate and up, down."""
    shapes = ((EXPERTS, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    router, gate_up, down = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)
        for shape in shapes
    )
    return router, gate_up, down


def forward(x: torch.Tensor, layer: Layer, context: StepContext) -> torch.Tensor:
    router, gate_up, down = layer
    chosen, weights = cuda.route(F.linear(x, router), None, None, RULE, context)
    stacked = ExpertWeights(gate_up, None, down, None, "silu", True)
    return cuda.mix_experts(x, chosen, weights, stacked, context)


def plain(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    router, gate_up, down = layer
    scores, chosen = F.linear(x, router).float().softmax(-1).topk(EACH)
    scores = scores / scores.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, device=DEVICE)
    for expert in range(EXPERTS):
        token, which = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].float(), gate_up[expert].float()).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert].float())
        out.index_add_(0, token, part * scores[token, which, None])
    return out


def graph_us(run: Callable[[], object], rounds: int = 20) -> float:
    """The median time of one replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[rounds // 2]


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="checks only")
    parser.add_argument("--limit-s", type=float, default=60.0, help="after it nothing is timed")
    args = parser.parse_args()
    end = perf_counter() + args.limit_s
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = [random_layer() for _ in range(OWN)]
    errors, timings = {}, {}
    for tokens in () if args.no_checks else (1, 3, 17, 128, 200, 1024, 4096):
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        errors[tokens] = worst(forward(x, layers[0], DEFAULT_CONTEXT), plain(x, layers[0]))
        if tokens <= 64:
            again = worst(forward(x, layers[0], DEPENDENT), plain(x, layers[0]))
            errors[tokens] = max(errors[tokens], again)
    for tokens in () if args.no_times else (1, 8, 32, 128, 1024, 4096):
        if perf_counter() > end:
            break
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        run = lambda x=x: [forward(x, one, context=StepContext(len(x) <= 64)) for one in layers]  # noqa: E731
        us = graph_us(run) / OWN
        in_use = [
            len(set(F.linear(x, router).float().topk(EACH).indices.flatten().tolist()))
            for router, _, _ in layers
        ]
        read_us = 1e6 * sum(in_use) / OWN * EXPERT_BYTES / READ
        flops_us = 1e6 * tokens * EACH * EXPERT_BYTES / FLOPS  # 2 operations for 2 bytes
        timings[tokens] = {
            "layer_us": round(us, 1),
            "model_ms": round(us * LAYERS / 1e3, 2),
            "floor_us": round(max(read_us, flops_us), 1),
            "of_floor": round(max(read_us, flops_us) / us, 3),
        }
    wrong = [tokens for tokens, error in errors.items() if not error < BOUNDS[torch.bfloat16]]
    print(json.dumps({"errors": errors, "timings": timings, "wrong": wrong}))
    return tally(len(errors) - len(wrong) + len(timings), len(wrong))


if __name__ == "__main__":
    sys.exit(main())
