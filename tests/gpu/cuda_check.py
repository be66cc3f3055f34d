"""The CUDA backend against the reference backend: same device, same weights, every way to schedule.

    python -m tests.gpu.cuda_check [--quick] [--device cuda]

In fp32 the tokens are the same up to the engine's own tolerance (`tests.equivalence.harness`); in
bf16 up to one measured here, from how far log-probabilities move between two ways to schedule the
reference itself. On a CPU (`--device cpu`) the fused kernels are those of `tests.fused`. Ends with
one JSON line; raises on a difference.
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
from twostroke.engine.build import assemble_fused
from twostroke.engine.core import EngineCore
from twostroke.exec.graphs import CudaRecorder, ladder
from twostroke.kernels import reference
from twostroke.model.decoder import Decoder
from twostroke.model.fused import FusedDecoder
from twostroke.model.hf_config import load_hf_config
from twostroke.model.spec import ModelSpec
from twostroke.sched.step import SchedulerConfig

WAYS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
    "preempted": {"num_blocks": 34, "block_size": 16, "lookahead": 0},
    "prefix hit": {"prefix_caching": True},
}
# How far log-probabilities may move between two backends in bf16, and so how close two candidates
# may lie before they count as tied.
MOVES_BF16 = 0.15


def core_of(decoder: FusedDecoder, graphs: bool, **settings: Any) -> EngineCore:
    limits: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "block_size": 16,
        "num_blocks": 512,
        "windows": tuple(group.window for group in decoder.spec.kv_groups()),
        "prefix_caching": False,
    }
    config = SchedulerConfig(**(limits | settings))
    sizes = ladder(config.max_num_seqs) if graphs else ()
    if decoder.device.type == "cuda":
        return assemble_fused(decoder, config, decoder.dtype, sizes, CudaRecorder(decoder.device))
    return assemble_fused(decoder, config, decoder.dtype, sizes)


def alone(decoder: Decoder) -> list[Written]:
    core = make_core(decoder)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def compare(name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    kernels: Any = fused if device.type == "cpu" else import_module("twostroke.kernels.cuda")
    # Weights are made on the CPU when small, so that a GPU has those of the tests.
    source = Loud(spec) if spec.hidden_size < 512 else Loud(spec, device=device)
    plain = Decoder(spec, source, dtype, device, 1024, reference)
    decoder = FusedDecoder(spec, source, dtype, device, 1024, kernels)
    expected = alone(plain)
    tau = {} if dtype is torch.float32 else {"tau": 2 * MOVES_BF16, "least": 0.3}
    for way, settings in WAYS.items():
        core = core_of(decoder, graphs=True, **settings)
        if way == "prefix hit":
            run(core, PROMPTS, OUTPUT)
        assert_same(expected, run(core, PROMPTS, OUTPUT), **tau)
        yield f"{name}: {way}"
    assert_same(expected, run(core_of(decoder, graphs=False), PROMPTS, OUTPUT), **tau)
    yield f"{name}: without graphs"


def cases(quick: bool) -> Iterator[tuple[str, ModelSpec, torch.dtype]]:
    for name, differences in SPECS.items():
        yield f"{name}, fp32", small_spec(**differences), torch.float32
    shape, _ = load_hf_config(Path("bench/shapes/qwen3-0.6b.json"))
    yield "Qwen3-0.6B, bf16", shape, torch.bfloat16
    if not quick:
        shape, _ = load_hf_config(Path("bench/shapes/llama-3.1-8b.json"))
        yield "Llama-3.1-8B, bf16", shape, torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device = torch.device(args.device)
    equal, failed = [], []
    for name, spec, dtype in cases(args.quick):
        if device.type == "cpu" and dtype is torch.bfloat16:
            continue
        try:
            for passed in compare(name, spec, dtype, device):
                equal.append(passed)
                print("equal:", passed, flush=True)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
            print("DIFFERENT:", failed[-1], flush=True)
    print(json.dumps({"check": "cuda", "device": str(device), "equal": equal, "failed": failed}))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
