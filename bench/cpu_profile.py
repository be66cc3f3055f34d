"""What the steps of the native decoder are made of, stage by stage, on this CPU.

    python -m bench.cpu_profile [--model M] [--quantization int8|int4] [--isa NAME] [--threads N]
        [--repeat N] [--json FILE]

Runs the decoder alone, without engine or server: a prompt of 512 and of 2,048 tokens, and steps of
1, 8 and 32 streams with 160 tokens behind them. The median step, and its stages' shares. Ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import perf_counter
from typing import Any

import numpy as np

from twostroke.config import EngineConfig
from twostroke.kv.host_pool import HostPool
from twostroke.model.load import find_model
from twostroke.model.native_decoder import NativeDecoder, Packing, default_threads
from twostroke.model.opened import open_model

BLOCK_SIZE = 16
CONTEXT = 160
MAX_LEN = 2048


def profile(decoder: NativeDecoder, streams: int, prompt: int, repeat: int) -> dict[str, Any]:
    """`prompt` tokens of one sequence in a step, or one token of each of `streams`."""
    blocks = -(-MAX_LEN // BLOCK_SIZE)
    rows = 1 if prompt else streams
    tables = (1 + np.arange(rows * blocks, dtype=np.int32)).reshape(rows, blocks)
    groups = len(decoder.spec.kv_groups())
    caches = HostPool(decoder.spec, [rows * blocks] * groups, BLOCK_SIZE).data
    ids = np.random.default_rng(0).integers(100, decoder.spec.vocab_size, (rows, MAX_LEN + 1))
    tokens = ids.astype(np.int32)
    if prompt:
        slots, chunks = np.empty((0, 3), np.int32), np.array([[0, 0, prompt, 0]], np.int32)
        which = np.array([prompt - 1], np.int32)
    else:
        slots = np.array([[n, CONTEXT, CONTEXT] for n in range(rows)], np.int32)
        chunks, which = np.empty((0, 4), np.int32), np.arange(rows, dtype=np.int32)
    times, shares = [], []
    for _ in range(repeat + 1):
        before, start = decoder.model.stage_seconds, perf_counter()
        decoder.forward(tokens, [tables] * groups, caches, slots, chunks, which)
        times.append(perf_counter() - start)
        shares.append({name: s - before[name] for name, s in decoder.model.stage_seconds.items()})
    order = sorted(range(1, repeat + 1), key=lambda n: times[n])  # the first warms up
    middle = order[len(order) // 2]
    best = min(times[1:])
    count = prompt or streams
    return {
        "median_s": statistics.median(times[1:]),
        "best_s": best,
        "tokens_per_s": count / statistics.median(times[1:]),
        "best_tokens_per_s": count / best,
        "stages_s": shares[middle],
        "best_stages_s": shares[order[0]],
    }


def main() -> None:
    assert __doc__ is not None
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--model")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, device="cpu", isa=args.isa)
    model = open_model(config, find_model(config), "cpu")
    packing = Packing(model.spec, model.weights, model.dtype, args.quantization, args.isa)
    decoder = NativeDecoder(packing, MAX_LEN, args.threads, args.threads, args.isa)
    out: dict[str, Any] = {"bench": "cpu_profile", "isa": args.isa, "threads": args.threads}
    out |= {"quantization": args.quantization, "weight_bytes": decoder.model.num_bytes}
    for prompt in (512, 2048):
        out[f"prefill {prompt}"] = profile(
            decoder, 0, prompt, max(2, args.repeat * 512 // prompt // 4)
        )
    for streams in (1, 8, 32):
        out[f"decode, batch {streams}"] = profile(decoder, streams, 0, args.repeat)
    for name, found in out.items():
        if not isinstance(found, dict):
            continue
        print(
            f"{name}: {found['median_s'] * 1e3:.2f} ms, {found['tokens_per_s']:,.0f} tok/s "
            f"(best {found['best_s'] * 1e3:.2f} ms, {found['best_tokens_per_s']:,.0f})"
        )
        total = sum(found["stages_s"].values())
        best = found["best_stages_s"]
        parts = [
            f"{stage} {s * 1e3:.2f} ({s / total:.0%}; {best[stage] * 1e3:.2f})"
            for stage, s in found["stages_s"].items()
        ]
        print("   " + ", ".join(parts))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(out, file, indent=1)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
