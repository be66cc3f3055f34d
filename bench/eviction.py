"""KV eviction on a long generation: memory, speed, and the effect on the text.

    python -m bench.eviction [--policy sinks] [--model M] [--tokens 20000] [--budget 4096]
        [--stretch 1000] [--skip-quality] [--json FILE]

1. One request writes `--tokens` tokens on `--budget`: for each interval of `--stretch` tokens,
tok/s, the KV
   cache in use and the process's memory. Blocks are audited at the end of each interval.
2. A needle: the probability of a number from the text, without eviction, and with eviction while
   the number is in the cache and after its eviction.
3. Perplexity of a fixed text by position, with eviction and (as far as the model goes) without.

Sampling is at temperature 1 with a seed, so that the text does not repeat itself. Prefill computes
the texts of 2 and 3 as generated tokens; with heavy hitters decode computes the texts token by
token, because decode keeps the scores (native kernels only).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.output import write_result
from twostroke import LLM, SamplingParams
from twostroke.exec.native_executor import FinishedStep
from twostroke.measure.quality.quality import log_softmax, read_window

TEXT = Path(__file__).with_name("data") / "kjv.txt"
NEEDLE = "The number of the house in the harbour is 48213. "
QUESTION = "\nThe number of the house in the harbour is "
ANSWER = "48213"
NEEDLE_BUDGET, NEEDLE_TOKENS = 512, 1500


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class ForcedExecutor:
    """An executor that generates a given text and records the probability of each token."""

    def __init__(self, executor: Any, text: list[int]) -> None:
        self._executor, self._text = executor, text
        self.logprobs: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def sample(self, handle: Any, masks: Any = None) -> Any:
        lines = log_softmax(handle.logits)
        result = self._executor.sample(handle, masks).wait()
        if not handle.positions:
            return FinishedStep(result)
        ((row,), (at,)) = handle.rows, handle.positions
        token = self._text[at]
        self.logprobs.append(float(lines[0, token]))
        self._executor._tokens[row, at] = token
        return FinishedStep(result._replace(tokens=[token]))


def evicting(policy: str, model: str | None, budget: int, length: int, **more: Any) -> LLM:
    return LLM(
        model,
        kv_eviction=policy,
        kv_eviction_budget=budget,
        max_model_len=length,
        max_num_seqs=1,
        enable_prefix_caching=False,
        num_gpu_blocks_override=budget // 16 + 2,
        **more,
    )


def generate(
    policy: str, model: str | None, tokens: int, budget: int, stretch: int
) -> dict[str, Any]:
    llm = evicting(policy, model, budget, tokens + 64)
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, detokenize=False
    )
    rows: list[dict[str, Any]] = []
    done, began, record = 0, perf_counter(), None
    start = began
    for output in llm.stream([504, 253, 2146, 1008, 355, 253, 4130], params):
        done += len(output.outputs[0].token_ids)
        if output.records:
            record = output.records[0]
        if done >= stretch * (len(rows) + 1) or output.finished:
            now, usage = perf_counter(), llm.kv_usage()
            llm.engine.core.scheduler.audit()
            rows.append(
                {
                    "tokens": done,
                    "tok_per_s": (done - sum(row["written"] for row in rows)) / (now - start),
                    "written": done - sum(row["written"] for row in rows),
                    "kv_tokens": usage.used + usage.fragmented,
                    "rss_bytes": rss_bytes(),
                }
            )
            row = rows[-1]
            print(
                f"{done:7,} tokens  {row['tok_per_s']:7.1f} tok/s  KV {row['kv_tokens']:6,} tokens"
                f"  memory {row['rss_bytes'] / 2**20:7.1f} MiB",
                flush=True,
            )
            start = perf_counter()
    assert record is not None
    full = [row for row in rows[:-1] if row["tokens"] >= budget]  # the last one has been freed
    assert all(row["kv_tokens"] <= budget for row in full), "more than the budget is held"
    usage = llm.kv_usage()
    assert usage.used == usage.fragmented == 0, "blocks leaked"
    rates = [row["tok_per_s"] for row in full]
    return {
        "tokens": done,
        "budget": budget,
        "seconds": perf_counter() - began,
        "kv_evicted_tokens": record.kv_evicted_tokens,
        "stretches": rows,
        "memory_growth_bytes": full[-1]["rss_bytes"] - full[0]["rss_bytes"] if full else 0,
        "slowest_to_fastest": min(rates) / max(rates) if rates else 1.0,
    }


def logprobs(llm: LLM, window: list[int]) -> list[float]:
    found: list[float] = []
    if llm.engine.config.kv_eviction == "heavy-hitters":
        core = llm.engine.core
        own = core._executor
        core._executor = forced = ForcedExecutor(own, window)
        params = SamplingParams(temperature=0, max_tokens=len(window) - 1, ignore_eos=True)
        llm.generate([window[:1]], params, use_tqdm=False)
        core._executor = own
        return forced.logprobs

    def take(targets: list[int], logits: Any) -> None:
        lines = log_softmax(logits)
        found.extend(lines[np.arange(len(targets)), targets].tolist())

    read_window(llm, window, take)
    return found


def needle(policy: str, model: str | None) -> dict[str, Any]:
    """Return the mean log-probability of the answer's tokens by the place of the needle."""
    found: dict[str, Any] = {}
    plain = LLM(model, max_model_len=2048, max_num_seqs=1, enable_prefix_caching=False)
    tokenizer = plain.get_tokenizer()
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    filler = encode(TEXT.read_text(encoding="utf-8"))[:NEEDLE_TOKENS]
    told, asked, answer = encode(NEEDLE), encode(QUESTION), encode(ANSWER)
    places = {"in the window": NEEDLE_TOKENS - 200, "evicted": 300, "nowhere": None}
    llms = {"all kept": plain, "evicting": evicting(policy, model, NEEDLE_BUDGET, 2048)}
    for engine, llm in llms.items():
        for place, at in places.items():
            middle = [] if at is None else told
            text = [*filler[: at or 0], *middle, *filler[at or 0 :], *asked, *answer]
            value = sum(logprobs(llm, text)[-len(answer) :]) / len(answer)
            found[f"{engine}, {place}"] = value
            print(f"needle {place:14} {engine:9} log p of a token of the answer {value:8.3f}")
    return found


def perplexity(policy: str, model: str | None, budget: int, tokens: int) -> list[dict[str, Any]]:
    rows = []
    evicts = evicting(policy, model, budget, tokens + 1)
    tokenizer = evicts.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:tokens]
    values = {"evicting": logprobs(evicts, ids)}
    length = evicts.engine.spec.max_context
    del evicts
    gc.collect()
    plain = LLM(model, max_num_seqs=1, enable_prefix_caching=False)
    values["all kept"] = logprobs(plain, ids[: min(length, len(ids)) - 1])
    for name, of in values.items():
        for start in range(0, len(of), budget):
            part = of[start : start + budget]
            rows.append(
                {
                    "engine": name,
                    "from": start,
                    "to": start + len(part),
                    "perplexity": math.exp(-sum(part) / len(part)),
                }
            )
            row = rows[-1]
            print(
                f"perplexity {name:9} positions {row['from']:6,} to {row['to']:6,}: "
                f"{row['perplexity']:9.3f}",
                flush=True,
            )
    return rows


def main() -> None:
    assert __doc__ is not None
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--policy", default="sinks", choices=("sinks", "heavy-hitters"))
    parser.add_argument("--model", help="instead of the default model")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--stretch", type=int, default=1000)
    parser.add_argument("--skip-quality", action="store_true")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    out: dict[str, Any] = {"bench": "eviction", "policy": args.policy}
    out["generation"] = generate(args.policy, args.model, args.tokens, args.budget, args.stretch)
    gc.collect()
    if not args.skip_quality:
        out["needle"] = needle(args.policy, args.model)
        gc.collect()
        out["perplexity"] = perplexity(args.policy, args.model, args.budget, args.tokens)
    write_result(out, args.json)


if __name__ == "__main__":
    main()
