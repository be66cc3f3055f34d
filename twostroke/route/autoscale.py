"""`Autoscaler`: decides when pools grow and shrink, from the planner's advices. An advice is the
smallest number of engines of each pool that meets the goals for the requests of the last minutes.

    grow    if `GROW_AFTER` advices in a row are larger than the pool: to the smallest of them
    shrink  if all advices of `SHRINK_AFTER_S` are smaller than the pool: to the largest of them
    rest    no change for `REST_S` after a change, because the records still show the old pools

Pools grow quickly and shrink slowly: too few engines harm requests, and too many only cost money.
The same advices at the same times give the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.route.pool_settings import MAX_ENGINES

GROW_AFTER = 2  # advices
SHRINK_AFTER_S = 300.0
REST_S = 60.0
Counts = Mapping[str, int]  # pool name → number of engines


@dataclass(frozen=True, slots=True)
class Bounds:
    """The minimum and the maximum number of engines of each pool."""

    low: int
    high: int

    @classmethod
    def read(cls, text: str) -> Bounds:
        """Read MIN:MAX; raise `ConfigError` if it is something else."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdecimal() and high.isdecimal()):
            raise ConfigError(f"autoscale {text!r}: give MIN:MAX engines of each pool, such as 1:4")
        if not 1 <= int(low) <= int(high) <= MAX_ENGINES:
            raise ConfigError(
                f"autoscale {text}: give two numbers from 1 to {MAX_ENGINES}, the smaller one first"
            )
        return cls(int(low), int(high))

    def clamped(self, count: int) -> int:
        return min(max(count, self.low), self.high)


class Decision(NamedTuple):
    """A change of the pools."""

    counts: dict[str, int]  # of the pools that change
    why: str


class _Advice(NamedTuple):
    at_s: float
    wanted: dict[str, int]


class Autoscaler:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._seen: deque[_Advice] = deque()  # since the last change
        self._since_s: float | None = None  # time of the first advice since the last change
        self._rest_until_s = -REST_S

    def decide(self, now_s: float, current: Counts, wanted: Counts, why: str) -> Decision | None:
        """Return the change of the pools after the advice `wanted`, or None. `why`: its reason."""
        bounds = self._bounds
        allowed = {name: bounds.clamped(count) for name, count in current.items()}
        if allowed != dict(current):
            self.note_change(now_s)
            low, high = bounds.low, bounds.high
            return Decision(_changes(current, allowed), f"a pool has from {low} to {high} engines")
        if now_s < self._rest_until_s:
            return None
        clamped = {name: bounds.clamped(wanted.get(name, count)) for name, count in current.items()}
        self._since_s = now_s if self._since_s is None else self._since_s
        self._seen.append(_Advice(now_s, clamped))
        while len(self._seen) > GROW_AFTER and self._seen[1].at_s <= now_s - SHRINK_AFTER_S:
            self._seen.popleft()
        counts = {name: self._next(name, count, now_s) for name, count in current.items()}
        changes = _changes(current, counts)
        if not changes:
            return None
        self.note_change(now_s)
        return Decision(changes, why)

    def note_change(self, now_s: float) -> None:
        """Begin the rest after a change, and forget the advices, which were for the old pools."""
        self._seen.clear()
        self._since_s, self._rest_until_s = None, now_s + REST_S

    def _next(self, name: str, current: int, now_s: float) -> int:
        newest = [advice.wanted[name] for advice in self._seen][-GROW_AFTER:]
        if len(newest) == GROW_AFTER and min(newest) > current:
            return min(newest)
        assert self._since_s is not None
        highest = max(advice.wanted[name] for advice in self._seen)
        if now_s - self._since_s >= SHRINK_AFTER_S and highest < current:
            return highest
        return current


def _changes(current: Counts, counts: Counts) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count != current[name]}
