"""`Autoscaler`: decides when pools grow and shrink, from one advice after the other.

    advice: the fewest engines of each pool that meet the goals for the requests of the last minutes
    grow    GROW_AFTER advices in a row want more engines, to the lowest number that they want
    shrink  all advices of `SHRINK_AFTER_S` want fewer engines, to the highest number that they want
    rest    no change for `REST_S` after a change, because the records still show the engines before

Growing is quick and shrinking slow: too few engines harm requests, and too many only cost money.
Plain data and an explicit time, so the same advices give the same decisions.
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
Counts = Mapping[str, int]  # engines by the name of their pool


@dataclass(frozen=True, slots=True)
class Bounds:
    """The fewest and the most engines of each pool."""

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


class _Seen(NamedTuple):
    at_s: float
    wanted: dict[str, int]
    why: str


class Autoscaler:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._seen: deque[_Seen] = deque()  # advices since the last change
        self._since_s: float | None = None  # of the first advice since the last change
        self._rest_until_s = -REST_S

    def decide(self, now_s: float, current: Counts, wanted: Counts, why: str) -> Decision | None:
        """Return the change that an advice leads to; None: the pools stay as they are. `why`: the
        reason of the advice."""
        bounds = self._bounds
        outside = {name: bounds.clamped(count) for name, count in current.items()}
        if outside != dict(current):
            self.note_change(now_s)
            low, high = bounds.low, bounds.high
            return Decision(_changes(current, outside), f"a pool has from {low} to {high} engines")
        if now_s < self._rest_until_s:
            return None
        clamped = {name: bounds.clamped(wanted.get(name, count)) for name, count in current.items()}
        self._since_s = now_s if self._since_s is None else self._since_s
        self._seen.append(_Seen(now_s, clamped, why))
        while len(self._seen) > GROW_AFTER and self._seen[1].at_s <= now_s - SHRINK_AFTER_S:
            self._seen.popleft()
        counts = {name: self._next(name, count, now_s) for name, count in current.items()}
        changes = _changes(current, counts)
        if not changes:
            return None
        self.note_change(now_s)
        return Decision(changes, why)

    def note_change(self, now_s: float) -> None:
        """Forget the advices, which were for other pools, and rest."""
        self._seen.clear()
        self._since_s, self._rest_until_s = None, now_s + REST_S

    def _next(self, name: str, current: int, now_s: float) -> int:
        newest = [one.wanted[name] for one in self._seen][-GROW_AFTER:]
        if len(newest) == GROW_AFTER and min(newest) > current:
            return min(newest)
        assert self._since_s is not None
        highest = max(one.wanted[name] for one in self._seen)
        if now_s - self._since_s >= SHRINK_AFTER_S and highest < current:
            return highest
        return current


def _changes(current: Counts, counts: Counts) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count != current[name]}
