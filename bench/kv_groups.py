"""KV memory of a model that mixes windows and full attention: pools by group, and one for all.

    python -m bench.kv_groups [--requests N] [--prompt N] [--output N] [--json FILE]

Gemma 3's shape (`bench/shapes/gemma-3-4b.json`). The requests run through the scheduler and the
block pools, without a model; what is held at most is counted in blocks of each group and told in
bytes (bf16). "One group" is what a cache needs in which every layer keeps every position. Also: how
many such requests a cache of a given size runs at one time. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from bench.scheduler import result_of
from twostroke.config import GIB, EngineConfig
from twostroke.engine.assembly import group_limits
from twostroke.exec.memory import plan_memory
from twostroke.model.describe.hf_config import load_hf_config
from twostroke.model.describe.spec import ModelSpec
from twostroke.request import EngineRequest, SamplingParams
from twostroke.sched.scheduler import Scheduler
from twostroke.sched.step import SchedulerConfig

SHAPE = Path("bench/shapes/gemma-3-4b.json")
BLOCK_SIZE = 16
ITEMSIZE = 2
BUDGET = 8192


def without_windows(spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        layers=tuple(
            replace(layer, attention=replace(layer.attention, window=None)) for layer in spec.layers
        ),
    )


def peak_bytes(spec: ModelSpec, args: argparse.Namespace) -> dict[str, float]:
    """What the requests hold at most at one time, with room for all of them."""
    groups = spec.kv_groups()
    total = args.requests * (args.prompt + args.output)
    blocks = [2 * total // BLOCK_SIZE] * len(groups)
    config = SchedulerConfig(
        max_num_seqs=args.requests,
        max_num_batched_tokens=BUDGET,
        max_model_len=args.prompt + args.output,
        block_size=BLOCK_SIZE,
        groups=group_limits(spec, blocks),
        prefix_caching=False,
    )
    scheduler = Scheduler(config)
    for n in range(args.requests):
        prompt = [(7919 * n + at) % 30000 for at in range(args.prompt)]
        params = SamplingParams(max_tokens=args.output, ignore_eos=True)
        scheduler.add(EngineRequest(f"r{n}", prompt, params, seed=0))
    held = [0] * len(groups)
    while scheduler.has_requests:
        step = scheduler.plan()
        assert step is not None
        for g, usage in enumerate(scheduler.kv.group_usage()):
            held[g] = max(held[g], usage.used + usage.fragmented)
        scheduler.commit(result_of(step.plan))
        scheduler.audit()
    sizes = [group.elements_per_token * ITEMSIZE for group in groups]
    found = {"total_gib": sum(a * b for a, b in zip(held, sizes, strict=True)) / GIB}
    for group, tokens, size in zip(groups, held, sizes, strict=True):
        name = "full" if group.window is None else f"window {group.window}"
        found[f"{name}, {len(group.layers)} layers, tokens"] = tokens
        found[f"{name}, {len(group.layers)} layers, GiB"] = tokens * size / GIB
    return found


def requests_at_once(spec: ModelSpec, cache_gib: int, args: argparse.Namespace) -> int:
    """How many such requests a cache of this size runs at one time, by its memory plan."""
    length = args.prompt + args.output
    config = EngineConfig(
        kv_cache_memory_bytes=cache_gib * GIB,
        max_model_len=length,
        max_num_seqs=512,
        max_num_batched_tokens=BUDGET,
    )
    weight_bytes = ITEMSIZE * spec.num_parameters()
    memory = plan_memory(config, spec, weight_bytes, ITEMSIZE, ITEMSIZE, 1024 * GIB, True)
    fits = []
    for group, blocks in zip(spec.kv_groups(), memory.group_blocks, strict=True):
        # While others decode, a sliding layer holds its window and the block it writes.
        tokens = length if group.window is None else min(length, group.window + BLOCK_SIZE)
        fits.append(blocks * BLOCK_SIZE // (-(-tokens // BLOCK_SIZE) * BLOCK_SIZE))
    return min(fits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--cache-gib", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec, _ = load_hf_config(SHAPE)
    report: dict[str, object] = {"bench": "kv_groups", "shape": SHAPE.stem}
    report |= {name: getattr(args, name) for name in ("requests", "prompt", "output", "cache_gib")}
    for name, kind in (("one group", without_windows(spec)), ("groups", spec)):
        found = peak_bytes(kind, args)
        found["requests at one time"] = requests_at_once(kind, args.cache_gib, args)
        report[name] = found
        print(f"{name}:")
        for what, value in found.items():
            print(f"  {what:40} {value:,.2f}")
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
