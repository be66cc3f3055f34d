"""Perplexity of a model on a fixed text of more than 20,000 tokens (bench/data/kjv.txt).

    python -m bench.perplexity [--model M] [--tokens N] [--twostroke key=value ...]
        [--against key=value ...] [--json FILE]

The text is cut into windows of 512 tokens. Each begins anew and its first token is not scored.
--against runs a second configuration over the same windows and tells the ratio of the two: what
the first costs in quality if the second is exact. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.cpu_workers import as_options
from twostroke import LLM, SamplingParams

TEXT = Path(__file__).with_name("data") / "kjv.txt"
WINDOW = 512


def measure(model: str | None, options: dict[str, Any], num_tokens: int | None) -> dict[str, float]:
    llm = LLM(model, **{"enable_prefix_caching": False, **options})
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    if num_tokens is not None:
        ids = ids[:num_tokens]
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, scored = 0.0, 0
    start = perf_counter()
    for window in windows:
        if len(window) < 2:
            continue
        found = llm.generate([window], params, use_tqdm=False)[0].prompt_logprobs
        assert found is not None
        assert len(found) == len(window)
        for token, options_there in zip(window[1:], found[1:], strict=True):
            assert options_there is not None
            total += options_there[token].logprob
            scored += 1
    return {
        "perplexity": math.exp(-total / scored),
        "mean_logprob": total / scored,
        "scored": scored,
        "tokens": len(ids),
        "seconds": perf_counter() - start,
    }


def tell(name: str, result: dict[str, float]) -> None:
    print(
        f"{name}: perplexity {result['perplexity']:.4f} over {result['scored']:,} tokens "
        f"({result['seconds']:.0f} s)",
        flush=True,
    )


def main() -> None:
    assert __doc__ is not None
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--model", help="instead of the default model")
    parser.add_argument("--tokens", type=int, help="only the first N tokens of the text")
    parser.add_argument("--twostroke", nargs="*", default=[], metavar="key=value")
    parser.add_argument("--against", nargs="*", metavar="key=value", help="a second configuration")
    parser.add_argument("--json", help="also write the result here")
    args = parser.parse_args()
    out: dict[str, Any] = {"bench": "perplexity", "window": WINDOW, "settings": args.twostroke}
    out["result"] = measure(args.model, as_options(args.twostroke), args.tokens)
    tell(" ".join(args.twostroke) or "default", out["result"])
    if args.against is not None:
        gc.collect()  # the first engine's memory, before the second takes its own
        out["against_settings"] = args.against
        out["against"] = measure(args.model, as_options(args.against), args.tokens)
        tell("against " + (" ".join(args.against) or "default"), out["against"])
        out["ratio"] = out["result"]["perplexity"] / out["against"]["perplexity"]
        print(f"ratio {out['ratio']:.5f}")
    text = json.dumps(out)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
