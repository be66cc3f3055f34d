"""The CUDA backend against the reference backend: same device, same weights, every way to schedule.

    python -m tests.gpu.cuda_check [--quick] [--device cuda]

In fp32 the tokens are the same up to the engine's own tolerance (`tests.equivalence.harness`). In
bf16 two candidates are too often too close for that: there the log-probabilities are compared, for
as long as the tokens are the same. On a CPU (`--device cpu`) the fused kernels are those of
`tests.fused`. Ends with one JSON line; exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests import fused
from tests.equivalence.harness import Loud, Written, assert_same, make_core, run, small_spec
from tests.gpu.reference_check import OUTPUT, PROMPTS, SPECS
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble_fused
from twostroke.engine.core import EngineCore
from twostroke.exec.graphs import CudaRecorder, ladder
from twostroke.kernels import reference
from twostroke.model.decoder import Decoder
from twostroke.model.fused import FusedDecoder
from twostroke.model.hf_config import load_hf_config
from twostroke.model.spec import ModelSpec, RopeSpec
from twostroke.model.weights.dummy import DummyWeights
from twostroke.sched.step import SchedulerConfig

WAYS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
    "preempted": {"num_blocks": 34, "block_size": 16, "lookahead": 0},
    "prefix hit": {"prefix_caching": True},
}
MOVES_BF16 = 0.2  # how far a log-probability may move between two backends in bf16
DEFAULT_MODEL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "windows": (None,) * 30,
    "rope": RopeSpec(1e5, 64),
    "tie_embeddings": True,
}


def core_of(decoder: FusedDecoder, graphs: bool, **settings: Any) -> EngineCore:
    limits: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "block_size": 16,
        "prefix_caching": False,
    }
    each = [settings.pop("num_blocks", 512)] * len(decoder.spec.kv_groups())
    limits["groups"] = group_limits(decoder.spec, each)
    config = SchedulerConfig(**(limits | settings))
    sizes = ladder(config.max_num_seqs) if graphs else ()
    if decoder.device.type == "cuda":
        return assemble_fused(decoder, config, decoder.dtype, sizes, CudaRecorder(decoder.device))
    return assemble_fused(decoder, config, decoder.dtype, sizes)


def alone(decoder: Decoder) -> list[Written]:
    core = make_core(decoder)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def compare(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, quick: bool = False
) -> Iterator[str]:
    kernels: Any = fused if device.type == "cpu" else import_module("twostroke.kernels.cuda")
    # Weights are made on the CPU when small, so that a GPU has those of the tests.
    small = spec.hidden_size < 512
    source = Loud(spec) if small else DummyWeights(spec, device=str(device))
    expected = alone(Decoder(spec, source, dtype, device, 1024, reference))
    decoder = FusedDecoder(spec, source, dtype, device, 1024, kernels, early=device.type == "cuda")
    ways = [*WAYS.items(), ("without graphs", {})]
    for way, settings in ways[1:3] if quick else ways:
        core = core_of(decoder, way != "without graphs", **settings)
        if way == "prefix hit":
            run(core, PROMPTS, OUTPUT)
        got = run(core, PROMPTS, OUTPUT)
        if dtype is torch.float32:
            assert_same(expected, got)
            # A bias of nothing: drawn by `exec/sampling.py` instead of inside the graph.
            drawn = run(core, PROMPTS, OUTPUT, logit_bias={0: 0.0})
            assert_same(expected, drawn)
            yield f"{name}: {way}"
        else:
            moved, steps = drift(expected, got)
            assert moved < MOVES_BF16, f"{way}: a log-probability moved by {moved}"
            yield f"{name}: {way}, moved by at most {moved:.4f} in {steps} steps"


def drift(expected: list[Written], got: list[Written]) -> tuple[float, int]:
    """How far the best log-probability moved, over the steps up to the first other token."""
    moves = []
    for one, other in zip(expected, got, strict=True):
        for step, (token, its) in enumerate(zip(one.tokens, other.tokens, strict=True)):
            best, other_best = one.logprobs[step].logprobs[1], other.logprobs[step].logprobs[1]
            moves.append(abs(best - other_best))
            if token != its:
                break
    return max(moves), len(moves)


def cases(quick: bool) -> Iterator[tuple[str, ModelSpec, torch.dtype]]:
    for name, differences in SPECS.items():
        if name == "qwen3" or not quick:
            yield f"{name}, fp32", small_spec(**differences), torch.float32
    qwen, _ = load_hf_config(Path("bench/shapes/qwen3-0.6b.json"))
    llama, _ = load_hf_config(Path("bench/shapes/llama-3.1-8b.json"))
    yield "Qwen3-0.6B, fp32", qwen, torch.float32
    yield "Qwen3-0.6B, bf16", qwen, torch.bfloat16
    if not quick:
        yield "SmolLM2-135M, fp32", small_spec(**DEFAULT_MODEL), torch.float32
        yield "Llama-3.1-8B, bf16", llama, torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer models, two ways each")
    args = parser.parse_args()
    device = torch.device(args.device)
    equal, failed = [], []
    for name, spec, dtype in cases(args.quick):
        if device.type == "cpu" and spec.hidden_size > 512:
            continue
        try:
            for passed in compare(name, spec, dtype, device, args.quick):
                equal.append(passed)
                print("equal:", passed, flush=True)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}"[:1000])
            print("DIFFERENT:", failed[-1], flush=True)
    print(json.dumps({"check": "cuda", "device": str(device), "equal": equal, "failed": failed}))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
