"""`StartupTimer`: measures the stages of a start, and lists them in a line of text."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class StartupTimer:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.stages: list[tuple[str, float]] = []
        self._clock, self._last_s = clock, clock()

    def end(self, stage: str) -> None:
        """End a stage. It began at the previous call, or when the timer was made."""
        now = self._clock()
        self.stages.append((stage, now - self._last_s))
        self._last_s = now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.stages)
