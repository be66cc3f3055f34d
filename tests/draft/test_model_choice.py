"""When the draft model runs, on a virtual clock: its drafts are right with a given probability."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.draft.test_drafters import FakeText
from twostroke.draft.interface import DraftOffer, DraftRow, Text
from twostroke.draft.model_choice import (
    CATCH_UP_STEPS,
    ModelRow,
    choose_model_depth,
)
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.draft.speculator import Row, Speculator

VOCAB = 1000
ADAPTIVE = SpeculationConfig(methods=("draft_model",), max_depth=8)


@dataclass
class FakeState:
    text: Text
    computed: int = 0


class FakeModel:
    """A draft model that knows the text to come. A step of it takes `step`, a token of a chunk
    `token`; one in two drafted tokens is an easy one, which is right with a higher probability."""

    name = "draft_model"

    def __init__(self, easy: float, hard: float, step: float, token: float) -> None:
        self.rng = random.Random(1)
        self.right, self.step, self.token = (easy, hard), step, token
        self.spent = self.total = 0.0
        self.longest = 0.0  # time before one step
        self.chunks: list[int] = []

    def open(self, text: Text) -> FakeState:
        return FakeState(text)

    def close(self, text: Text) -> None: ...

    def pause(self, text: Text) -> None: ...

    def reset_prefixes(self) -> None: ...

    def audit(self) -> None: ...

    def backlog(self, state: FakeState) -> int:
        return len(state.text.tokens) - state.computed

    def known_keys(self, state: FakeState, count: int) -> tuple[Hashable, ...]:
        return tuple(("draft_model", min(n, 5)) for n in range(count))

    def step_s(self, states: Sequence[FakeState]) -> float:
        return self.step

    def catch_up_s(self, state: FakeState) -> float:
        return self.token * self.backlog(state)

    def max_chunk(self, state: FakeState, limit_s: float) -> int:
        return min(self.backlog(state), int(limit_s / self.token))

    def catch_up(self, states: Sequence[tuple[FakeState, int]]) -> None:
        for state, count in states:
            self.chunks.append(count)
            state.computed += count
            self.spent += self.token * count

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftOffer | None]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: DraftRow) -> DraftOffer:
        state: Any = row.state
        self.spent += self.token * max(0, self.backlog(state) - 2)
        state.computed = len(state.text.tokens)
        offer = DraftOffer(self.name, (), (), ())
        while len(offer.tokens) < row.max_tokens:
            self.spent += self.step
            hard = int(self.rng.random() < 0.5)
            right = self.rng.random() < self.right[hard]
            token = future(state.text, len(offer.tokens)) if right else VOCAB
            place = len(offer.tokens)
            offer = DraftOffer(
                self.name,
                (*offer.tokens, token),
                (*offer.keys, ("draft_model", min(place, 5), hard)),
                (*offer.priors, (0.9, 0.5)[hard]),
                self.known_keys(state, place + 1),
            )
            if row.goes_on is not None and not row.goes_on(offer):
                break
        return offer

    def take_seconds(self) -> float:
        spent, self.spent = self.spent, 0.0
        self.total += spent
        self.longest = max(self.longest, spent)
        return spent


def future(text: Text, ahead: int) -> int:
    """The token that the model itself writes."""
    place = len(text.tokens) + ahead
    return (place * place + 7 * place) % VOCAB


def speed(model: FakeModel, cost: float, outputs: int = 1500, prompt: int = 20) -> float:
    """The rate of tokens with the draft model over the rate without. A step takes 1, and `cost`
    more for each drafted token."""
    speculator = Speculator(ADAPTIVE, model)
    text = FakeText([n % 7 for n in range(prompt)], num_prompt=prompt)
    speculator.begin("a", text)
    took = 0.0
    while len(text.tokens) < prompt + outputs:
        left = prompt + outputs - len(text.tokens)
        found = speculator.drafts([Row("a", left)], 1, lambda n: 1.0 + cost * n)
        drafted = found.by_request.get("a")
        tokens = drafted.tokens if drafted is not None else ()
        took += 1.0 + cost * len(tokens) + found.model_s
        accepted = 0
        while accepted < len(tokens) and tokens[accepted] == future(text, accepted):
            accepted += 1
        written = [future(text, n) for n in range(accepted + 1)]
        text.tokens += written
    return outputs / took


def best_fixed(easy: float, hard: float, step: float, cost: float) -> float:
    """The best rate of a fixed depth, without regard to the probabilities of the tokens."""
    right = (easy + hard) / 2
    return max(
        sum(right**n for n in range(depth + 1)) / (1 + (step + cost) * depth) for depth in range(9)
    )


@pytest.mark.parametrize(
    ("easy", "hard", "step", "cost"),
    [
        (0.97, 0.9, 0.1, 0.05),
        (0.97, 0.5, 0.1, 0.1),
        (0.95, 0.95, 0.3, 0.05),
        (0.9, 0.3, 0.2, 0.02),
    ],
)
def test_a_model_that_pays_is_used_as_well_as_at_its_best_depth(
    easy: float, hard: float, step: float, cost: float
) -> None:
    found = speed(FakeModel(easy, hard, step, 0.01), cost)
    assert found > 1.1
    assert found > 0.9 * best_fixed(easy, hard, step, cost)


@pytest.mark.parametrize(
    ("easy", "hard", "step", "cost"),
    [(0.7, 0.3, 0.5, 0.1), (0.6, 0.6, 0.9, 0.3), (0.1, 0.0, 0.1, 0.1), (0.9, 0.9, 1.5, 0.05)],
)
def test_a_model_that_does_not_pay_costs_little(
    easy: float, hard: float, step: float, cost: float
) -> None:
    model = FakeModel(easy, hard, step, 0.02)
    assert best_fixed(easy, hard, step, cost) <= 1.0
    assert speed(model, cost) > 0.97


def test_a_long_prompt_is_caught_up_in_chunks_that_stall_no_stream() -> None:
    model = FakeModel(0.97, 0.9, 0.1, 0.02)
    assert speed(model, 0.05, prompt=1000) > 1.2
    assert sum(model.chunks) > 800
    assert max(model.chunks) <= CATCH_UP_STEPS / 0.02
    assert model.longest <= CATCH_UP_STEPS + 8 * 0.1


def test_a_prompt_that_is_too_long_for_the_answer_is_not_caught_up() -> None:
    """The answer has 40 tokens; computing the prompt takes longer than writing it."""
    model = FakeModel(0.97, 0.9, 0.1, 0.05)
    assert speed(model, 0.05, outputs=40, prompt=2000) > 0.99
    assert model.total == 0.0


def test_a_model_is_tried_again_after_a_time_without_it() -> None:
    """Its drafts are wrong for a while, then right."""
    model = FakeModel(0.0, 0.0, 0.1, 0.001)
    speculator = Speculator(ADAPTIVE, model)
    text = FakeText([1, 2, 3], num_prompt=3)
    speculator.begin("a", text)
    times = []
    for n in range(3000):
        if n == 1000:
            model.right = (1.0, 1.0)
        found = speculator.drafts([Row("a", 10**6)], 1, lambda n: 1.0 + 0.05 * n)
        drafted = found.by_request.get("a")
        tokens = drafted.tokens if drafted is not None else ()
        accepted = sum(token != VOCAB for token in tokens)
        text.tokens += [future(text, n) for n in range(accepted + 1)]
        times.append(found.model_s)
    assert sum(times[500:1000]) < 0.05 * 500
    assert sum(time > 0 for time in times[-500:]) > 450


def test_a_good_offer_without_the_model_keeps_the_model_from_running() -> None:
    rows = [ModelRow([0.9, 0.8, 0.7], 3, 2.7), ModelRow([0.9, 0.8, 0.7])]
    found = choose_model_depth(rows, 2, lambda n: 1 + 0.02 * n, lambda chosen: 0.1, 64)
    assert found.rows == (1,)
    assert found.depth == 3


def test_no_depth_is_chosen_if_drafting_takes_longer_than_it_saves() -> None:
    rows = [ModelRow([0.9, 0.8, 0.7])]
    found = choose_model_depth(rows, 1, lambda n: 1 + 0.02 * n, lambda chosen: 1.0, 64)
    assert (found.depth, found.rows) == (0, ())
    assert choose_model_depth(rows, 1, lambda n: None, lambda chosen: 0.0, 64).depth == 0
