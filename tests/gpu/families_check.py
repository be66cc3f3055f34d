"""Every family's tiny model gives transformers' log-probabilities on the CUDA backend.

    python -m tests.gpu.families_check [--device cuda] [--part 1/4] [--limit-s 400] [NAME …]

The models and the comparison are those of `tests/equivalence/test_families.py`: saved by
transformers, run by the public API in fp32, with prompts whole, in chunks beside decode, and from
a cached prefix. `--part 1/4`: every fourth of them, from the first. Ends with a JSON line and how
many passed; exits with 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import transformers

from tests.equivalence import test_families as families
from tests.equivalence.rows import (
    largest_difference,
    random_model,
    random_prompts,
    write_with_ours,
)
from tests.gpu.report import part, tally

# On log-probabilities. On a GPU fp32 products are three of tf32, and exponentials are approximate.
TOLERANCE = 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "one step": {"max_num_batched_tokens": 256, "max_num_seqs": 4},
    "chunked and mixed": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "without graphs": {"max_num_batched_tokens": 32, "enforce_eager": True},
}
BACKENDS = {"cuda": "auto", "cpu": "reference"}
# transformers before 5.22 has these whatever the config says.
PUBLISHED_GPT_OSS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
IS_OLDER = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 22)


def differences(variant: families.Variant, device: str) -> dict[str, float]:
    """Return the largest difference of a log-probability for every way to schedule."""
    changed = PUBLISHED_GPT_OSS if IS_OLDER and variant.name.startswith("gpt_oss") else {}
    theirs = random_model(variant.described(**changed))
    prompts = random_prompts(families.PROMPT_LENGTHS, families.VOCAB)
    at: dict[str, Any] = {"device": device, "kernels": BACKENDS[device], "block_size": 16}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs.save_pretrained(folder)
        for way, settings in WAYS.items():
            written = write_with_ours(
                folder, prompts, families.MAX_TOKENS, families.VOCAB, **at, **settings
            )
            found[way] = largest_difference(written, theirs)
        found["prefix hit"] = families.cached_prefix_difference(
            folder, theirs, **at, max_num_seqs=8
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of variants; all of them")
    parser.add_argument("--device", default="cuda", choices=list(BACKENDS))
    parser.add_argument("--part", type=part, default=slice(None), help="2/4: the second of four")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path, help="a file for the JSON too")
    args = parser.parse_args()
    end = perf_counter() + args.limit_s
    result: dict[str, Any] = {"check": "families", "device": args.device, "tolerance": TOLERANCE}
    result |= {"largest": {}, "failed": {}}
    for variant in families.VARIANTS[args.part]:
        if args.names and variant.name not in args.names:
            continue
        if perf_counter() > end:
            result["failed"][variant.name] = "no time left"
            continue
        try:
            found = differences(variant, args.device)
        except Exception as error:
            result["failed"][variant.name] = f"{type(error).__name__}: {error}"[:1000]
        else:
            result["largest"][variant.name] = found
            if not max(found.values()) <= TOLERANCE:
                result["failed"][variant.name] = f"over {TOLERANCE}: {found}"
        said = result["failed"].get(variant.name) or f"equal, {max(found.values()):.1e}"
        print(f"{variant.name}: {said}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    failed = len(result["failed"])
    return tally(len(result["largest"].keys() - result["failed"].keys()), failed)


if __name__ == "__main__":
    sys.exit(main())
