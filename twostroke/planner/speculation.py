"""Simulated speculative decoding: drafts that are right with a given probability.

The product's `Speculator` chooses the depth of each draft, as in a server. Only the drafters are
replaced: a simulated request has no text that could be guessed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from twostroke.draft.interface import DraftOffer, DraftRow, Text
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.observe.record import DraftRecord
from twostroke.plan import Slot
from twostroke.planner.stretch import TOKEN

NAME = "simulated"
DEPTH = 4  # drafted tokens of a row in a step, unless given
WRONG = TOKEN + 1  # a drafted token that the model does not write


class Acceptance(NamedTuple):
    """The probability that drafts are right, and their length."""

    rate: float  # probability that a drafted token is right, if all tokens before it are
    depth: int = DEPTH  # tokens that a drafter offers for a row

    def config(self) -> SpeculationConfig:
        return SpeculationConfig(max_depth=self.depth)


class SimulatedDrafter:
    """Offers the same number of tokens for every request and step."""

    name = NAME

    def __init__(self, acceptance: Acceptance, seed: str) -> None:
        self._acceptance, self._rng = acceptance, random.Random(seed)

    def open(self, text: Text) -> Text:
        return text

    def close(self, text: Text) -> None: ...

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftOffer | None]:
        return [self._offer(row.max_tokens) for row in rows]

    def _offer(self, max_tokens: int) -> DraftOffer | None:
        rate, count = self._acceptance.rate, min(max_tokens, self._acceptance.depth)
        right = 0
        while right < count and self._rng.random() < rate:
            right += 1
        tokens = (TOKEN,) * right + (WRONG,) * (count - right)
        return DraftOffer(NAME, tokens, (NAME,) * count, (rate,) * count) if count else None


def counts_of(slots: Sequence[Slot], draft_tokens: Sequence[int], chunks: int) -> list[int]:
    """Return how many tokens each slot writes, and one for each of `chunks` last chunks."""
    counts, begin = [], 0
    for slot in slots:
        drafted = draft_tokens[begin : begin + slot.drafts]
        begin += slot.drafts
        counts.append(1 + (drafted.index(WRONG) if WRONG in drafted else len(drafted)))
    return counts + [1] * chunks


def measured_acceptance(steps: Sequence[dict[str, Any]]) -> Acceptance | None:
    """Return the acceptance in a server's step records; None if no step verified drafts."""
    reached = accepted = deepest = 0
    for step in steps:
        if not step.get("drafts"):
            continue
        drafts = DraftRecord(*step["drafts"])
        # Rows that accepted a token reach the next one, if their draft has one.
        reached += drafts.rows + sum(drafts.accepted[:-1])
        accepted += sum(drafts.accepted)
        deepest = max(deepest, len(drafts.accepted))
    return Acceptance(accepted / reached, deepest) if reached else None
