"""After a step that failed: which of its requests was it?

A step runs many requests, and a failure does not say whose fault it was. Everything that ran waits
again with its tokens kept; those that were in the failed step are then tried one by one, alone.
Whoever writes a token goes back to the others; whoever fails alone was the one.
"""

from __future__ import annotations

from collections import deque

from twostroke.sched.request import Phase, Request


class Quarantine:
    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        self._on_trial: Request | None = None

    def __len__(self) -> int:
        """How many wait to be tried, or to go on with their trial."""
        return sum(request.phase is Phase.WAITING for request in self._members())

    def __contains__(self, request: Request) -> bool:
        return self.active and any(request is member for member in self._members())

    @property
    def active(self) -> bool:
        return self._on_trial is not None or bool(self._suspects)

    def add(self, request: Request) -> None:
        self._suspects.append(request)

    def next(self) -> Request | None:
        """The request that is to run alone now; None if nobody is suspected."""
        while self._on_trial is None or self._on_trial.phase is Phase.FINISHED:
            if not self._suspects:
                self._on_trial = None
                break
            self._on_trial = self._suspects.popleft()
        return self._on_trial

    def acquit(self, request: Request) -> bool:
        """It has written a token without harm. True if it was on trial."""
        if request is not self._on_trial:
            return False
        self._on_trial = None
        return True

    def _members(self) -> list[Request]:
        return [*self._suspects, *([] if self._on_trial is None else [self._on_trial])]
