"""The CUDA backend against the reference backend: same device, same weights, every way to schedule.

    python -m tests.gpu.cuda_check [--quick] [--device cuda] [--limit-s 400]

In fp32 the engine runs and its tokens are the same, up to the engine's own tolerance
(`tests.equivalence.harness`). In bf16 two candidates are too often too close for that: there both
backends continue the same texts, and every step's log-probabilities are compared with those of the
fp32 reference on the same weights; the CUDA backend may be no further from them than the bf16
reference is. On a CPU (`--device cpu`) the kernels are the reference ones. Ends with a JSON line
and how many passed; exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tests.checked_kernels import CheckedKernels
from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.equivalence.test_window_matrix import mixed_spec
from tests.gpu.reference_check import OUTPUT, PROMPTS, SPECS
from tests.gpu.report import tally
from tests.loud import Loud
from tests.rig import Rig
from twostroke.engine.assembly import group_limits
from twostroke.engine.build_torch import assemble
from twostroke.engine.core import EngineCore
from twostroke.engine.open_tiers import OpenTiers
from twostroke.exec.graphs import CudaRecorder, EagerReplay, Record, ladder
from twostroke.kernels.reference import Kernels
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.describe.spec import ModelSpec, RopeSpec
from twostroke.model.torch.decoder import Decoder
from twostroke.model.weights import ALL_ROWS, Floats, WeightSource
from twostroke.model.weights.dummy import DummyWeights
from twostroke.sched.step import SchedulerConfig

WAYS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 20, "max_num_seqs": 4},
    "preempted": {"num_blocks": 34, "block_size": 16, "lookahead": 0},
    "prefix hit": {"prefix_caching": True},
}
WITHOUT_GRAPHS = "without graphs"
QUICK_WAYS = tuple(WAYS)[1:3]
# In bf16 the kernels' error against fp32, as a share of the bf16 reference's: rounding differs from
# kernel to kernel, and so which of the two is nearer.
ERROR_SHARE = 1.25
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


def kernels_of(device: torch.device) -> Kernels:
    if device.type == "cpu":
        return CheckedKernels()
    from twostroke.kernels.cuda.backend import CudaKernels

    return CudaKernels(device)


def recorder_of(device: torch.device) -> Record:
    return CudaRecorder(device) if device.type == "cuda" else EagerReplay()


def core_of(
    decoder: Decoder,
    graphs: bool,
    kv_dtype: torch.dtype | None = None,
    open_tiers: OpenTiers | None = None,
    **settings: Any,
) -> EngineCore:
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
    sizes, record = ladder(config.max_num_seqs) if graphs else (), recorder_of(decoder.device)
    return assemble(
        decoder,
        config,
        kv_dtype or decoder.dtype,
        2,
        graph_sizes=sizes,
        record=record,
        open_tiers=open_tiers,
    )


def alone(decoder: Decoder) -> list[Written]:
    core = make_core(decoder)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def source_of(spec: ModelSpec, device: torch.device) -> WeightSource:
    """Weights are made on the CPU when small, so that a GPU has those of the tests."""
    if spec.hidden_size < 512:
        return Loud(spec)
    return DummyWeights(spec, device=str(device))


def compare_tokens(
    name: str, spec: ModelSpec, device: torch.device, ways: Collection[str] = ()
) -> Iterator[str]:
    """In fp32: the engine's tokens, every way to schedule, or the named ways."""
    source, fp32 = source_of(spec, device), torch.float32
    expected = alone(Decoder(spec, source, fp32, device, 1024, Kernels()))
    on_gpu = device.type == "cuda"
    decoder = Decoder(spec, source, fp32, device, 1024, kernels_of(device), dependent_launch=on_gpu)
    for way, settings in (WAYS | {WITHOUT_GRAPHS: {}}).items():
        if ways and way not in ways:
            continue
        core = core_of(decoder, way != WITHOUT_GRAPHS, **settings)
        if way == "prefix hit":
            run(core, PROMPTS, OUTPUT)
        assert_same(expected, run(core, PROMPTS, OUTPUT))
        # A bias of nothing: drawn apart from the graph.
        assert_same(expected, run(core, PROMPTS, OUTPUT, logit_bias={0: 0.0}))
        yield f"{name}: {way}"


class Rounded(DummyWeights):
    """Weights that bf16 holds exactly, so that fp32 and bf16 run the same model."""

    def __init__(self, source: WeightSource, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._source = source

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        values = torch.from_numpy(self._source.floats(name, rows).copy())
        return values.bfloat16().float().numpy()


def texts_of(spec: ModelSpec) -> list[list[int]]:
    vocab = spec.vocab_size
    return [[(7 * n * n + 3 * n + 11 * size) % vocab for n in range(size)] for size in LENGTHS]


LENGTHS = (40, 75, 120, 230)  # of texts, of which the last 24 tokens are decoded
FORCED = {"one shot": 1024, "chunked and mixed": 20}  # prompt tokens in a step


def forced(rig: Rig, chunk: int) -> Tensor:
    """Log-probabilities of every sampled step, in the order of the schedule."""
    prompts = [len(text) - OUTPUT for text in rig.texts]
    steps = [logits for _, logits in rig.forced(prompts, chunk)]
    return torch.cat(steps).float().log_softmax(-1)


def compare_logprobs(
    name: str, spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype | None = None
) -> Iterator[str]:
    """In bf16: every step of the same texts, against fp32."""
    source, texts = Rounded(Loud(spec), spec), texts_of(spec)
    on_gpu, length = device.type == "cuda", max(LENGTHS) + 16

    def rig_of(dtype: torch.dtype, kernels: Kernels, record: Record | None = None) -> Rig:
        dependent = on_gpu and record is not None
        decoder = Decoder(spec, source, dtype, device, length, kernels, dependent_launch=dependent)
        return Rig(decoder, texts, kv_dtype=kv_dtype, record=record)

    exact = rig_of(torch.float32, Kernels())
    plain = rig_of(torch.bfloat16, Kernels())
    fused = rig_of(torch.bfloat16, kernels_of(device), recorder_of(device))
    for way, chunk in FORCED.items():
        expected = forced(exact, chunk)
        of_reference, of_kernels = ((forced(rig, chunk) - expected).abs() for rig in (plain, fused))
        share = float(of_kernels.pow(2).mean().sqrt() / of_reference.pow(2).mean().sqrt())
        steps, signal = len(expected), float(expected.std())
        said = f"{name}: {way}, {steps} steps, error {share:.2f} of the reference's"
        assert steps == len(texts) * (OUTPUT + 1)
        assert float(of_reference.pow(2).mean().sqrt()) < 0.2 * signal, "the weights are too quiet"
        assert share < ERROR_SHARE, said
        yield f"{said} (rms {float(of_kernels.pow(2).mean().sqrt()):.4f})"


# What the families differ in, on small models: windows, groups of KV, soft-caps, norms.
MODELS: dict[str, dict[str, Any]] = SPECS | {
    "post norm, full q/k norm": {"pre_norm": False, "post_norm": True, "qk_norm": "full"},
}


def small_models() -> Iterator[tuple[str, ModelSpec]]:
    for name, differences in MODELS.items():
        yield name, small_spec(**differences)
    for name in ("two groups", "three groups"):
        yield name, mixed_spec(name)


def comparisons(device: torch.device, quick: bool) -> Iterator[Iterator[str]]:
    quick_ways = QUICK_WAYS if quick else ()
    for name, spec in small_models():
        if name in ("qwen3", "two groups") or not quick:
            yield compare_tokens(f"{name}, fp32", spec, device, quick_ways)
            yield compare_logprobs(f"{name}, bf16", spec, device)
    yield compare_logprobs("qwen3, bf16, fp16 cache", small_spec(**SPECS["qwen3"]), device, FP16)
    if device.type == "cpu":
        return
    qwen, _ = load_hf_config(Path("bench/shapes/qwen3-0.6b.json"))
    yield compare_tokens("Qwen3-0.6B, fp32", qwen, device, quick_ways)
    yield compare_logprobs("Qwen3-0.6B, bf16", qwen, device)
    if not quick:
        yield compare_tokens("SmolLM2-135M, fp32", small_spec(**DEFAULT_MODEL), device)
        llama, _ = load_hf_config(Path("bench/shapes/llama-3.1-8b.json"))
        some = replace(llama, layers=llama.layers[:4])
        yield compare_logprobs("Llama-3.1-8B, four layers, bf16", some, device)


FP16 = torch.float16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer models, two ways each")
    parser.add_argument("--limit-s", type=float, default=400.0)
    args = parser.parse_args()
    device = torch.device(args.device)
    end, equal, failed = perf_counter() + args.limit_s, list[str](), list[str]()
    for comparison in comparisons(device, args.quick):
        if perf_counter() > end:
            failed.append("no time left for the rest")
            break
        try:
            for passed in comparison:
                equal.append(passed)
                print("equal:", passed, flush=True)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}"[:1000])
            print("DIFFERENT:", failed[-1], flush=True)
    print(json.dumps({"check": "cuda", "device": str(device), "equal": equal, "failed": failed}))
    return tally(len(equal), len(failed))


if __name__ == "__main__":
    sys.exit(main())
