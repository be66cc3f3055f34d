"""The largest errors of log-probabilities over tiny random models, several of each variant.

    python -m tests.equivalence.measure_families [--seeds 5] [--only NAME] [--json FILE]

Each row is a variant of `test_families.py`, its weights and prompts drawn anew for each seed:

    reference  reference kernels in fp32 against transformers
    exact      native kernels with `exact` against the reference, keys and values in fp16
    rounded    native kernels with weights in int8, activations rounded or (`exact`) not, prompts
               only: largest difference, and the share of rows with a difference above 1
    routing    of mixtures: the share of tokens for which some layer chooses another expert when the
               reference rounds activations as the native kernels do, and what the rows' largest
               differences are (medians) with and without such a choice
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.equivalence import test_families as families
from tests.equivalence.rows import (
    Written,
    largest_difference,
    random_model,
    random_prompts,
    write_with_ours,
)
from twostroke.kernels.reference import Kernels
from twostroke.model.formats.linear import DenseLinear

BLOCK = 32
FAR = 1.0  # a difference that more than rounding explains
HALVES = {"kernels": "reference", "kv_cache_dtype": "float16"}
NATIVE = {"kernels": "native", "threads": 2}

Chosen = list[torch.Tensor]  # of each prompt and layer of experts: [tokens, experts of a token]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 8 bits in blocks of 32 columns, as the native kernels round activations."""
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = padded.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((padded / scale).round() * scale).flatten(-2)[..., :columns]


@contextmanager
def rounded_activations() -> Iterator[None]:
    """The reference kernels with rounded inputs of every product but the router's."""

    def rounding(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x, *args, **kwargs: method(self, rounded(x), *args, **kwargs)

    with (
        mock.patch.object(DenseLinear, "product", rounding(DenseLinear.product)),
        mock.patch.object(DenseLinear, "gated_product", rounding(DenseLinear.gated_product)),
        mock.patch.object(Kernels, "experts", rounding(Kernels.experts)),
    ):
        yield


@contextmanager
def recorded_routes() -> Iterator[Chosen]:
    found: Chosen = []
    route = Kernels.route

    def record(self: Kernels, *args: Any, **kwargs: Any) -> Any:
        chosen, weights = route(self, *args, **kwargs)
        found.append(chosen.sort(dim=-1).values)
        return chosen, weights

    with mock.patch.object(Kernels, "route", record):
        yield found


def write(folder: Path, prompts: list[list[int]], tokens: int, **settings: Any) -> list[Written]:
    return write_with_ours(folder, prompts, tokens, families.VOCAB, **settings, **families.ONE_STEP)


def prompt_differences(ours: Sequence[Written], theirs: Sequence[Written]) -> torch.Tensor:
    """The largest difference of each row of the prompts."""
    pairs = zip(ours, theirs, strict=True)
    return torch.cat([_prompt_difference(one, other) for one, other in pairs])


def _prompt_difference(one: Written, other: Written) -> torch.Tensor:
    rows = slice(len(one.prompt) - 1)
    return (one.rows[rows] - other.rows[rows]).abs().amax(1)


def common_difference(ours: Sequence[Written], theirs: Sequence[Written]) -> float:
    """Up to the first token that differs."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(one.rows))
        largest = max(largest, (one.rows[:same] - other.rows[:same]).abs().max().item())
    return largest


def routing(folder: Path, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a prompt: whether a layer chooses other experts; the largest difference."""
    with recorded_routes() as exact:
        plain = write(folder, [prompt], 1, kernels="reference")
    with recorded_routes() as moved, rounded_activations():
        other = write(folder, [prompt], 1, kernels="reference")
    differs = [(a != b).any(1) for a, b in zip(exact, moved, strict=True) if len(a) == len(prompt)]
    return torch.stack(differs).any(0)[:-1], prompt_differences(plain, other)


def measure(variant: families.Variant, seeds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"variant": variant.name, "reference": 0.0, "exact": 0.0}
    differences, flips, moved = [], [], []
    for seed in range(seeds):
        theirs = random_model(variant.described(), seed)
        prompts = random_prompts(families.PROMPT_LENGTHS, families.VOCAB, seed)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            theirs.save_pretrained(folder)
            ours = write(folder, prompts, families.MAX_TOKENS, kernels="reference")
            row["reference"] = max(row["reference"], largest_difference(ours, theirs))
            halves = write(folder, prompts, families.MAX_TOKENS, **HALVES)
            native = write(folder, prompts, families.MAX_TOKENS, **NATIVE, exact=True)
            row["exact"] = max(row["exact"], common_difference(native, halves))
            rounding, plain = (
                write(folder, prompts, 1, **NATIVE, quantization="int8", exact=exact)
                for exact in (False, True)
            )
            differences.append(prompt_differences(rounding, plain))
            if getattr(theirs.config, "num_experts_per_tok", None):
                flipped, difference = routing(folder, prompts[-1])
                flips.append(flipped)
                moved.append(difference)
    rows = torch.cat(differences)
    row |= {"rounded": rows.max().item(), "far": (rows > FAR).float().mean().item()}
    if flips:
        flipped, difference = torch.cat(flips), torch.cat(moved)
        kinds = {"with": difference[flipped], "without": difference[~flipped]}
        row |= {f"{kind} another choice": _median(part) for kind, part in kinds.items()}
        row["another choice"] = flipped.float().mean().item()
    return row


def _median(values: torch.Tensor) -> float | None:
    return statistics.median(values.tolist()) if len(values) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for variant in families.VARIANTS:
        if args.only in variant.name:
            rows.append(measure(variant, args.seeds))
            print(json.dumps(rows[-1]), flush=True)
    for name in ("reference", "exact", "rounded", "far"):
        worst = max(rows, key=lambda row: row[name])
        print(f"{name}: at most {worst[name]:.2g} ({worst['variant']})")
    if args.json is not None:
        args.json.write_text(json.dumps({"seeds": args.seeds, "variants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
