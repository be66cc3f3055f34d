"""The two phases on this machine: floors first, then what the engine takes, then a peer.

    python bench/phases.py [--model M] [--json FILE] [--repeat N]

Floors come from ceilings measured here: the rate of a large matrix product in the engine's dtype
bounds prefill, the rate of reading a buffer as large as the weights bounds decode. Engine and
peer (transformers, where installed, on the same weights and tokens) alternate; medians.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from time import perf_counter
from typing import Any

import torch

from twostroke import LLM, SamplingParams
from twostroke.engine.in_process import SyncClient

PREFILL = 512
PROMPT, OUTPUT = 128, 32
BATCHES = (1, 8)


def matrix_rate(dtype: torch.dtype) -> float:
    a, b = torch.randn(1536, 1536, dtype=dtype), torch.randn(1536, 1536, dtype=dtype)
    times = []
    for _ in range(6):
        start = perf_counter()
        torch.mm(a, b)
        times.append(perf_counter() - start)
    return 2 * 1536**3 / min(times)


def read_rate(num_bytes: int) -> float:
    buffer = torch.randn(num_bytes // 4)
    times = []
    for _ in range(6):
        start = perf_counter()
        buffer.sum()
        times.append(perf_counter() - start)
    return num_bytes / min(times)


def tokens(count: int, start: int) -> list[int]:
    return [(start * 977 + n * 31) % 40000 + 100 for n in range(count)]


class Ours:
    def __init__(self, model: str | None) -> None:
        self.llm = LLM(model, enable_prefix_caching=False, max_num_batched_tokens=512)

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, float]:
        """Seconds to the first token of all, and seconds a decode step."""
        client = SyncClient(self.llm.engine)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        names = [client.add(prompt, params) for prompt in prompts]
        for _ in client.run(names):
            pass
        records = list(self.llm.engine.core.records.requests)[-len(prompts) :]
        first = max(r.first_token_s for r in records) - min(r.received_s for r in records)
        return first, statistics.median(r.tpot_s for r in records)


class Transformers:
    def __init__(self, ours: Ours) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        spec = ours.llm.engine.spec
        part, mlp = spec.layers[0].attention, spec.layers[0].mlp
        config = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            intermediate_size=mlp.width,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=part.num_heads,
            num_key_value_heads=part.num_kv_heads,
            tie_word_embeddings=spec.tie_embeddings,
            rope_theta=part.rope.theta,
        )
        self.model = LlamaForCausalLM(config).eval()  # random weights: the time is the same

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output: int) -> tuple[float, float]:
        ids = torch.tensor(prompts)
        start = perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        first = perf_counter() - start
        cache, step = out.past_key_values, []
        for _ in range(output - 1):
            ids = out.logits[:, -1:].argmax(-1)
            start = perf_counter()
            out = self.model(ids, past_key_values=cache, use_cache=True)
            step.append(perf_counter() - start)
        return first, statistics.median(step) if step else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--json", help="also write the result here")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    ours = Ours(args.model)
    cost = ours.llm.engine.core.cost
    weights = int(cost.weight_bytes(1))
    flops, bandwidth = matrix_rate(torch.float32), read_rate(weights)
    attention = PREFILL * (PREFILL + 1) / 2 * cost.flops_per_kv_token
    prefill_flops = PREFILL * cost.flops_per_token + cost.flops_per_sample + attention
    print(f"ceilings: fp32 products {flops / 1e9:.0f} GFLOP/s, reading {bandwidth / 1e9:.1f} GB/s")
    floors = {f"prefill {PREFILL}": prefill_flops / flops}
    for batch in BATCHES:
        kv = batch * (PROMPT + OUTPUT / 2) * cost.kv_bytes_per_token
        floors[f"decode, batch {batch}"] = (weights + kv) / bandwidth
    contenders: dict[str, Any] = {"twostroke": ours}
    try:
        contenders["transformers"] = Transformers(ours)
    except ImportError:
        print("transformers is not installed: no peer")
    times: dict[str, dict[str, list[float]]] = {n: {w: [] for w in floors} for n in contenders}
    for n in range(args.repeat):
        for name, engine in contenders.items():
            first, _ = engine.run([tokens(PREFILL, n)], 1)
            times[name][f"prefill {PREFILL}"].append(first)
            for batch in BATCHES:
                _, step = engine.run([tokens(PROMPT, 50 * n + b) for b in range(batch)], OUTPUT)
                times[name][f"decode, batch {batch}"].append(step)
    results = {}
    for work, floor in floors.items():
        row = {"floor_s": floor}
        line = f"{work:16} floor {1e3 * floor:7.1f} ms"
        for name in contenders:
            row[name + "_s"] = taken = statistics.median(times[name][work])
            line += f"   {name} {1e3 * taken:7.1f} ms ({floor / taken:4.0%} of the floor)"
        results[work] = row
        print(line)
    out = {
        "bench": "phases",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "flops_per_s": flops,
        "bytes_per_s": bandwidth,
        "results": results,
    }
    text = json.dumps(out)
    print(text)
    if args.json:
        with open(args.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
