"""After a step that failed: which of its requests was it?

A step runs many requests, and a failure does not say whose fault it was. Everything that ran waits
again with its tokens kept; those that were in the failed step are then run one by one, alone.
Whoever writes a token goes back to the others; whoever fails alone was the one.
"""

from __future__ import annotations

from collections import deque

from twostroke.sched.scheduled_request import Phase, ScheduledRequest


class IsolatedRetries:
    """The requests of a failed step, in the order in which they are run alone."""

    def __init__(self) -> None:
        self._queue: deque[ScheduledRequest] = deque()
        self._current: ScheduledRequest | None = None  # runs alone, or waits to go on alone

    def __len__(self) -> int:
        """How many wait for their turn, or to go on with it."""
        return sum(request.phase is Phase.WAITING for request in self._members())

    def __contains__(self, request: ScheduledRequest) -> bool:
        return self.active and any(request is member for member in self._members())

    @property
    def active(self) -> bool:
        return self._current is not None or bool(self._queue)

    def add(self, request: ScheduledRequest) -> None:
        self._queue.append(request)

    def next(self) -> ScheduledRequest | None:
        """The request that is to run alone now; None if none has to."""
        while self._current is None or self._current.phase is Phase.FINISHED:
            if not self._queue:
                self._current = None
                break
            self._current = self._queue.popleft()
        return self._current

    def passed(self, request: ScheduledRequest) -> bool:
        """It has written a token without harm. True if it ran alone."""
        if request is not self._current:
            return False
        self._current = None
        return True

    def _members(self) -> list[ScheduledRequest]:
        return [*self._queue, *([] if self._current is None else [self._current])]
