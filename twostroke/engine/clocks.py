"""`RemoteClock`: the monotonic clock of another process.

All processes of one machine share one monotonic clock. The clock of another machine began at
another time, so times are converted when messages arrive and when requests are sent.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import monotonic

from twostroke.observe.record import RequestRecord, StepRecord
from twostroke.request import EngineRequest

# The number of recent messages that are compared: half a minute of heartbeats. In that time clocks
# drift by less than the transit time of a message.
MAX_SAMPLES = 64


@cache
def clock_id() -> str:
    """Return an identifier of the monotonic clock, equal in all processes that share the clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return "one machine"  # without /proc, all processes count as being on one machine


class RemoteClock:
    """Converts times between the clocks of two processes. `ahead_s`: the difference between our
    clock and theirs, estimated from the message with the shortest transit time."""

    def __init__(self, their_clock_id: str) -> None:
        self._same = their_clock_id == clock_id()
        self._ahead: deque[float] = deque(maxlen=MAX_SAMPLES)

    def add_sample(self, their_s: float) -> None:
        """Add a message that was sent at `their_s` and has just arrived."""
        self._ahead.append(monotonic() - their_s)

    @property
    def ahead_s(self) -> float:
        return 0.0 if self._same or not self._ahead else min(self._ahead)

    def to_theirs(self, request: EngineRequest) -> EngineRequest:
        ahead_s = self.ahead_s
        if not ahead_s:
            return request
        resumed = request.resumed
        if resumed is not None:
            resumed = replace(resumed, last_s=resumed.last_s - ahead_s)
        return replace(
            request,
            received_s=request.received_s - ahead_s,
            tokenised_s=request.tokenised_s - ahead_s,
            resumed=resumed,
        )

    def step_to_ours(self, step: StepRecord) -> StepRecord:
        ahead_s = self.ahead_s
        if not ahead_s:
            return step
        return step._replace(
            planned_s=step.planned_s + ahead_s,
            launched_s=step.launched_s + ahead_s,
            committed_s=step.committed_s + ahead_s,
        )

    def record_to_ours(self, record: RequestRecord) -> None:
        ahead_s = self.ahead_s
        if not ahead_s:
            return
        for name in TIMES:
            if when := getattr(record, name):  # 0: it has not happened
                setattr(record, name, when + ahead_s)
        record.chunks = [(when + ahead_s, *rest) for when, *rest in record.chunks]  # type: ignore[misc]
        record.preempted = [(when + ahead_s, count) for when, count in record.preempted]
        record.token_s = array("d", (when + ahead_s for when in record.token_s))


TIMES = (
    "received_s",
    "tokenised_s",
    "queued_s",
    "scheduled_s",
    "first_token_s",
    "finished_s",
    "sent_s",
)
