"""`DeadlineQueue`: the order of admission under a goal for the first token (`ttft_slo_s`).

Priorities come first, in whole levels. Within one level:

    0  streams that were preempted: their readers wait for the next token
    1  prompts that have waited for `PATIENCE` times the goal, by arrival
    2  prompts that can still meet the goal, by the latest moment to start them
    3  prompts that cannot meet the goal any more, by arrival

A prompt must start by `received + goal − prefill time`. A prompt that is too late makes room for
prompts that can still be served in time, but only until its patience ends: from then on no prompt
that arrived later overtakes it. Prompts under way are ranked together with waiting prompts, so that
a short prompt need not wait for the whole of a long one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from twostroke.sched.scheduled_request import Phase, ScheduledRequest

PATIENCE = 4.0
Rank = tuple[int, int, float, int]  # priority, class in the list above, seconds, arrival
Heap = list[tuple[tuple[float, ...], ScheduledRequest]]


class DeadlineQueue:
    """Replaces `WaitingQueue`. Finished requests are skipped when they reach the top of a heap."""

    def __init__(self, ttft_s: float, left_s: Callable[[ScheduledRequest], float]) -> None:
        """`left_s`: the expected time of the rest of a request's prefill."""
        self._ttft_s = ttft_s
        self._left_s = left_s
        self._resumed: Heap = []  # by order
        self._on_time: Heap = []  # by priority, then the latest moment to start
        self._late: Heap = []  # by order
        self._peeked: Heap = []  # the heap whose first request `peek` has returned
        self._waiting = 0
        self._num_finished = 0

    def __len__(self) -> int:
        return self._waiting

    def push(self, request: ScheduledRequest) -> None:
        self._waiting += 1
        if request.num_outputs:
            heapq.heappush(self._resumed, (request.order, request))
            return
        # Not changed later: if each chunk changed this time, two prompts would take turns, and both
        # would end late.
        request.start_by_s = self._start_by(request)
        priority, arrival = _level(request)
        heapq.heappush(self._on_time, ((priority, request.start_by_s, arrival), request))

    def peek(self, now: float) -> ScheduledRequest | None:
        while (head := self._head(self._on_time)) is not None and head.start_by_s < now:
            heapq.heappop(self._on_time)
            heapq.heappush(self._late, (head.order, head))
        best: Rank | None = None
        for heap in (self._resumed, self._late, self._on_time):
            head = self._head(heap)
            if head is not None and (best is None or self.rank(head, now) < best):
                best, self._peeked = self.rank(head, now), heap
        return None if best is None else self._peeked[0][1]

    def pop(self) -> ScheduledRequest:
        """Remove the request that `peek` has returned."""
        self._waiting -= 1
        return heapq.heappop(self._peeked)[1]

    def note_finished(self) -> None:
        """Count a waiting request that has finished. Sweep when most entries are finished."""
        self._waiting -= 1
        self._num_finished += 1
        if self._num_finished > 64 and self._num_finished > self._waiting:
            for heap in (self._resumed, self._late, self._on_time):
                heap[:] = [entry for entry in heap if entry[1].phase is Phase.WAITING]
                heapq.heapify(heap)
            self._num_finished = 0

    def rank(self, request: ScheduledRequest, now: float) -> Rank:
        """Return the rank of a request that waits or is under way; the smallest goes first."""
        priority, arrival = _level(request)
        if request.num_outputs:
            return (priority, 0, 0.0, arrival)
        if now > request.record.received_s + PATIENCE * self._ttft_s:
            return (priority, 1, 0.0, arrival)
        waiting = request.phase is Phase.WAITING
        if now <= (request.start_by_s if waiting else self._start_by(request)):
            return (priority, 2, request.start_by_s, arrival)
        return (priority, 3, 0.0, arrival)

    def _start_by(self, request: ScheduledRequest) -> float:
        return request.record.received_s + self._ttft_s - self._left_s(request)

    def _head(self, heap: Heap) -> ScheduledRequest | None:
        while heap and heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(heap)
            self._num_finished -= 1
        return heap[0][1] if heap else None


def _level(request: ScheduledRequest) -> tuple[int, int]:
    """Return the aged priority of a request (`Scheduler.add`) in whole levels, and its arrival."""
    aged, arrival = request.order
    return math.floor(aged), arrival
