"""The index of n-grams against a search through the whole text."""

from __future__ import annotations

import random

import pytest

from twostroke.draft.token_index import MAX_CANDIDATES, TokenIndex


def longest_match(text: list[int], tail: list[int], gram: int, most: int) -> int:
    """The definition: the longest end of `tail` that ends somewhere in `text`."""
    best = 0
    for end in range(len(text) + 1):
        length = 0
        while length < min(most, end, len(tail)) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= gram else 0


@pytest.mark.parametrize("gram", [1, 2, 3])
def test_the_longest_match_is_found(gram: int) -> None:
    rng = random.Random(gram)
    for _ in range(200):
        text = [rng.randrange(5) for _ in range(rng.randint(0, MAX_CANDIDATES))]
        tail = [rng.randrange(5) for _ in range(rng.randint(0, 8))]
        index = TokenIndex(gram, 1000)
        index.add(text)
        found = index.search(tail, 6)
        assert found.length == longest_match(text, tail, gram, 6)
        for end in found.ends:
            assert text[end - found.length : end] == tail[len(tail) - found.length :]
            assert list(index.after(end)) == text[end:]


def test_the_end_of_the_text_itself_does_not_count() -> None:
    index = TokenIndex(2, 100)
    text = [1, 2, 3, 1, 2]
    index.add(text)
    found = index.search(text, 8, at_end=True)
    assert found == (2, (2,))
    assert list(index.after(2)) == [3, 1, 2]


def test_the_index_of_a_full_text_has_no_more_ngrams_than_tokens() -> None:
    """An n-gram leaves the index with its first token; nothing is tidied up now and then."""
    rng = random.Random(0)
    index = TokenIndex(2, 64)
    for n in range(1000):
        index.add([rng.randrange(500)])
        if n % 37 == 0:
            index.end_text()
        assert len(index._newest) <= 64
        assert min(index._newest.values(), default=2) >= index.oldest + 2


def test_no_match_reaches_over_the_end_of_a_text() -> None:
    index = TokenIndex(2, 100)
    index.add([1, 2])
    index.end_text()
    index.add([3, 4])
    assert index.search([2, 3], 8).length == 0
    assert index.search([1, 2], 8).ends == (2,)
    assert list(index.after(2)) == []


def test_the_newest_tokens_are_kept_and_memory_is_bounded() -> None:
    rng = random.Random(0)
    index, text = TokenIndex(2, 64), [rng.randrange(6) for _ in range(2000)]
    index.add(text)
    kept = text[-64:]
    assert len(index._tokens) == len(index._before) == 64
    assert len(index._newest) <= 2 * 64
    for start in range(0, 60, 3):
        found = index.search(kept[start : start + 4], 4)
        assert found.length == 4, "a match within the kept tokens is found"
        for end in found.ends:
            assert text[end - 4 : end] == kept[start : start + 4]
    index.add(range(100, 164))
    assert index.search(kept[10:14], 4).length == 0, "older tokens are gone"
