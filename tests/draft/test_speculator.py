"""The drafts of a step: the best offer of each row, and what is learnt from the text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest

from tests.draft.test_drafters import FakeText
from twostroke.draft.speculation_config import SpeculationConfig
from twostroke.draft.speculator import (
    MAX_STEP_INDEXED,
    PROBE_EVERY,
    PROBE_TOKENS,
    Row,
    Speculator,
)
from twostroke.draft.token_index import TokenIndex


class FirstTokens:
    """Rules that allow some tokens of each draft."""

    def __init__(self, count: int) -> None:
        self._count = count

    def allows_drafts(self, request_id: str) -> bool:
        return True

    def limit_drafts(self, request_id: str, drafts: Sequence[int]) -> int:
        return self._count


FREE, DEAR = (lambda count: 1.0), (lambda count: 1.0 + count)


def test_the_offer_with_the_most_expected_tokens_wins_a_row() -> None:
    speculator = Speculator(SpeculationConfig(ngram_min=2))
    text = FakeText([1, 2, 3, 4, 1, 2], num_prompt=5, prediction=[2, 8, 8, 8, 8])
    speculator.begin("a", text)
    found = speculator.drafts([Row("a", 4)], 1, FREE)
    assert found.by_request["a"] == ("prediction", (8, 8, 8, 8))
    # The prediction is wrong again and again; n-grams are right.
    for token in [3, 4, 1, 2] * 12:
        text.tokens.append(token)
        found = speculator.drafts([Row("a", 4)], 1, FREE)
    assert found.by_request["a"].drafter in ("ngram", "suffix")
    assert found.by_request["a"].tokens == (3, 4, 1, 2)


def test_offers_that_are_not_verified_are_learnt_from_too() -> None:
    """The cost forbids every draft; the survival of the offers is known all the same."""
    speculator = Speculator(SpeculationConfig(methods=("ngram",), ngram_min=2))
    text = FakeText([1, 2, 3, 4, 5] * 2, num_prompt=4)
    speculator.begin("a", text)
    rng = random.Random(0)
    for n in range(200):
        assert not speculator.drafts([Row("a", 8)], 1, DEAR).by_request
        text.tokens.append(n % 5 + 1)
    repeats = speculator.drafts([Row("a", 8)], 1, DEAR).expected, speculator.survival
    noise = Speculator(SpeculationConfig(methods=("ngram",), ngram_min=2))
    text = FakeText([rng.randrange(4) for _ in range(40)], num_prompt=4)
    noise.begin("a", text)
    for _ in range(200):
        noise.drafts([Row("a", 8)], 1, DEAR)
        text.tokens.append(rng.randrange(4))
    key = ("ngram", 5, 0)
    assert repeats[1].rate(key, 0.5, {}) > 0.9
    assert noise.survival.rate(key, 0.5, {}) < 0.6


def test_a_fixed_depth_takes_every_offer_within_the_budget() -> None:
    speculator = Speculator(SpeculationConfig(methods=("ngram",), ngram_min=2, adaptive=False))
    for name in "ab":
        speculator.begin(name, FakeText([1, 2, 3, 4, 5, 6, 1, 2], num_prompt=8))
    rows = [Row("a", 4), Row("b", 4)]
    found = speculator.drafts(rows, 2, DEAR, max_tokens=6)
    assert [len(found.by_request[name].tokens) for name in "ab"] == [4, 2]


def test_a_limit_of_a_request_cuts_its_draft() -> None:
    speculator = Speculator(SpeculationConfig(methods=("ngram",), ngram_min=2))
    speculator.begin("a", FakeText([1, 2, 3, 4, 5, 6, 1, 2], num_prompt=8))
    found = speculator.drafts([Row("a", 4)], 1, FREE, rules=FirstTokens(2))
    assert found.by_request["a"].tokens == (3, 4)
    found = speculator.drafts([Row("a", 4)], 1, FREE, rules=FirstTokens(0))
    assert not found.by_request


def test_an_ended_request_leaves_nothing_behind_but_its_text() -> None:
    speculator = Speculator(SpeculationConfig(methods=("suffix",), suffix_factor=4.0))
    text = FakeText([1, 2, 3, 4, 5, 6], num_prompt=2, salt="s")
    speculator.begin("a", text)
    speculator.drafts([Row("a", 4)], 1, FREE)
    speculator.end("a")
    speculator.end("a")
    assert len(speculator) == 0
    speculator.begin("b", FakeText([9, 2, 3], num_prompt=3, salt="s"))
    assert speculator.drafts([Row("b", 3)], 1, FREE).by_request["b"].tokens == (4, 5, 6)


def test_the_cost_of_drafts_is_measured_again_now_and_then() -> None:
    """A likely draft that is thought too dear is verified once in `PROBE_EVERY` steps."""
    speculator = Speculator(SpeculationConfig(methods=("ngram",), ngram_min=2))
    text = FakeText([1, 2, 3, 4, 5] * 2, num_prompt=4)
    speculator.begin("a", text)
    steps = []
    for n in range(3 * PROBE_EVERY):
        found = speculator.drafts([Row("a", 8)], 1, DEAR).by_request
        steps += [n] if found else []
        assert not found or len(found["a"].tokens) <= PROBE_TOKENS
        text.tokens.append(n % 5 + 1)
    assert len(steps) == 3
    assert all(b - a == PROBE_EVERY for a, b in pairwise(steps))


class IndexedTokens:
    """The number of tokens that all indexes have added."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        add = TokenIndex.add

        def counted(index: TokenIndex, tokens: Iterable[int]) -> None:
            before = index.total
            add(index, tokens)
            self.count += index.total - before

        monkeypatch.setattr(TokenIndex, "add", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def test_no_step_waits_until_all_long_prompts_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen choices of one long prompt begin to decode in the same step, and end in one step."""
    indexed, names = IndexedTokens(monkeypatch), [f"choice {n}" for n in range(16)]
    speculator = Speculator(SpeculationConfig(ngram_min=2))
    prompt = [n % 1000 for n in range(MAX_STEP_INDEXED + 100)]
    texts = [FakeText(list(prompt), len(prompt)) for _ in names]
    for name, text in zip(names, texts, strict=True):
        speculator.begin(name, text)
    rows, steps, drafted = [Row(name, 4) for name in names], 0, 0
    while drafted < len(names):
        found = speculator.drafts(rows, len(rows), FREE)
        drafted = len(found.by_request)
        for text in texts:
            text.tokens.append(len(text.tokens) % 1000)
        steps += 1
        assert indexed.take() <= MAX_STEP_INDEXED
        assert steps < 100
    assert steps >= len(names)  # the index of each row takes more than one step
    for name in names:
        speculator.end(name)
    assert indexed.take() <= MAX_STEP_INDEXED
    speculator.begin("next", FakeText([5, 6, 7, 8], 4))
    while speculator.drafts([Row("next", 4)], 1, FREE).offers == 0:
        assert indexed.take() <= MAX_STEP_INDEXED
    assert speculator.drafts([Row("next", 4)], 1, FREE).by_request["next"].tokens[:2] == (9, 10)


def test_a_long_prediction_is_indexed_only_when_the_text_differs_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    indexed, prediction = IndexedTokens(monkeypatch), list(range(3 * MAX_STEP_INDEXED))
    speculator = Speculator(SpeculationConfig(methods=()))
    text = FakeText([7], 1, prediction=prediction)
    speculator.begin("a", text)

    def drafted(token: int) -> tuple[int, ...]:
        text.tokens.append(token)
        found = speculator.drafts([Row("a", 3)], 1, FREE).by_request
        return found["a"].tokens if found else ()

    assert drafted(0) == (1, 2, 3)
    assert indexed.take() == 0
    for token in (500, 501, 502):  # another place of the prediction
        last = drafted(token)
        assert indexed.take() == MAX_STEP_INDEXED
    assert last == (503, 504, 505)
