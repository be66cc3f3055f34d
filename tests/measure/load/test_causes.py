"""Causes of gaps: what the client saw against records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.measure.load.causes import caused_gaps, summary
from twostroke.measure.load.definitions import Sample


def step(number: int, **since: float) -> dict[str, Any]:
    parts = {"decode": 0.0, "prefill": 0.0, "preemption": 0.0, "host": 0.0}
    return {"step": number, "since_s": parts | since}


def request(tokens: list[float], steps: list[int], name: str = "cmpl-a-00000000") -> dict[str, Any]:
    return {"request_id": name, "n": 1, "token_s": tokens, "token_step": steps}


def sample(times: list[float]) -> Sample:
    return Sample(0.0, 0.0, times, request_id="cmpl-a")


def test_the_largest_part_of_a_gap_is_its_cause() -> None:
    steps = [
        step(2, decode=0.010, host=0.001),
        step(3, decode=0.010, prefill=0.030),
        step(4, decode=0.010, prefill=0.010),  # it had no slot in this one
        step(5, decode=0.005, host=0.003),
    ]
    # The server's clock is another: what counts are differences.
    one = request([100.0, 100.011, 100.051, 100.079], [1, 2, 3, 5])
    records = {"steps": steps, "requests": [one]}
    gaps = caused_gaps([sample([1.0, 1.011, 1.051, 1.379])], records)
    assert [gap.cause for gap in gaps] == ["decode", "prefill", "outside"]
    last = gaps[-1].parts
    assert last is not None
    assert last["preemption"] == pytest.approx(0.020)
    assert last["outside"] == pytest.approx(0.300)
    for gap in gaps:
        assert gap.parts is not None
        assert sum(gap.parts.values()) == pytest.approx(gap.gap_s)
    found = summary(gaps)
    assert found is not None
    assert found["known_share"] == 1.0
    assert found["seconds"]["prefill"] == pytest.approx(0.030)


def test_an_event_with_several_tokens_has_all_their_causes() -> None:
    steps = [step(n, decode=0.010) for n in (2, 3, 4)]
    one = request([5.0, 5.010, 5.020, 5.030], [1, 2, 3, 4])
    (gap,) = caused_gaps([sample([9.0, 9.030])], {"steps": steps, "requests": [one]})
    assert gap.parts is not None
    assert gap.parts["decode"] == pytest.approx(0.030)
    assert gap.parts["outside"] == pytest.approx(0.0, abs=1e-9)


def test_what_the_records_do_not_reach_is_not_known() -> None:
    one = request([5.0, 5.010, 5.020], [1, 2, 3])
    times = sample([1.0, 1.010, 1.020])
    gaps = caused_gaps([times], {"steps": [step(3, decode=0.01)], "requests": [one]})
    assert [gap.cause for gap in gaps] == ["not known", "decode"]
    assert summary(caused_gaps([times], None)) is None
    other = {"steps": [], "requests": [request([5.0], [1], "cmpl-b-00000000")]}
    assert [gap.cause for gap in caused_gaps([times], other)] == ["not known"] * 2


def test_tokens_without_a_text_have_no_gaps() -> None:
    """A request that ends in the middle of a character: its answer has no events."""
    records = {"steps": [step(3, decode=0.01)], "requests": [request([5.0], [3])]}
    assert caused_gaps([sample([])], records) == []
