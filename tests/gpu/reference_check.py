"""The reference backend on a device: the equivalence matrix against the CPU, and a first start.

    python -m tests.gpu.reference_check [--device cuda] [--shape bench/shapes/qwen3-0.6b.json]
        [--limit-s 120]

Needs nothing but the package's own dependencies. Ends with a JSON line and how many passed;
raises on a difference, and ends where it stands after the limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.gpu.report import tally
from tests.loud import Loud
from twostroke import LLM, SamplingParams
from twostroke.engine.core import EngineCore
from twostroke.kernels.reference import Kernels
from twostroke.model.torch.decoder import Decoder

SPECS = {
    "llama, biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": "head", "tie_embeddings": True},
    "mistral, window 24": {"windows": (24,) * 3},
}
PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (5, 40, 90, 200)]
OUTPUT = 24


def ways(decoder: Decoder) -> Iterator[tuple[str, EngineCore]]:
    yield "one shot", make_core(decoder)
    yield "chunked and mixed", make_core(decoder, max_num_batched_tokens=7, max_num_seqs=4)
    tight = {"num_blocks": 34, "block_size": 8, "lookahead": 0, "max_num_batched_tokens": 32}
    yield "preempted", make_core(decoder, **tight)
    yield "planned ahead", make_core(decoder, 2, max_num_batched_tokens=32)
    yield "prefix hit", make_core(decoder, prefix_caching=True)


def check_matrix(device: torch.device) -> list[str]:
    """Weights are made on the CPU, so that both devices have the same."""
    passed = []
    for name, differences in SPECS.items():
        spec = small_spec(**differences)
        cpu = torch.device("cpu")
        expected = alone(Decoder(spec, Loud(spec), torch.float32, cpu, 1024, Kernels()))
        decoder = Decoder(spec, Loud(spec), torch.float32, device, 1024, Kernels())
        for way, core in ways(decoder):
            if way == "prefix hit":
                run(core, PROMPTS, OUTPUT)
            assert_same(expected, run(core, PROMPTS, OUTPUT))
            passed.append(f"{name}: {way}")
    return passed


def alone(decoder: Decoder) -> list[Written]:
    core = make_core(decoder)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


def start(shape: str, device: str, dtype: str) -> dict[str, float]:
    """A real shape with random weights: the memory plan, loading, and a batch of eight."""
    begun = perf_counter()
    settings: dict[str, Any] = {"device": device, "dtype": dtype, "kernels": "reference"}
    if device != "cpu":
        settings["gpu_memory_utilization"] = 0.2  # others may use the card at the same time
    llm = LLM(shape, load_format="dummy", max_model_len=4096, **settings)
    loaded = perf_counter() - begun
    params = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([[n + 5] * 64 for n in range(8)], params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 16 for output in outputs)
    llm.engine.core.scheduler.audit()
    return {
        "load_s": loaded,
        "kv_tokens": llm.kv_usage().reserved,
        "kv_bytes": llm.engine.memory.kv_bytes,
        "tpot_s": outputs[0].records[0].tpot_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="bench/shapes/qwen3-0.6b.json")
    parser.add_argument("--limit-s", type=float, default=120.0)
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    device = torch.device(args.device)
    result: dict[str, Any] = {
        "check": "reference",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "equal": check_matrix(device),
        "start": start(args.shape, args.device, "auto"),
    }
    print(json.dumps(result))
    return tally(len(result["equal"]) + 1, 0)


if __name__ == "__main__":
    sys.exit(main())
