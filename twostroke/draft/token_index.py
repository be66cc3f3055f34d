"""`TokenIndex`: finds the earlier occurrences of the last tokens of a text.

    tokens      a b c d x a b c            the index of 2-grams: (b, c) ─▶ 8 ─▶ 3
                    ▲         ▲
      before: at 3 ─┘         └─ the end   2-gram (b, c) ends at 3: its match is a b c, `d` follows

The end of every n-gram of `gram` tokens is linked to the end of the previous n-gram with the same
hash. A search follows these links, newest first, and compares tokens backwards. The newest
`capacity` tokens are kept. Adding a token costs a few operations; a search compares at most
`MAX_CANDIDATES` places.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

MAX_CANDIDATES = 16  # places that a search compares
BREAK = -1  # between two texts: equal to no token
NOWHERE = -1
MASK = (1 << 61) - 1


class Matches(NamedTuple):
    """The places where the longest match with the end of a text ends."""

    length: int  # equal tokens; 0: there is no match
    ends: tuple[int, ...]  # where the match ends, newest first


NO_MATCHES = Matches(0, ())


class IndexBudget:
    """The number of tokens that indexes may add between two steps. Streams wait while tokens are
    added, and the prompts of many rows may begin to decode in the same step."""

    def __init__(self, per_step: int) -> None:
        self.per_step = self.left = per_step

    def renew(self) -> None:
        self.left = self.per_step


class TokenIndex:
    def __init__(self, gram: int, capacity: int) -> None:
        """`gram`: the shortest match that can be found."""
        self.gram, self.capacity = gram, capacity
        self.total = 0  # tokens added so far
        self._tokens = array("i")
        self._before = array("q")  # end of an n-gram → previous end with the same hash
        self._newest: dict[int, int] = {}  # hash → newest end

    @property
    def oldest(self) -> int:
        """The first position that is still kept."""
        return max(0, self.total - self.capacity)

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._put(token)

    def catch_up(self, text: Sequence[int], budget: IndexBudget | None) -> bool:
        """Add the tokens of a growing text that are not in the index yet, as far as the budget
        allows. Return whether the index has all tokens. `budget` None: no limit."""
        missing = len(text) - self.total
        count = missing if budget is None else min(missing, budget.left)
        self.add(islice(text, self.total, self.total + count))
        if budget is not None:
            budget.left -= count
        return count == missing

    def end_text(self) -> None:
        """End a text, so that no match crosses its end."""
        if self.total:
            self._put(BREAK)

    def _put(self, token: int) -> None:
        at, capacity, gram = self.total, self.capacity, self.gram
        if at < capacity:
            self._tokens.append(token)
            self._before.append(NOWHERE)
        else:
            self._forget_oldest()
            self._tokens[at % capacity] = token
            self._before[at % capacity] = NOWHERE
        self.total = end = at + 1
        if end - gram < self.oldest:
            return
        key = self._key_at(end - gram)
        if key is not None:
            self._before[at % capacity] = self._newest.get(key, NOWHERE)
            self._newest[key] = end

    def _forget_oldest(self) -> None:
        """Remove the n-gram of the oldest token, which is about to be replaced."""
        start = self.total - self.capacity
        if self.gram <= self.capacity:
            key = self._key_at(start)
            if key is not None and self._newest.get(key) == start + self.gram:
                del self._newest[key]

    def _key_at(self, start: int) -> int | None:
        """Return the hash of the n-gram that starts here; None if a text ends in it."""
        key = 0
        for n in range(start, start + self.gram):
            one = self._tokens[n % self.capacity]
            if one == BREAK:
                return None
            key = (key * 0x9E3779B97F4A7C15 + one + 1) & MASK
        return key

    def search(self, tail: Sequence[int], max_length: int, at_end: bool = False) -> Matches:
        """Return the places of the longest match with the end of `tail`, of at least `gram` and at
        most `max_length` tokens. `at_end`: the tail is the end of the indexed text, which does not
        count as a place."""
        gram, capacity, tokens = self.gram, self.capacity, self._tokens
        size = len(tail)
        if size < gram:
            return NO_MATCHES
        key = 0
        for one in tail[size - gram :]:
            key = (key * 0x9E3779B97F4A7C15 + one + 1) & MASK
        end, oldest, longest = self._newest.get(key, NOWHERE), self.oldest, 0
        ends: list[int] = []
        for _ in range(MAX_CANDIDATES + at_end):
            if end <= oldest:
                break
            if not (at_end and end == self.total):
                reach = min(max_length, size, end - oldest)
                length = 0
                while (
                    length < reach
                    and tokens[(end - 1 - length) % capacity] == (tail[size - 1 - length])
                ):
                    length += 1
                if length >= gram:
                    if length > longest:
                        longest, ends = length, []
                    if length == longest:
                        ends.append(end)
            end = self._before[(end - 1) % capacity]
        return Matches(longest, tuple(ends)) if ends else NO_MATCHES

    def after(self, end: int) -> Iterator[int]:
        """Yield the tokens from position `end` on, to the end of their text."""
        for at in range(end, self.total):
            token = self._tokens[at % self.capacity]
            if token == BREAK:
                return
            yield token
