"""Pools grow quickly and shrink slowly, within their bounds, on a virtual clock."""

from __future__ import annotations

import itertools
import random

import pytest

from twostroke.errors import ConfigError
from twostroke.route.autoscale import REST_S, SHRINK_AFTER_S, Autoscaler, Bounds

STEP_S = 30.0


class Pools:
    """Pools that follow the decisions, and the advices over time."""

    def __init__(self, low: int, high: int, **counts: int) -> None:
        self.scaler, self.counts, self.now_s = Autoscaler(Bounds(low, high)), counts, 0.0
        self.changes: list[tuple[float, dict[str, int], str]] = []

    def advise(self, times: int = 1, **wanted: int) -> None:
        for _ in range(times):
            decision = self.scaler.decide(self.now_s, self.counts, wanted, f"{wanted} are enough")
            if decision is not None:
                self.counts |= decision.counts
                self.changes.append((self.now_s, decision.counts, decision.why))
            self.now_s += STEP_S


def test_two_advices_in_a_row_grow_a_pool() -> None:
    pools = Pools(1, 4, both=1)
    pools.advise(both=3)
    assert pools.counts == {"both": 1}
    pools.advise(both=2)
    assert pools.counts == {"both": 2}  # what both advices want
    assert pools.changes == [(STEP_S, {"both": 2}, "{'both': 2} are enough")]


def test_one_burst_changes_nothing() -> None:
    pools = Pools(1, 4, both=1)
    for _ in range(10):
        pools.advise(both=4)
        pools.advise(both=1)
    assert not pools.changes


def test_a_pool_shrinks_when_fewer_were_enough_for_long() -> None:
    pools = Pools(1, 4, both=4)
    pools.advise(times=int(SHRINK_AFTER_S / STEP_S), both=1)
    assert not pools.changes
    pools.advise(both=1)
    assert pools.changes == [(SHRINK_AFTER_S, {"both": 1}, "{'both': 1} are enough")]


def test_a_pool_shrinks_to_the_most_that_was_wanted_in_that_time() -> None:
    pools = Pools(1, 8, both=6)
    pools.advise(times=4, both=2)
    pools.advise(both=3)
    pools.advise(times=6, both=2)
    assert pools.counts == {"both": 3}
    # The advices before the change do not count.
    pools.advise(times=int((REST_S + SHRINK_AFTER_S) / STEP_S) - 1, both=2)
    assert pools.counts == {"both": 3}
    pools.advise(times=2, both=2)
    assert pools.counts == {"both": 2}


def test_after_a_change_the_pools_rest() -> None:
    pools = Pools(1, 8, both=1)
    pools.advise(times=2, both=2)
    assert pools.counts == {"both": 2}
    changed_s = pools.changes[0][0]
    while pools.now_s < changed_s + REST_S:  # its records still have one engine
        pools.advise(both=4)
        assert pools.counts == {"both": 2}
    pools.advise(times=2, both=4)
    assert pools.counts == {"both": 4}


def test_pools_change_apart_and_within_their_bounds() -> None:
    pools = Pools(2, 5, prefill=2, decode=3)
    pools.advise(times=2, prefill=9, decode=3)
    assert pools.counts == {"prefill": 5, "decode": 3}
    pools.advise(times=20, prefill=5, decode=1)
    assert pools.counts == {"prefill": 5, "decode": 2}
    assert [one[1] for one in pools.changes] == [{"prefill": 5}, {"decode": 2}]


@pytest.mark.parametrize(("count", "becomes"), [(1, 2), (6, 4)])
def test_a_pool_outside_of_its_bounds_is_brought_back_at_once(count: int, becomes: int) -> None:
    pools = Pools(2, 4, both=count)
    pools.advise(both=count)
    assert pools.counts == {"both": becomes}
    assert pools.changes[0][2] == "a pool has from 2 to 4 engines"


def test_no_sequence_of_advices_makes_pools_swing() -> None:
    for seed in range(50):
        rng, pools = random.Random(seed), Pools(1, 6, prefill=2, decode=2)
        for _ in range(200):
            pools.advise(prefill=rng.randint(1, 6), decode=rng.randint(1, 6))
            assert all(1 <= count <= 6 for count in pools.counts.values())
        times = [at_s for at_s, *_ in pools.changes]
        assert all(after - before >= REST_S for before, after in itertools.pairwise(times))
        again = Pools(1, 6, prefill=2, decode=2)
        rng = random.Random(seed)
        for _ in range(200):
            again.advise(prefill=rng.randint(1, 6), decode=rng.randint(1, 6))
        assert again.changes == pools.changes  # the same advices, the same decisions


@pytest.mark.parametrize("text", ["", "4", "1-4", "0:4", "4:1", "1:65", "a:b", "-1:2", "1:4:6"])
def test_wrong_bounds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"autoscale .* give "):
        Bounds.read(text)
    assert Bounds.read("1:4") == Bounds(1, 4)
