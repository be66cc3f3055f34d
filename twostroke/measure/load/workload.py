"""Makes the requests of a workload: prompts of a given length that share only the prefixes that the
workload defines.

Prompts are random token ids if the route accepts ids (/v1/completions), otherwise random words. The
number of words for a length follows from `words_per_token`, which the client measures once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError
from twostroke.measure.load.traces import TraceRequest, block_tokens

# Ids of ordinary words in every large vocabulary; special tokens lie at both ends.
FIRST_ID, LAST_ID = 1000, 9999
# fmt: off
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part",
    "place", "case", "week", "company", "system", "program", "question", "work", "government",
    "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story",
    "fact",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send. `prompt`: token ids, a text, or the messages of a chat."""

    at_s: float  # seconds after the start of the run
    prompt: list[int] | str | list[dict[str, Any]]
    prompt_tokens: int  # 0: unknown; not used if the server reports its usage
    output_tokens: int | None
    extra: dict[str, Any] | None = None


def random_lengths(
    count: int, mean_in: int, mean_out: int, range_ratio: float, seed: int
) -> list[tuple[int, int]]:
    """Return lengths drawn uniformly from `mean` times 1 ± `range_ratio`, as in vLLM."""
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {range_ratio:g}: give a number from 0 to below 1")
    rng = random.Random(f"lengths {seed}")

    def draw(mean: int) -> int:
        low, high = int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    return [(draw(mean_in), draw(mean_out)) for _ in range(count)]


class PromptGenerator:
    """A generator of prompts of a given length. `salt` makes the prompts differ from those of
    another run, which a server's prefix cache may still hold."""

    def __init__(self, seed: int, salt: str, as_text: bool, words_per_token: float = 1.0) -> None:
        self._seed = f"{seed} {salt}"
        self._as_text = as_text
        self._words_per_token = words_per_token

    def unique(self, number: int, tokens: int, prefix_tokens: int = 0) -> list[int] | str:
        """Return a prompt whose first `prefix_tokens` are the same in every prompt."""
        parts = [("prefix", prefix_tokens), (f"prompt {number}", max(1, tokens - prefix_tokens))]
        return self._join([self._part(name, size) for name, size in parts if size])

    def of_blocks(self, number: int, blocks: Sequence[int], size: int, tokens: int) -> Any:
        """Return a prompt made of blocks of `size` tokens. Prompts that share block ids share
        tokens. The tokens after the last block are unique."""
        parts = []
        left = tokens
        for block in blocks:
            if left <= 0:
                break
            parts.append(self._part(f"block {block}", size)[: self._units(min(size, left))])
            left -= size
        if left > 0:
            parts.append(self._part(f"rest {number}", left))
        return self._join(parts)

    def _units(self, tokens: int) -> int:
        """Return the number of words, or of token ids, for a number of tokens."""
        return max(1, round(tokens * self._words_per_token)) if self._as_text else tokens

    def _part(self, name: str, tokens: int) -> list[Any]:
        rng = random.Random(f"{self._seed} {name}")
        if self._as_text:
            return rng.choices(WORDS, k=self._units(tokens))
        return [rng.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def _join(self, parts: list[list[Any]]) -> list[int] | str:
        units = [unit for part in parts for unit in part]
        return " ".join(units) if self._as_text else units


def replayed(
    requests: list[TraceRequest], prompts: PromptGenerator, shrink: float
) -> list[PlannedRequest]:
    """Return the requests of a trace with prompts. `shrink`: the factor by which `traces.scaled`
    has shortened the trace; blocks are shortened by the same factor."""
    size = block_tokens(shrink)
    return [
        PlannedRequest(
            one.at_s,
            prompts.of_blocks(n, one.blocks, size, one.prompt_tokens),
            one.prompt_tokens,
            one.output_tokens,
        )
        for n, one in enumerate(requests)
    ]


def read_custom(path: str, output_tokens: int | None) -> list[PlannedRequest]:
    """Read vLLM's `custom` data set: JSON lines with `prompt` or `messages`, and optionally
    `output_tokens`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None
    planned = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["messages"] if "messages" in entry else entry["prompt"]
            wanted = entry.get("output_tokens", output_tokens)
            planned.append(PlannedRequest(0.0, prompt, 0, None if wanted is None else int(wanted)))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}, line {number}: expected a JSON object with `prompt` or `messages`; "
                "`output_tokens` is optional and a whole number"
            ) from None
    if not planned:
        raise ConfigError(f"{path} has no prompts")
    return planned
