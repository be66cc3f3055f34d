"""`IsolatedRetries`: finds the request that made a step fail.

A step runs many requests, and a failure does not say which request caused it. All running requests
wait again with their tokens kept. Those of the failed step are then run alone, one by one. A
request that writes a token alone goes back to the queue; a request that fails alone ends with the
error.
"""

from __future__ import annotations

from collections import deque

from twostroke.sched.scheduled_request import Phase, ScheduledRequest


class IsolatedRetries:
    """The requests of a failed step, in the order in which they run alone."""

    def __init__(self) -> None:
        self._queue: deque[ScheduledRequest] = deque()
        self._current: ScheduledRequest | None = None  # runs alone, or waits to run alone
        self.active = False  # whether there are any

    def __len__(self) -> int:
        """The number of requests that wait here."""
        return sum(request.phase is Phase.WAITING for request in self._members())

    def __contains__(self, request: ScheduledRequest) -> bool:
        return self.active and any(request is member for member in self._members())

    def add(self, request: ScheduledRequest) -> None:
        self._queue.append(request)
        self.active = True

    def next(self) -> ScheduledRequest | None:
        """Return the request that must run alone now, if there is one."""
        while self._current is None or self._current.phase is Phase.FINISHED:
            if not self._queue:
                self._current, self.active = None, False
                break
            self._current = self._queue.popleft()
        return self._current

    def passed(self, request: ScheduledRequest) -> bool:
        """Note that a request has written a token. Return True if it ran alone."""
        if request is not self._current:
            return False
        self._current, self.active = None, bool(self._queue)
        return True

    def _members(self) -> list[ScheduledRequest]:
        return [*self._queue, *([] if self._current is None else [self._current])]
