"""Speculative decoding beside decoding without it, on this machine's CPU.

    python -m bench.speculation [--model M] [--json FILE] [--tokens 120] [--rounds 3]

Two engines in one process, without and with `speculative_config`, take turns: each round runs every
workload on both, in alternating order. Workloads, greedy, with 1 and with 4 streams:

    copy   the prompt has a text, and the answer repeats it with a changed name
    free   a question that is answered freely

The rate is the tokens after the first token of each stream over the time of the decode phase: from
the first token of the first stream to the last token of the last stream. The median of the rounds
is compared; each round has other prompts. It is also checked whether both engines wrote the same.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median
from time import perf_counter
from typing import Any

from bench.output import write_result
from twostroke import LLM, SamplingParams
from twostroke.request import EngineRequest

STREAMS = (1, 4)
NAMES = ["total", "amount", "balance", "quantity", "result", "length", "height", "weight"]
SUBJECTS = ["the sea", "a winter morning", "an old train", "a garden", "bread", "the moon", "a dog"]


def copying(number: int) -> str:
    name = NAMES[number % len(NAMES)]
    lines = [f"def step_{n}({name}):\n    return {name} + {n * number % 17}\n" for n in range(8)]
    text = "\n".join(lines)
    return (
        f"<|im_start|>user\nRepeat this code exactly, but call the function step_3 advance:\n"
        f"```python\n{text}```<|im_end|>\n<|im_start|>assistant\n```python\n"
    )


def writing(number: int) -> str:
    subject = SUBJECTS[number % len(SUBJECTS)]
    return (
        f"<|im_start|>user\nWrite a short story number {number} about {subject}.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


WORKLOADS = {"copy": copying, "free": writing}


class Timed:
    """An engine whose loop runs here."""

    def __init__(self, model: str | None, **settings: Any) -> None:
        self.llm = LLM(
            model, device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 28, **settings
        )
        self.core = self.llm.engine.core
        self._count = 0

    def run(self, prompts: list[str], tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        tokenizer = self.llm.get_tokenizer()
        assert tokenizer is not None
        written: dict[str, list[int]] = {}
        records = []
        for prompt in prompts:
            name, self._count = f"r{self._count}", self._count + 1
            written[name] = []
            self.core.add(EngineRequest(name, tuple(tokenizer.encode(prompt)), params, 0))
        before = self.core.records.steps[-1].step if self.core.records.steps else -1
        while self.core.has_work:
            for update in self.core.step():
                written[update.request_id] += update.tokens
                if update.record is not None:
                    records.append(update.record)
        begin = min(record.token_s[0] for record in records)
        seconds = max(record.token_s[-1] for record in records) - begin
        steps = [step for step in self.core.records.steps if step.step > before]
        return {
            "tokens": list(written.values()),
            "tok_s": sum(len(record.token_s) - 1 for record in records) / seconds,
            "drafted": sum(record.drafted for record in records),
            "accepted": sum(record.accepted for record in records),
            "steps": len(steps),
            "host_ms": 1e3 * median(step.host_gap_s for step in steps),
        }


def measure(plain: Timed, drafting: Timed, rounds: int, tokens: int) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], list[dict[str, dict[str, Any]]]] = {}
    number = 0
    for turn in range(-1, rounds):  # the first one warms up
        for streams in STREAMS:
            for workload, prompt in WORKLOADS.items():
                prompts = [prompt(number + n) for n in range(streams)]
                number += streams
                pair = [("without", plain), ("with", drafting)]
                one = {
                    name: engine.run(prompts, tokens if turn >= 0 else tokens // 3)
                    for name, engine in (pair if turn % 2 else pair[::-1])
                }
                rates = ", ".join(f"{name} {one[name]['tok_s']:.1f}" for name in one)
                print(f"round {turn}: {workload}, {streams} streams: {rates} tok/s", flush=True)
                if turn >= 0:
                    found.setdefault((workload, streams), []).append(one)
    return [summary(workload, streams, results) for (workload, streams), results in found.items()]


def summary(
    workload: str, streams: int, results: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    rates = {name: [one[name]["tok_s"] for one in results] for name in ("without", "with")}
    drafted = sum(one["with"]["drafted"] for one in results)
    accepted = sum(one["with"]["accepted"] for one in results)
    pairs = [
        (a, b)
        for one in results
        for a, b in zip(one["without"]["tokens"], one["with"]["tokens"], strict=True)
    ]
    return {
        "workload": workload,
        "streams": streams,
        "without_tok_s": round(median(rates["without"]), 1),
        "with_tok_s": round(median(rates["with"]), 1),
        "ratio": round(median(b / a for a, b in zip(*rates.values(), strict=True)), 3),
        "ratios": [round(b / a, 3) for a, b in zip(*rates.values(), strict=True)],
        "drafted": drafted,
        "accepted": accepted,
        "steps_without": sum(one["without"]["steps"] for one in results),
        "steps_with": sum(one["with"]["steps"] for one in results),
        "host_ms_without": round(median(one["without"]["host_ms"] for one in results), 3),
        "host_ms_with": round(median(one["with"]["host_ms"] for one in results), 3),
        "same_texts": sum(a == b for a, b in pairs),
        "texts": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--json")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--method", default="suffix,ngram")
    args = parser.parse_args()
    began = perf_counter()
    plain = Timed(args.model, threads=args.threads)
    drafting = Timed(args.model, threads=args.threads, speculative_config={"method": args.method})
    results = measure(plain, drafting, args.rounds, args.tokens)
    for one in results:
        print(
            f"{one['workload']:5} {one['streams']} streams: {one['without_tok_s']} → "
            f"{one['with_tok_s']} tok/s, ×{one['ratio']}, accepted {one['accepted']} of "
            f"{one['drafted']}"
        )
    result = {
        "what": "speculation",
        "model": plain.llm.engine.model_name,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "method": args.method,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "results": results,
        "seconds": round(perf_counter() - began, 1),
    }
    write_result(result, args.json, indent=1)


if __name__ == "__main__":
    main()
