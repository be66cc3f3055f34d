"""The search simulates few layouts and finds the cheapest layout that meets the goals."""

from __future__ import annotations

import pytest

from twostroke.planner.layout import EngineLayout, EngineShape
from twostroke.planner.predict import Interval, LayoutForecast
from twostroke.planner.search import EngineChoice, cheapest
from twostroke.planner.steptimes import RooflineSteps, StepModel


def kind(name: str, served: Served, price: float | None = None) -> EngineChoice:
    return EngineChoice(name, StepModel(RooflineSteps, "", 0.0, 0.0), served, price)  # type: ignore[arg-type]


class Served:
    """Engines of which `needed` meet the goals; notes the numbers that were tried."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self.tried: list[int] = []

    def __call__(self, count: int) -> LayoutForecast:
        self.tried.append(count)
        share = 1.0 if count >= self.needed else 0.5
        met = Interval(share, share, share)
        return LayoutForecast(
            EngineLayout(count, EngineShape(1, 1, 1, 1)), {"met": met}, 1, 1.0, 0.0, ()
        )


@pytest.mark.parametrize("needed", [*range(1, 18), 33, 63, 64])
def test_the_fewest_engines_are_found_in_few_simulations(needed: int) -> None:
    served = Served(needed)
    best = cheapest([kind("a", served)], 0.99).best
    assert best is not None
    assert best.forecast.layout.engines == needed
    assert len(served.tried) == len(set(served.tried)) <= 13


def test_goals_that_no_number_meets_find_nothing() -> None:
    served = Served(65)
    assert cheapest([kind("a", served)], 0.99).best is None
    assert served.tried == [1, 2, 4, 8, 16, 32, 64]


def test_a_kind_is_given_up_where_it_costs_more_than_the_best() -> None:
    large, small, dear = Served(2), Served(7), Served(5)
    kinds = [kind("large", large, 4.0), kind("small", small, 1.0)]
    best = cheapest([*kinds, kind("dear", dear, 3.0)], 0.99).best
    assert best is not None
    assert (best.kind.name, best.price) == ("small", 7.0)
    assert max(dear.tried) <= 2  # three of them cost more than seven small ones


def test_a_kind_that_costs_more_alone_is_not_simulated() -> None:
    cheap, dear = Served(2), Served(1)
    kinds = [kind("cheap", cheap, 1.0), kind("dear", dear, 2.0)]
    best = cheapest(kinds, 0.99).best
    assert best is not None
    assert best.kind.name == "cheap"
    assert dear.tried == []
