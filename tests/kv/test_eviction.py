"""The blocks that each eviction policy gives up."""

from __future__ import annotations

import pytest

from twostroke.kv.cache import GroupLimits, KVCache, KVSequence
from twostroke.kv.eviction import Eviction


def test_sinks_give_up_the_oldest_blocks_after_the_first() -> None:
    policy = Eviction(6)
    assert policy.evicted(6) == []
    assert policy.evicted(7) == [range(1, 2)]
    assert policy.evicted(20) == [range(1, 15)]


def test_heavy_hitters_give_up_the_stretches_with_the_least_attention() -> None:
    policy = Eviction(32, segment_blocks=4)  # 8 stretches: the first, 3 that compete, the newest 4
    scores = [9.0, 0.3, 0.1, 0.2, 0.5, 0.0, 0.0, 0.0]
    assert policy.evicted(32, scores) == []
    assert policy.evicted(33, scores) == [range(8, 12)]
    # Two must go for five blocks more; the last is named first, so that it moves no other.
    assert policy.evicted(37, scores) == [range(12, 16), range(8, 12)]
    assert policy.evicted(33, [0.0, 5.0, 5.0, 5.0]) == [range(4, 8)]  # of equal ones the oldest
    assert policy.evicted(33) == [range(4, 8)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_heavy_hitters_find_enough_for_any_prompt(size: int) -> None:
    for budget in range(4 * size, 12 * size):
        policy = Eviction(budget, size)
        for blocks in range(1, 5 * budget):
            gone = policy.evicted(blocks)
            assert blocks - sum(map(len, gone)) <= budget
            assert all(one.start >= size for one in gone)
            assert all(one.stop <= blocks - budget // 2 // size * size for one in gone)


def test_evicted_blocks_are_free_when_the_step_that_named_them_has_committed() -> None:
    kv = KVCache([GroupLimits(8)], 4, eviction=Eviction(4))
    seq = KVSequence(b"seed")
    kv.open(seq, [[]])
    assert kv.reserve(seq, 16) == 4
    kv.advance(seq, 16, step=0)
    before = list(seq.tables[0])
    kv.evict(seq, kv.excess(seq))
    assert seq.tables[0] == [before[0], *before[2:]]
    assert (seq.num_evicted, seq.capacity) == (4, 16)
    assert kv.pools[0].num_free == 4
    kv.commit(0)
    assert kv.pools[0].num_free == 5
    assert kv.excess(seq) == []
    assert kv.reserve(seq, 17) == 1
    kv.advance(seq, 1, step=1)
    kv.register(seq, list(range(17)))
    assert seq.num_registered == 0  # what is computed now has not seen all
    kv.audit()
    kv.close(seq)
    kv.commit(1)
    assert kv.is_idle()
    assert seq.num_evicted == 0
