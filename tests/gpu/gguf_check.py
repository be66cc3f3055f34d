"""A GGUF file on a GPU, where its blocks stay packed, against the CPU's exact path.

    python -m tests.gpu.gguf_check [FILE.gguf …] [--limit-s 120]

Without files: a small one with random weights in the mixture of types called Q4_K_M. Greedy, the
same prompts on both; where two tokens differ first, the CPU must have found them nearly as likely:
as log-probabilities differ that both found for the tokens before.
Needs the native kernels, and `gguf` where it writes the file. A line a prompt, then "N passed, M
failed".
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from tests.gpu.report import tally
from twostroke import LLM, SamplingParams

TOKENS = 64
# Of log-probability: bf16 moves one by as much at times, and two of them as far as so many times
# what they differ by (rms).
NEAR, SPREAD = 0.25, 4.0
LOUD = 2e-4  # scale of random blocks: tokens differ for a reason
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
}


def answers(path: str, prompts: list[list[int]], **settings: Any) -> list[Any]:
    llm = LLM(path, max_model_len=1024, **settings)
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=5
    )
    return [out.outputs[0] for out in llm.generate(list(prompts), params, use_tqdm=False)]


def compare(name: str, exact: Any, found: Any) -> bool:
    pairs = zip(exact.token_ids, found.token_ids, strict=True)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        print(f"equal: {name}, {len(exact.token_ids)} tokens")
        return True
    noise, likely = difference(exact, found, first), exact.logprobs[first]
    best, other = likely[exact.token_ids[first]], likely.get(found.token_ids[first])
    less = float("inf") if other is None else best.logprob - other.logprob
    near = less < max(NEAR, SPREAD * noise)
    said = "a near-tie" if near else "DIFFERENT"
    print(
        f"{said}: {name}, equal up to token {first}, where the CPU has it {less:.3f} less likely; "
        f"both differ by {noise:.3f} before"
    )
    return near


def difference(exact: Any, found: Any, count: int) -> float:
    """Return the root mean square difference of logprobs that both have for the first tokens."""
    pairs = zip(exact.logprobs[:count], found.logprobs[:count], strict=True)
    of_both = [
        (one[token].logprob - other[token].logprob) ** 2
        for one, other in pairs
        for token in one.keys() & other.keys()
    ]
    return (sum(of_both) / max(len(of_both), 1)) ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of all of it")
    args = parser.parse_args()
    end, results = perf_counter() + args.limit_s, []
    if find_spec("twostroke._native") is None:
        print("left out: the native kernels are not built here")
        return tally(0, 0)
    with TemporaryDirectory() as folder:
        files = args.files
        if not files:
            from bench.random_gguf import write

            files = [str(Path(folder) / "small-Q4_K_M.gguf")]
            write(SMALL, files[0], LOUD)
        for file in files:
            prompts = [[(n * n + 7 * k + 11) % 4000 for n in range(k)] for k in (4, 17, 60, 130)]
            exact = answers(file, prompts, device="cpu", exact=True)
            found = answers(file, prompts, device="cuda")
            for n, pair in enumerate(zip(exact, found, strict=True)):
                name = f"{Path(file).name}, prompt of {len(prompts[n])}"
                results.append(perf_counter() < end and compare(name, *pair))
    return tally(sum(results), len(results) - sum(results))


if __name__ == "__main__":
    sys.exit(main())
