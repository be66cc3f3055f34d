"""Times of an engine whose machine's clock began at another time."""

from __future__ import annotations

from array import array
from time import monotonic

import pytest

from twostroke import SamplingParams
from twostroke.engine.clocks import TIMES, RemoteClock, clock_id
from twostroke.observe.record import RequestRecord
from twostroke.request import EngineRequest, Resumed

AHEAD_S = 5000.0  # our clock began so much earlier


def record(of_s: float) -> RequestRecord:
    return RequestRecord(
        "a",
        3,
        of_s,
        queued_s=of_s + 1,
        first_token_s=of_s + 2,
        finished_s=of_s + 4,
        chunks=[(of_s + 1.5, 7, 0, 3)],
        preempted=[(of_s + 2.5, 9)],
        token_s=array("d", [of_s + 2, of_s + 3]),
    )


def times_of(one: RequestRecord) -> list[float]:
    own = [getattr(one, name) for name in TIMES]
    return [*own, *one.token_s, one.chunks[0][0], one.preempted[0][0]]


def test_times_are_the_same_after_a_round_trip() -> None:
    clock = RemoteClock("another machine")
    for late_s in (0.3, 0.0, 2.0):  # the message that came soonest counts
        clock.add_sample(monotonic() - AHEAD_S - late_s)
    assert clock.ahead_s == pytest.approx(AHEAD_S, abs=0.2)
    there = clock.to_theirs(
        EngineRequest(
            "a", (1,), SamplingParams(), 0, received_s=9000.0, resumed=Resumed((4,), 9001.0)
        )
    )
    assert there.received_s == pytest.approx(4000.0, abs=0.2)
    assert there.resumed is not None
    assert there.resumed.last_s == pytest.approx(4001.0, abs=0.2)
    told, expected = record(4000.0), record(9000.0)
    clock.record_to_ours(told)
    assert times_of(told) == pytest.approx(times_of(expected), abs=0.2)
    assert told.sent_s == 0, "it has not been sent"
    assert told.chunks[0][1:] == (7, 0, 3)


def test_processes_of_one_machine_have_one_clock() -> None:
    clock = RemoteClock(clock_id())
    clock.add_sample(monotonic() - 3)
    assert clock.ahead_s == 0
    request = EngineRequest("a", (1,), SamplingParams(), 0, received_s=9.0)
    assert clock.to_theirs(request) is request
