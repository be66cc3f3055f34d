"""The depth of drafts: by survival and cost, never where no gain is expected."""

from __future__ import annotations

import random
from itertools import product

import pytest

from twostroke.draft.depth import MIN_GAIN, choose_depths
from twostroke.draft.survival import Counts, Survival


def linear(alone: float, token: float):  # type: ignore[no-untyped-def]
    return lambda count: alone + token * count


def test_free_tokens_are_all_verified_and_dear_tokens_are_not() -> None:
    offers = [[0.9, 0.8, 0.1], [0.5]]
    assert choose_depths(offers, 2, linear(1.0, 0.0), 100).depths == [3, 1]
    assert choose_depths(offers, 2, linear(1.0, 1.0), 100).depths == [0, 0]


def test_the_choice_is_the_best_of_all_choices() -> None:
    """Against every combination of depths."""
    rng = random.Random(0)
    for _ in range(300):
        offers = [
            sorted((rng.random() for _ in range(rng.randint(1, 3))), reverse=True)
            for _ in range(rng.randint(1, 3))
        ]
        rows, jump, token = rng.randint(len(offers), 6), rng.random() / 2, rng.random() / 4

        def seconds(n: int, jump: float = jump, token: float = token) -> float:
            return 1.0 + bool(n) * jump + n * token

        def rate(
            depths: tuple[int, ...], rows: int = rows, offers=offers, seconds=seconds
        ) -> float:  # type: ignore[no-untyped-def]
            gained = sum(sum(one[:k]) for one, k in zip(offers, depths, strict=True))
            return (rows + gained) / seconds(sum(depths))

        best = max(rate(each) for each in product(*(range(len(one) + 1) for one in offers)))
        chosen = choose_depths(offers, rows, seconds, 100)
        assert rate(tuple(chosen.depths)) >= best / (1 + MIN_GAIN) - 1e-12
        if any(chosen.depths):
            assert chosen.gain == pytest.approx(rate(tuple(chosen.depths)) / rows - 1)


def test_more_rows_at_the_same_cost_leave_less_to_drafts() -> None:
    """At a large batch a drafted token costs as much as a row does."""
    offer = [0.6, 0.36, 0.2]
    few = choose_depths([offer] * 2, 2, linear(1.0, 0.02), 100).depths
    many = choose_depths([offer] * 100, 100, linear(1.0 + 100 * 0.02, 0.02), 300).depths
    assert sum(few) / 2 > sum(many) / 100


def test_an_unknown_time_means_no_drafts() -> None:
    assert choose_depths([[1.0]], 1, lambda count: None, 10).depths == [0]


def test_the_tokens_of_a_step_are_limited() -> None:
    offers = [[0.9, 0.8], [0.95, 0.5]]
    assert choose_depths(offers, 2, linear(1.0, 0.0), 2).depths == [1, 1]
    assert choose_depths(offers, 2, linear(1.0, 0.0), 0).depths == [0, 0]
    assert choose_depths(offers, 2, linear(1.0, 0.0), 3, min_depth=2).depths == [2, 0]


# ── survival ────────────────────────────────────────────────────────────────────────────────


def test_survival_follows_the_counts() -> None:
    survival, own = Survival(), Counts()
    rng = random.Random(1)
    for _ in range(2000):
        survival.add("a", rng.random() < 0.8, own)
        survival.add("b", rng.random() < 0.1, own)
    a, both = survival.of_offer(["a", "b"], [0.5, 0.5], {})
    # The counts of the last 200 to 400 tokens: three standard deviations.
    assert a == pytest.approx(0.8, abs=3 * (0.16 / 200) ** 0.5 + 0.01)
    assert both == pytest.approx(0.08, abs=0.06)


def test_a_request_that_differs_from_the_others_has_its_own_rate() -> None:
    survival, mine = Survival(), Counts()
    for _ in range(200):
        survival.add("a", True, Counts())
    for _ in range(40):
        survival.add("a", False, mine)
    assert survival.rate("a", 0.5, {}) > 0.7
    assert survival.rate("a", 0.5, mine) < 0.2


def test_without_counts_the_drafters_estimate_holds() -> None:
    assert Survival().of_offer(["a", "b"], [0.6, 0.5], {}) == pytest.approx([0.6, 0.3])
