"""Advice for a server's pools, from records with a known truth."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.test_steptimes import records
from twostroke.errors import ConfigError
from twostroke.planner.advice import advise, trace_of

# A prompt of 300 tokens takes 64 ms of an engine, a step of decode 4 to 11 ms.
ENGINE = {
    "kv_tokens": 8192,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "kv_bytes": 8192 * 1000,
}


def asked(rate: float, counts: dict[str, int], open_requests: int = 0, **more: Any) -> Any:
    ended = [[100.0 + n / rate, 300, 4, []] for n in range(60)]
    waiting = [[100.0 + (60 + n) / rate, 300, None, []] for n in range(open_requests)]
    return {
        "records": records() | ENGINE,
        "requests": ended + waiting,
        "counts": counts,
        "goals": {"ttft_s": 0.3},
        "target": 0.9,
        "max_engines": 8,
    } | more


def test_as_many_engines_are_advised_as_the_load_needs() -> None:
    found = {}
    for rate in (2.0, 60.0):
        found[rate] = advise(asked(rate, {"data_parallel_size": 2}))
    engines = {rate: one["advice"]["data_parallel_size"] for rate, one in found.items()}
    assert engines[2.0] == 1 < engines[60.0]
    assert "1 engine are enough" in found[2.0]["why"].replace("engines", "engine")
    assert "2 engines meet the goals for" in found[60.0]["why"]
    assert found[60.0]["forecast_now"]["met"]["expected"] < 0.9
    assert found[60.0]["forecast"]["met"]["low"] >= 0.9


@pytest.mark.long
def test_requests_that_have_not_ended_count_too() -> None:
    """In an overload few requests end, and many wait."""
    some = advise(asked(40.0, {"data_parallel_size": 1}))
    more = advise(asked(40.0, {"data_parallel_size": 1}, open_requests=60))
    assert more["requests"] == 120
    assert more["advice"]["data_parallel_size"] >= some["advice"]["data_parallel_size"]


@pytest.mark.full
def test_pools_are_advised_one_by_one() -> None:
    found = advise(asked(30.0, {"prefill": 1, "decode": 1}))
    assert found["advice"]["prefill"] > found["advice"]["decode"] == 1
    assert found["meets_goals"]


@pytest.mark.long
def test_goals_that_no_number_meets_are_told() -> None:
    found = advise(asked(30.0, {"data_parallel_size": 1}, goals={"ttft_s": 1e-3}, max_engines=3))
    assert found["advice"] == {"data_parallel_size": 3}
    assert not found["meets_goals"]
    assert "are the most that are allowed, and not enough" in found["why"]
    same = advise(asked(30.0, {"data_parallel_size": 3}, goals={"ttft_s": 1e-3}, max_engines=3))
    assert "more engines are not allowed" in same["why"]


def test_prompts_with_the_same_marks_share_their_first_blocks() -> None:
    rows = [
        [1.0, 300, 4, ["a64", "a128", "a256"]],
        [2.0, 300, 4, ["a64", "a128", "b256"]],
        [3.0, 300, 4, ["a64"]],
        [4.0, 300, 4, []],
        [5.0, 300, 4, ["c64"]],
    ]
    first, second, short, none, other = (one.blocks for one in trace_of(rows))
    assert len(first) == len(second) == 4  # of 64 tokens
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])
    assert short == first[:1]
    assert none == ()
    assert not set(other) & set(first + second)


@pytest.mark.full
def test_shared_beginnings_need_fewer_engines() -> None:
    marks = ["a64", "a128", "a256"]
    alone = asked(60.0, {"data_parallel_size": 1})
    shared = asked(60.0, {"data_parallel_size": 1})
    for row in shared["requests"]:
        row[3] = marks
    engines = [advise(one)["advice"]["data_parallel_size"] for one in (alone, shared)]
    assert engines[1] < engines[0]


def test_too_few_requests_give_no_advice() -> None:
    few = asked(30.0, {"data_parallel_size": 1})
    few["requests"] = few["requests"][:3]
    with pytest.raises(ConfigError, match="3 requests have ended in this time"):
        advise(few)
