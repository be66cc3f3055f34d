"""`cheapest`: finds the layout with the lowest price that meets the goals.

More engines of one kind never serve a trace worse. So a bisection finds the smallest sufficient
number with few simulations. Pools are found in two bisections: the fewest prefill engines beside as
many decode engines as are allowed, and then the fewest decode engines. The search skips layouts
that cost more than the best layout so far. The result keeps all simulated layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeVar

from twostroke.planner.predict import LayoutForecast
from twostroke.planner.steptimes import StepModel

MAX_ENGINES = 64
Found = TypeVar("Found")


@dataclass(frozen=True)
class EngineChoice:
    """A kind of engine with its forecasts and the price of one engine an hour."""

    name: str
    model: StepModel
    predict: Callable[[int], LayoutForecast]
    price: float | None = None  # None: not known
    predict_pools: Callable[[int, int], LayoutForecast] | None = None  # None: no pools
    # The model, the machine and the settings, by which checks are kept.
    server: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, int] = field(default_factory=dict)  # that the user has planned with


@dataclass
class SimulatedLayout:
    """A layout with its forecast."""

    kind: EngineChoice
    engines: int
    forecast: LayoutForecast

    @property
    def price(self) -> float:
        """The price of the layout an hour; without prices the number of engines."""
        return self.engines * (1.0 if self.kind.price is None else self.kind.price)

    def as_json(self) -> dict[str, Any]:
        met, ttft = self.forecast.figures["met"], self.forecast.figures["p99_ttft_ms"]
        return {
            "hardware": self.kind.name,
            "engines": self.engines,
            "layout": self.forecast.layout.name,
            "price_per_hour": None if self.kind.price is None else self.price,
            "met": met._asdict(),
            "p99_ttft_ms": ttft._asdict(),
        }


@dataclass
class Search:
    """The best layout and all simulated layouts."""

    best: SimulatedLayout | None = None
    tried: list[SimulatedLayout] = field(default_factory=list)


def cheapest(
    kinds: Sequence[EngineChoice],
    target: float,
    max_engines: int = MAX_ENGINES,
) -> Search:
    """Return the cheapest layout in which a share `target` of the requests meets the goals even in
    the worst simulation. Of two layouts with the same price the first is kept."""
    search = Search()

    def keep(kind: EngineChoice, count: int, forecast: LayoutForecast) -> SimulatedLayout | None:
        found = SimulatedLayout(kind, count, forecast)
        search.tried.append(found)
        return found if forecast.figures["met"].low >= target else None

    def limit_of(kind: EngineChoice) -> int:
        """Return how many engines cost less than the best layout so far."""
        if search.best is None:
            return max_engines
        each = 1.0 if kind.price is None else kind.price
        return min(max_engines, ceil(search.best.price / each) - 1)

    for kind in kinds:

        def engines(count: int, kind: EngineChoice = kind) -> SimulatedLayout | None:
            return keep(kind, count, kind.predict(count))

        search.best = fewest(engines, limit_of(kind)) or search.best
    for kind in kinds:
        found = _fewest_in_pools(kind, keep, limit_of(kind))
        search.best = found or search.best
    return search


def _fewest_in_pools(
    kind: EngineChoice,
    keep: Callable[[EngineChoice, int, LayoutForecast], SimulatedLayout | None],
    limit: int,
) -> SimulatedLayout | None:
    """Return the smallest pools with together at most `limit` engines."""
    predict, pool_limit = kind.predict_pools, limit - 1
    if predict is None or pool_limit < 1:
        return None

    def prefill(count: int) -> SimulatedLayout | None:
        return keep(kind, count + pool_limit, predict(count, pool_limit))

    enough = fewest(prefill, pool_limit)
    if enough is None:
        return None
    first = enough.engines - pool_limit

    def decode(count: int) -> SimulatedLayout | None:
        return keep(kind, first + count, predict(first, count))

    return fewest(decode, limit - first)


def fewest(attempt: Callable[[int], Found | None], limit: int) -> Found | None:
    """Return the result of the smallest number from 1 to `limit` that has a result. Every larger
    number must have a result, too."""
    low, high = 0, 1  # `low` has no result
    found: Found | None = None
    while high <= limit and (found := attempt(high)) is None:
        low = high
        if high == limit:
            return None
        high = min(2 * high, limit)
    if found is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        result = attempt(middle)
        if result is None:
            low = middle
        else:
            high, found = middle, result
    return found
