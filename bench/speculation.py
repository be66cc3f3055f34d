"""Speculative decoding beside decoding without it, on this machine's CPU.

    python -m bench.speculation [--model M] [--draft D] [--json FILE] [--tokens 120] [--rounds 3]

Engines in one process, one for each method, take turns: each round runs every task on all of them,
in another order. `--draft`: the path of a draft model, and its methods beside those that search
texts. Tasks, greedy, each with 1 and with 4 streams (`--streams`):

    edit   the prompt has a file, and the answer repeats the file with one changed name
    turns  the prompt has a file and an edited file, and the answer edits it once more
    free   a question that is answered freely

The rate is the tokens after the first token of each stream over the time of the decode phase: from
the first token of the first stream to the last token of the last stream. The median of the rounds
is compared with the engine without drafts; each round has other prompts. It is also checked whether
all engines wrote the same. Ends with one JSON line.

`--cpu-time`: for a machine that is busy with other programs. One thread computes, and every clock
of the process counts its CPU time, for the rates too.
"""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median
from time import perf_counter, process_time
from typing import Any

from bench.output import write_result
from twostroke import LLM, SamplingParams
from twostroke.engine import core as engine_core
from twostroke.exec import native_executor
from twostroke.request import EngineRequest

NAMES = ["total", "amount", "balance", "quantity", "result", "length", "height", "weight"]
SUBJECTS = ["the sea", "a winter morning", "an old train", "a garden", "bread", "the moon", "a dog"]
PLAIN = "none"


def file_of(number: int, name: str) -> str:
    lines = [f"def step_{n}({name}):\n    return {name} + {n * number % 17}\n" for n in range(8)]
    return "\n".join(lines)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def editing(number: int) -> str:
    text = file_of(number, NAMES[number % len(NAMES)])
    asked = "Repeat this code exactly, but call the function step_3 advance:"
    return turn("user", f"{asked}\n```python\n{text}```") + "<|im_start|>assistant\n```python\n"


def editing_again(number: int) -> str:
    name = NAMES[number % len(NAMES)]
    text = file_of(number, name)
    edited = text.replace("step_3", "advance")
    return (
        turn("user", f"Call the function step_3 advance:\n```python\n{text}```")
        + turn("assistant", f"```python\n{edited}```")
        + turn("user", "Now give step_5 a docstring that says what it returns. Write the file.")
        + "<|im_start|>assistant\n```python\n"
    )


def writing(number: int) -> str:
    subject = SUBJECTS[number % len(SUBJECTS)]
    asked = f"Write a short story number {number} about {subject}."
    return turn("user", asked) + "<|im_start|>assistant\n"


TASKS = {"edit": editing, "turns": editing_again, "free": writing}


def methods_of(draft: str | None) -> dict[str, dict[str, Any] | None]:
    """The settings of each engine by the name of its methods."""
    found: dict[str, dict[str, Any] | None] = {PLAIN: None}
    found["suffix,ngram"] = {"method": "suffix,ngram"}
    if draft is not None:
        for method in ("draft_model", "draft_model,suffix,ngram"):
            found[method] = {"method": method, "model": draft}
    return found


class Timed:
    """An engine whose loop runs here."""

    def __init__(self, model: str | None, cpu_time: bool = False, **settings: Any) -> None:
        # With a draft model the cache of the model has the size that it has without.
        self.llm = LLM(
            model, device="cpu", max_model_len=1024, kv_cache_memory_bytes=1 << 28, **settings
        )
        self.core = self.llm.engine.core
        if cpu_time:
            self.core.scheduler._clock = process_time
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
        drafts = [step.drafts for step in steps if step.drafts is not None]
        return {
            "tokens": list(written.values()),
            "tok_s": sum(len(record.token_s) - 1 for record in records) / seconds,
            "drafted": by_place([slot.drafts for step in steps for slot in step.slots]),
            "accepted": [
                sum(one.accepted[place] for one in drafts if place < len(one.accepted))
                for place in range(max((len(one.accepted) for one in drafts), default=0))
            ],
            "model_share": sum(one.model_s for one in drafts) / seconds,
            "steps": len(steps),
            "host_ms": 1e3 * median(step.host_gap_s for step in steps),
        }


def by_place(depths: list[int]) -> list[int]:
    """Return the number of drafts that had a token at each place."""
    return [sum(depth > place for depth in depths) for place in range(max(depths, default=0))]


def measure(
    engines: dict[str, Timed], rounds: int, tokens: int, num_streams: list[int], tasks: list[str]
) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], list[dict[str, dict[str, Any]]]] = {}
    number = 0
    for turn_number in range(-1, rounds):  # the first one warms up
        for streams in num_streams:
            for task in tasks:
                prompts = [TASKS[task](number + n) for n in range(streams)]
                number += streams
                order = list(engines)[:: 1 if turn_number % 2 else -1]
                count = tokens if turn_number >= 0 else tokens // 3
                one = {name: engines[name].run(prompts, count) for name in order}
                rates = ", ".join(f"{name} {one[name]['tok_s']:.2f}" for name in one)
                print(f"round {turn_number}: {task}, {streams} streams: {rates} tok/s", flush=True)
                if turn_number >= 0:
                    found.setdefault((task, streams), []).append(one)
    return [
        summary(task, streams, name, results)
        for (task, streams), results in found.items()
        for name in engines
    ]


def summary(
    task: str, streams: int, name: str, results: list[dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    pairs = [(one[PLAIN]["tok_s"], one[name]["tok_s"]) for one in results]
    texts = [
        (a, b)
        for one in results
        for a, b in zip(one[PLAIN]["tokens"], one[name]["tokens"], strict=True)
    ]
    return {
        "task": task,
        "streams": streams,
        "method": name,
        "tok_s": round(median(rate for _, rate in pairs), 2),
        "ratio": round(median(rate / plain for plain, rate in pairs), 3),
        "ratios": [round(rate / plain, 3) for plain, rate in pairs],
        "drafted_by_place": added(one[name]["drafted"] for one in results),
        "accepted_by_place": added(one[name]["accepted"] for one in results),
        "draft_model_share": round(median(one[name]["model_share"] for one in results), 3),
        "steps": sum(one[name]["steps"] for one in results),
        "host_ms": round(median(one[name]["host_ms"] for one in results), 3),
        "same_texts": sum(a == b for a, b in texts),
        "texts": len(texts),
    }


def added(lists: Any) -> list[int]:
    """The sums of numbers at the same place."""
    total: list[int] = []
    for one in lists:
        total += [0] * (len(one) - len(total))
        for place, count in enumerate(one):
            total[place] += count
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--draft", help="the path of a draft model")
    parser.add_argument("--json")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        args.threads = 1
        for module in (engine_core, native_executor):
            module.monotonic = process_time  # type: ignore[attr-defined]
    began = perf_counter()
    engines = {
        name: Timed(args.model, args.cpu_time, threads=args.threads, speculative_config=settings)
        for name, settings in methods_of(args.draft).items()
    }
    results = measure(engines, args.rounds, args.tokens, args.streams, args.tasks)
    for one in results:
        print(
            f"{one['task']:5} {one['streams']} streams, {one['method']}: {one['tok_s']} tok/s, "
            f"×{one['ratio']}, accepted {one['accepted_by_place']} of {one['drafted_by_place']}"
        )
    result = {
        "what": "speculation",
        "model": engines[PLAIN].llm.engine.model_name,
        "draft": None if args.draft is None else os.path.basename(args.draft),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "clock": "CPU time of the process" if args.cpu_time else "wall clock",
        "tokens": args.tokens,
        "rounds": args.rounds,
        "results": results,
        "seconds": round(perf_counter() - began, 1),
    }
    write_result(result, args.json, indent=1)


if __name__ == "__main__":
    main()
