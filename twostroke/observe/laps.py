"""`Laps`: how long each part of something took, in a line."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class Laps:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.parts: list[tuple[str, float]] = []
        self._clock, self._last_s = clock, clock()

    def end(self, part: str) -> None:
        """What was done since the last part, or the beginning, was this one."""
        now = self._clock()
        self.parts.append((part, now - self._last_s))
        self._last_s = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self.parts)
