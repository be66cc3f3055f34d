"""What is sent: prompts of a given length, each its own unless the workload says what they share.

Prompts are random token ids where the route takes ids (/v1/completions), else random words, whose
number is fitted to the length by asking the server once (`words_per_token`).
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

# Ids that are ordinary words in every large vocabulary: special tokens lie at either end.
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
class Planned:
    """One request to be sent. `prompt`: token ids, a text, or a chat's messages."""

    at_s: float
    prompt: list[int] | str | list[dict[str, Any]]
    prompt_tokens: int  # as planned; the server's usage has the last word
    output_tokens: int | None
    extra: dict[str, Any] | None = None


def random_lengths(
    count: int, mean_in: int, mean_out: int, range_ratio: float, seed: int
) -> list[tuple[int, int]]:
    """Lengths drawn evenly from `mean` times 1 ± `range_ratio` (vLLM's meaning)."""
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {range_ratio:g}: give a number from 0 to below 1")
    rng = random.Random(f"lengths {seed}")

    def draw(mean: int) -> int:
        low, high = int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))
        return max(1, rng.randint(low, high))

    return [(draw(mean_in), draw(mean_out)) for _ in range(count)]


class Prompts:
    """Prompts of as many tokens as asked for. `salt` makes them differ from another run's, which
    a server's prefix cache may still hold."""

    def __init__(self, seed: int, salt: str, as_text: bool, words_per_token: float = 1.0) -> None:
        self._seed = f"{seed} {salt}"
        self._as_text = as_text
        self._words_per_token = words_per_token

    def unique(self, number: int, tokens: int, prefix_tokens: int = 0) -> list[int] | str:
        """`prefix_tokens` of it are the same in every prompt."""
        parts = [("prefix", prefix_tokens), (f"prompt {number}", max(1, tokens - prefix_tokens))]
        return self._join([self._part(name, size) for name, size in parts if size])

    def of_blocks(self, number: int, blocks: Sequence[int], size: int, tokens: int) -> Any:
        """A prompt whose blocks of `size` tokens are those of the trace: prompts that share ids
        share tokens. What is left over is its own."""
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
        return max(1, round(tokens * self._words_per_token)) if self._as_text else tokens

    def _part(self, name: str, tokens: int) -> list[Any]:
        rng = random.Random(f"{self._seed} {name}")
        if self._as_text:
            return rng.choices(WORDS, k=self._units(tokens))
        return [rng.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]

    def _join(self, parts: list[list[Any]]) -> list[int] | str:
        units = [unit for part in parts for unit in part]
        return " ".join(units) if self._as_text else units


def replayed(requests: list[TraceRequest], prompts: Prompts, shrink: float) -> list[Planned]:
    size = block_tokens(shrink)
    return [
        Planned(
            one.at_s,
            prompts.of_blocks(n, one.blocks, size, one.prompt_tokens),
            one.prompt_tokens,
            one.output_tokens,
        )
        for n, one in enumerate(requests)
    ]


def read_custom(path: str, output_tokens: int | None) -> list[Planned]:
    """vLLM's `custom` data set: JSON lines with `prompt` and perhaps `output_tokens`; `messages`
    are taken too."""
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
            planned.append(Planned(0.0, prompt, 0, None if wanted is None else int(wanted)))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{path}, line {number}: this is no JSON object with `prompt` or `messages`"
            ) from None
    if not planned:
        raise ConfigError(f"{path} has no prompts")
    return planned
