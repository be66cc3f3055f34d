"""Measure the cost of each sampling setting in a decode step: 32 streams, settings in turns.

    python -m bench.gpu_sampling SHAPE [--streams 32] [--rounds 3] [--device cuda] [--json FILE]

Dummy weights of a shape in bench/shapes, and a vocabulary of its size made here (a grammar and bad
words need one). Every round runs every setting, so that a card that slows down slows all of them;
the medians are compared with the plain one. A step is the median time from one step's tokens to the
next one's, which is the gap that a stream sees; beside it what the device was at work for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from itertools import islice, pairwise, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.gpu_workloads import DECODE_PROMPT, MAX_MODEL_LEN, SHAPES, TEMPERATURE, Prompts
from twostroke import LLM, SamplingParams
from twostroke.request import StructuredOutputs

TOKENS = 129
# Longer than any text here. (A regex that allows nearly every token is another matter: its mask
# alone takes a millisecond to make.)
GRAMMAR = StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 200})
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k 20, top_p 0.9": {"top_k": 20, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "frequency_penalty 0.5": {"frequency_penalty": 0.5},
    "presence_penalty 0.5": {"presence_penalty": 0.5},
    "logit_bias of 8": {"logit_bias": dict.fromkeys(range(100, 108), 2.0)},
    "min_tokens": {"ignore_eos": False, "min_tokens": TOKENS},
    "bad_words, 4": {"bad_words": ["abc", "hello", "zebra", "thequick"]},
    "logprobs 5": {"logprobs": 5},
    "a seed each": {"seed": 1},
    "one grammar among them": {},
}


def vocabulary(size: int) -> Tokenizer:
    """Every byte, then the shortest words of a to z, until there are `size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    words = [*((p[0], p[1]) for p in pairs), *product(pairs, ascii_lowercase)]
    for left, right in islice([*words, *product(pairs, pairs)], size - len(vocab)):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class Bench:
    def __init__(self, shape: str, streams: int, device: str, settings: dict[str, Any]) -> None:
        path = Path(shape if shape.endswith(".json") else f"{SHAPES}/{shape}.json")
        config = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            vocabulary(config["vocab_size"]).save(f"{folder}/tokenizer.json")
            given: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
            given |= {"load_format": "dummy", "device": device, "max_num_seqs": streams}
            self.llm = LLM(folder, **(given | settings))
        self.streams, self.prompt = streams, Prompts()

    def step_ms(self, name: str, tokens: int, prompt_tokens: int) -> tuple[float, float]:
        """From step to step, and the device's time, of decode steps; in ms."""
        plain: dict[str, Any] = {
            "temperature": TEMPERATURE,
            "ignore_eos": True,
            "detokenize": False,
        }
        first = plain | SETTINGS[name]
        if "min_tokens" in first:
            first["min_tokens"] = tokens
        params = [SamplingParams(**first, max_tokens=tokens) for _ in range(self.streams)]
        if name == "one grammar among them":
            params[0] = SamplingParams(**plain, structured_outputs=GRAMMAR, max_tokens=tokens)
        prompts = [self.prompt(prompt_tokens) for _ in params]
        records = self.llm.engine.core.records
        records.steps.clear()
        self.llm.generate(prompts, params, use_tqdm=False)
        steps = [step for step in records.steps if not step.prefill.tokens]
        gaps = [after.committed_s - step.committed_s for step, after in pairwise(steps)]
        device = statistics.median(step.device_s for step in steps)
        return 1e3 * statistics.median(gaps), 1e3 * device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--prompt-tokens", type=int, default=DECODE_PROMPT)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--settings", default="{}", help="of the engine, as JSON")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    bench = Bench(args.shape, args.streams, args.device, json.loads(args.settings))
    gaps: dict[str, list[float]] = {name: [] for name in SETTINGS}
    devices: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for turn in range(args.rounds + 1):
        for name in SETTINGS:
            gap, device = bench.step_ms(name, args.tokens, args.prompt_tokens)
            if turn:  # the first round compiles and records
                gaps[name].append(gap)
                devices[name].append(device)
    base, base_device = statistics.median(gaps["plain"]), statistics.median(devices["plain"])
    rows: list[dict[str, Any]] = [
        {
            "setting": name,
            "step_ms": statistics.median(gaps[name]),
            "over_plain": statistics.median(gaps[name]) / base - 1,
            "device_ms": statistics.median(devices[name]),
            "device_over_plain": statistics.median(devices[name]) / base_device - 1,
            "steps_ms": gaps[name],
        }
        for name in SETTINGS
    ]
    for row in rows:
        print(
            f"{row['setting']:26} {row['step_ms']:8.3f} ms {100 * row['over_plain']:+6.1f}%"
            f"   device {row['device_ms']:8.3f} ms {100 * row['device_over_plain']:+6.1f}%"
        )
    result = {"bench": "gpu_sampling", "shape": args.shape, "streams": args.streams, "rows": rows}
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
