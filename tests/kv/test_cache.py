"""Blocks, prefixes and windows, by the numbers."""

from __future__ import annotations

import pytest

from tests.fakes import groups
from twostroke.kv import prefix
from twostroke.kv.cache import KVCache, KVSequence, KVUsage
from twostroke.kv.prefix import BlockKey, PrefixIndex, block_key, seed_digest

ROOT = seed_digest("salt", "")


def started(cache: KVCache, tokens: list[int], step: int = 0, seed: bytes | None = ROOT):
    """A sequence with all of `tokens` computed by `step`, and the tokens a prefix saved it."""
    seq = KVSequence(seed)
    cached = cache.open(seq, cache.match(seq, tokens))
    assert cache.reserve(seq, len(tokens)) is not None
    cache.advance(seq, len(tokens) - cached, step)
    cache.register(seq, tokens)
    cache.audit()
    return seq, cached


def test_a_prefix_is_found_again_block_by_block_and_leaves_one_token_to_compute() -> None:
    cache = KVCache(groups(16), 4)
    tokens = list(range(12))
    first, saved = started(cache, tokens)
    assert saved == 0
    second, saved = started(cache, tokens)
    assert saved == 8, "the third block holds the last token, which must be computed"
    assert second.tables[0][:2] == first.tables[0][:2]
    third, saved = started(cache, [*tokens, 12])
    assert saved == 12
    _, saved = started(cache, [*tokens[:6], 99, *tokens[7:]])
    assert saved == 4
    for seq in (first, second, third):
        cache.close(seq)
    cache.audit()


def test_another_salt_shares_nothing() -> None:
    cache = KVCache(groups(16), 4)
    started(cache, list(range(12)))
    _, saved = started(cache, list(range(12)), seed=seed_digest("salt", "tenant"))
    assert saved == 0


def test_salts_cannot_be_glued_together() -> None:
    assert seed_digest("a", "bc") != seed_digest("ab", "c")


def test_equal_digests_with_other_tokens_are_no_hit() -> None:
    """A collision is forged: the index compares tokens and refuses."""
    index = PrefixIndex()
    key = block_key(ROOT, [1, 2, 3, 4])
    index.register(5, key)
    assert index.find(key) == 5
    forged = BlockKey(key.digest, block_key(ROOT, [9, 9, 9, 9]).tokens)
    assert index.find(forged) is None


def test_a_collision_of_digests_never_shares_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, *_: object, **__: object) -> None: ...
        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(prefix, "blake2b", Constant)
    cache = KVCache(groups(16), 4)
    started(cache, [1, 2, 3, 4, 5])
    _, saved = started(cache, [6, 7, 8, 9, 10])
    assert saved == 0


def test_the_least_recently_used_prefix_is_evicted_first_and_tails_before_heads() -> None:
    cache = KVCache(groups(6), 2)
    old, _ = started(cache, [1, 2, 3, 4, 5])
    new, _ = started(cache, [6, 7, 8, 9, 10])
    cache.commit(0)
    cache.close(old)
    cache.close(new)
    assert cache.usage() == KVUsage(12, 0, 0, cached=8, free=4)
    taker, _ = started(cache, [20, 21, 22, 23, 24, 25], step=1)  # two free ones and one cached
    probe = KVSequence(ROOT)
    assert len(cache.match(probe, [1, 2, 3, 4, 5])[0]) == 1, (
        "the old one lost its tail, not its head"
    )
    assert len(cache.match(KVSequence(ROOT), [6, 7, 8, 9, 10])[0]) == 2
    cache.close(taker)


def test_usage_adds_up_and_shows_fragmentation() -> None:
    cache = KVCache(groups(10), 4)
    seq, _ = started(cache, list(range(9)))
    assert cache.usage() == KVUsage(reserved=40, used=9, fragmented=3, cached=0, free=28)
    cache.commit(0)
    cache.close(seq)
    assert cache.usage() == KVUsage(reserved=40, used=0, fragmented=0, cached=8, free=32)


def test_a_step_in_flight_owns_its_blocks_until_it_commits() -> None:
    cache = KVCache(groups(4), 4, keep_cached=False)
    seq, _ = started(cache, list(range(16)), step=7)
    cache.close(seq)
    assert cache.awaits_blocks
    assert cache.pools[0].num_available == 0
    assert cache.usage().used == 16
    cache.audit()
    cache.commit(6)
    assert cache.pools[0].num_available == 0
    cache.commit(7)
    assert cache.pools[0].num_available == 4
    assert not cache.awaits_blocks


def test_a_window_frees_what_no_later_token_can_see() -> None:
    cache = KVCache(groups(16, 6), 4)
    seq, _ = started(cache, list(range(16)))
    cache.commit(0)
    # The next token, 16, sees 11..16: blocks 0 and 1 (tokens 0..7) have passed.
    assert cache.drop_outside_windows(seq) == [(0, 2)]
    assert seq.tables[0][:2] == [0, 0]
    assert cache.usage() == KVUsage(reserved=64, used=8, fragmented=0, cached=8, free=48)
    assert cache.drop_outside_windows(seq) == []
    cache.audit()


def test_a_windowed_hit_needs_only_the_blocks_in_sight() -> None:
    cache = KVCache(groups(16, 4), 4)
    tokens = list(range(13))
    seq, _ = started(cache, tokens)
    cache.commit(0)
    cache.drop_outside_windows(seq)
    cache.close(seq)
    for block in list(cache.pools[0]._cached)[:2]:  # the blocks of tokens 0..7 are evicted
        cache.pools[0].prefix.forget(block)
        del cache.pools[0]._cached[block]
        cache.pools[0]._free.append(block)
    again = KVSequence(ROOT)
    table = cache.match(again, tokens)[0]
    assert table[:2] == [0, 0]
    assert table[2] != 0
    assert cache.open(again, [table]) == 12
    cache.audit()


def test_groups_with_different_windows_agree_on_one_prefix() -> None:
    cache = KVCache(groups(32, None, 4), 4)
    tokens = list(range(13))
    seq, _ = started(cache, tokens)
    cache.commit(0)
    cache.drop_outside_windows(seq)
    assert [len(t) for t in seq.tables] == [4, 4]
    assert seq.tables[0][0] != 0
    assert seq.tables[1][:2] == [0, 0]
    again, saved = started(cache, tokens, step=1)
    assert saved == 12
    assert again.tables[1][:2] == [0, 0]
    cache.audit()


def test_without_caching_a_prefix_is_shared_only_while_somebody_owns_it() -> None:
    cache = KVCache(groups(16), 4, keep_cached=False)
    first, _ = started(cache, list(range(12)))
    second, saved = started(cache, list(range(12)))
    assert saved == 8
    cache.commit(0)
    cache.close(first)
    cache.close(second)
    assert cache.usage().cached == 0
    assert started(cache, list(range(12)))[1] == 0


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda cache, seq: cache.pools[0].refs.__setitem__(seq.tables[0][0], 2),
            "claims 2 owners",
        ),
        (lambda cache, seq: cache.pools[0]._free.append(seq.tables[0][0]), "is free"),
        (lambda cache, seq: cache.pools[0]._free.pop(), "nowhere"),
        (lambda cache, seq: seq.tables[0].pop(), "differ"),
        (lambda cache, seq: setattr(cache, "_fragmented", 1), "fragmented is"),
    ],
)
def test_audit_notices(harm, message) -> None:  # type: ignore[no-untyped-def]
    cache = KVCache(groups(8), 4)
    seq, _ = started(cache, list(range(6)))
    harm(cache, seq)
    with pytest.raises(AssertionError, match=message):
        cache.audit()
