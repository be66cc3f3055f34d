"""Blocks, prefixes and windows, by the numbers."""

from __future__ import annotations

import random

import pytest

from tests.fakes import groups
from twostroke.kv import prefix
from twostroke.kv.cache import GroupLimits, KVCache, KVSequence, blocks_held
from twostroke.kv.prefix import BlockKey, PrefixIndex, PromptKeys, block_key, seed_digest
from twostroke.kv.usage import KVUsage

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


def test_keys_of_a_prompt_that_begins_like_another_are_those_of_the_chain() -> None:
    chosen = random.Random(0)
    recent = PromptKeys(4, max_blocks=40)
    prompts = [[chosen.randrange(3) for _ in range(80)] for _ in range(3)]
    for _ in range(300):
        known = chosen.choice(prompts)
        prompt = known[: chosen.randrange(80)] + [chosen.randrange(3) for _ in range(20)]
        prompt = prompt[: len(prompt) // 4 * 4]
        seed = seed_digest("salt", chosen.choice("ab"))
        expected, parent = [], seed
        for start in range(0, len(prompt), 4):
            expected.append(block_key(parent, prompt[start : start + 4]))
            parent = expected[-1].digest
        assert recent.of(seed, prompt) == expected
        assert recent._num_blocks == sum(len(keys) for _, keys in recent._recent.values()) <= 40


def test_keys_of_a_known_prefix_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, compute = [], prefix._key
    monkeypatch.setattr(prefix, "_key", lambda *args: computed.append(args) or compute(*args))
    recent, prompt = PromptKeys(4), list(range(400))
    assert len(recent.of(ROOT, prompt)) == len(computed) == 100
    computed.clear()
    assert len(recent.of(ROOT, [*prompt[:200], *range(900, 908)])) == 52
    assert len(computed) == 3  # the first block, and the two new blocks


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


def test_a_group_without_blocks_leaves_the_others_as_they_were() -> None:
    cache = KVCache([GroupLimits(8), GroupLimits(3, 4)], 4)
    seq, _ = started(cache, list(range(11)))
    assert cache.group_usage() == [
        KVUsage(reserved=32, used=11, fragmented=1, cached=0, free=20),
        KVUsage(reserved=12, used=11, fragmented=1, cached=0, free=0),
    ]
    assert cache.usage() == KVUsage(reserved=44, used=22, fragmented=2, cached=0, free=20)
    assert cache.tokens_available == 0
    assert cache.reserve(seq, 13) is None
    assert cache.group_usage()[0].free == 20
    assert [len(table) for table in seq.tables] == [3, 3]
    cache.audit()
    cache.commit(0)
    assert cache.drop_outside_windows(seq) == [(1, 2)]  # the next token, 11, sees 8..11
    assert cache.reserve(seq, 13) == 1
    cache.audit()


def test_block_numbers_belong_to_their_group() -> None:
    cache = KVCache(groups(4, None, 100), 4)
    seq, _ = started(cache, list(range(8)))
    assert seq.tables == [[1, 2], [1, 2]]


@pytest.mark.parametrize("window", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sequence_never_holds_more_blocks_than_it_is_said_to(
    window: int, chunk: int, size: int
) -> None:
    most, seen = blocks_held(1000, window, chunk, size), 0
    for ahead in range(size):  # wherever in a block the chunks begin
        cache = KVCache([GroupLimits(most, window)], size, keep_cached=False, max_chunk=chunk)
        seq = KVSequence(None)
        cache.open(seq, [[]])
        for step, count in enumerate([1] * ahead + [chunk] * 30):
            cache.drop_outside_windows(seq)
            assert cache.reserve(seq, seq.num_computed + count) is not None
            cache.advance(seq, count, step)
            cache.commit(step)
            seen = max(seen, most - cache.pools[0].num_free)
    assert seen == most


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6), (None, 4, 9), (3, 8), (7, None)])
@pytest.mark.parametrize("seed", range(6))
def test_prefix_hits_are_those_of_a_simple_model(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    """The model: for each group, the prefix that each registered block ends."""
    rng, size = random.Random(seed), 2
    cache = KVCache([GroupLimits(rng.randint(14, 24), w) for w in windows], size, max_chunk=16)
    model: list[dict[int, list[int]]] = [{} for _ in windows]
    running: list[KVSequence] = []
    hits = 0
    for step in range(250):
        tokens = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randint(1, 16))]
        seq = KVSequence(ROOT)
        tables = cache.match(seq, tokens)
        expected = longest_hit(model, tokens, windows, size)
        assert [len(table) for table in tables] == [expected] * len(windows)
        hits += expected > 0
        for group, table in enumerate(tables):
            for n, block in enumerate(table):
                assert block == 0 or model[group][block] == tokens[: (n + 1) * size]
        cached = cache.open(seq, tables)
        running.append(seq)
        grown = cache.reserve(seq, len(tokens))
        if grown is not None:
            cache.advance(seq, len(tokens) - cached, step)
            for group, table in enumerate(seq.tables):
                for block in table[len(table) - grown :]:
                    model[group].pop(block, None)  # it was evicted, if it was registered
                for n in range(expected, len(tokens) // size):
                    if tokens[: (n + 1) * size] not in model[group].values():
                        model[group][table[n]] = tokens[: (n + 1) * size]
            cache.register(seq, tokens)
            cache.drop_outside_windows(seq)
        cache.commit(step)
        while len(running) > rng.randint(0, 2):
            cache.close(running.pop(rng.randrange(len(running))))
        cache.audit()
    assert hits > 20


def longest_hit(
    model: list[dict[int, list[int]]],
    tokens: list[int],
    windows: tuple[int | None, ...],
    size: int,
) -> int:
    for count in range((len(tokens) - 1) // size, 0, -1):
        at = count * size
        if all(
            tokens[: (n + 1) * size] in model[group].values()
            for group, window in enumerate(windows)
            for n in range(0 if window is None else max(0, at - window + 1) // size, count)
        ):
            return count
    return 0


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
