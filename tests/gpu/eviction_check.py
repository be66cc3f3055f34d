"""KV eviction on a device: tables that close up, in graphs, planned ahead, beside prefill.

    python -m tests.gpu.eviction_check [--device cuda] [--limit-s 300]

The definition is the reference backend in fp32, each request alone, one step at a time. A line a
check, and a last one that counts; times go to $OUT/eviction.json where OUT is set. With
`--device cpu` the kernels are the reference ones and graphs run again.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tests.equivalence.harness import Written, assert_same, make_core, run, small_spec
from tests.gpu.cuda_check import core_of, kernels_of
from tests.gpu.reference_check import SPECS
from tests.gpu.report import tally
from tests.loud import Loud
from twostroke.kernels.reference import Kernels
from twostroke.kv.eviction import Eviction
from twostroke.model.torch.decoder import Decoder

PROMPTS = [[(7 * n * n + 3 * n + size) % 512 for n in range(size)] for size in (5, 64, 90, 200)]
OUTPUT = 150
EVICTION = Eviction(6)  # blocks of 16 tokens
WAYS: dict[str, dict[str, Any]] = {
    "one shot": {},
    "chunked and mixed": {"max_num_batched_tokens": 40, "max_num_seqs": 3},
    "preempted": {"num_blocks": 16, "lookahead": 0},
    "prefix hit": {"prefix_caching": True},
    "without graphs": {},
}
MODELS = ("llama, biases", "qwen3")


@cache
def expected(name: str, device: torch.device) -> list[Written]:
    spec = small_spec(**SPECS[name])
    decoder = Decoder(spec, Loud(spec), torch.float32, device, 1024, Kernels())
    core = make_core(decoder, eviction=EVICTION)
    return [run(core, [prompt], OUTPUT)[0] for prompt in PROMPTS]


@cache
def decoder_of(name: str, device: torch.device) -> Decoder:
    spec, on_gpu = small_spec(**SPECS[name]), device.type == "cuda"
    how = (torch.float32, device, 1024, kernels_of(device))
    return Decoder(spec, Loud(spec), *how, dependent_launch=on_gpu)


def check(name: str, way: str, device: torch.device) -> str:
    """Raises `AssertionError` if the tokens differ; what happened, in words."""
    core = core_of(
        decoder_of(name, device), way != "without graphs", eviction=EVICTION, **WAYS[way]
    )
    if way == "prefix hit":
        run(core, PROMPTS, OUTPUT)
    begun = perf_counter()
    got = run(core, PROMPTS, OUTPUT)
    took = perf_counter() - begun
    assert_same(expected(name, device), got)
    evicted = sum(step.kv_evicted_tokens for step in core.records.steps)
    preempted = sum(step.preempted for step in core.records.steps)
    assert evicted >= sum(len(prompt) + OUTPUT - 97 for prompt in PROMPTS)
    assert core.scheduler.kv.is_idle()
    if way == "preempted":
        assert preempted > 0
    return f"{evicted} tokens evicted, {preempted} preempted, {took:.2f} s"


def checks(device: torch.device) -> Iterator[tuple[str, str]]:
    """A label, and what is wrong ("" if nothing)."""
    for name in MODELS:
        for way in WAYS:
            label = f"{name}, {way}"
            try:
                print(f"equal: {label}: {check(name, way, device)}", flush=True)
                yield label, ""
            except Exception as error:
                print(f"DIFFERENT: {label}: {type(error).__name__}: {error}", flush=True)
                yield label, f"{type(error).__name__}: {error}"[:500]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-s", type=float, default=300.0)
    args = parser.parse_args()
    begun, found = perf_counter(), dict[str, str]()
    for label, wrong in checks(torch.device(args.device)):
        found[label] = wrong
        if perf_counter() - begun > args.limit_s and len(found) < len(MODELS) * len(WAYS):
            found["the rest"] = f"no time left after {args.limit_s:.0f} s"
            break
    failed = {label: wrong for label, wrong in found.items() if wrong}
    if folder := os.environ.get("OUT"):
        took = round(perf_counter() - begun, 1)
        text = json.dumps({"check": "eviction", "seconds": took, "failed": failed})
        (Path(folder) / "eviction.json").write_text(text + "\n")
    return tally(len(found) - len(failed), len(failed))


if __name__ == "__main__":
    raise SystemExit(main())
