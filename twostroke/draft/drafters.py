"""Three drafters that search texts on the host.

    NgramDrafter      finds an earlier occurrence of the last few tokens of the text, and offers the
                      tokens that followed there
    SuffixDrafter     finds the longest end of the text that occurs in this or an earlier text, and
                      offers the most frequent continuation
    PredictedDrafter  offers the text that the client expects (OpenAI's `prediction`)

A drafter keeps a state for each request, and the tokens of a request only grow.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from twostroke.draft.interface import DraftOffer, DraftRow, Text
from twostroke.draft.token_index import NO_MATCHES, IndexBudget, Matches, TokenIndex

TEXT_CAPACITY = 1 << 20  # tokens of one text that its own index keeps
SHARED_CAPACITY = 1 << 18  # tokens of ended requests that are kept, over all salts
MAX_SALTS = 64


class HostState(Protocol):
    """The state of one request in a drafter that searches texts."""

    def propose(self, max_tokens: int) -> DraftOffer | None: ...


class HostDrafter:
    """A drafter that searches texts, one row at a time."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftOffer | None]:
        return [row.state.propose(row.max_tokens) for row in rows]


def _bucket(length: int) -> int:
    """Group match lengths by acceptance: 1, 2, …, 7, then 8 to 11, 12 to 15, 16 and more."""
    return length if length < 8 else min(length // 4, 4) * 4


# ── n-gram ──────────────────────────────────────────────────────────────────────────────────


class NgramDrafter(HostDrafter):
    name = "ngram"

    def __init__(self, shortest: int, longest: int, budget: IndexBudget | None = None) -> None:
        self._shortest, self._longest, self._budget = shortest, longest, budget

    def open(self, text: Text) -> HostState | None:
        return _NgramState(text, self._shortest, self._longest, self._budget)

    def close(self, text: Text) -> None: ...


class _NgramState:
    def __init__(self, text: Text, shortest: int, longest: int, budget: IndexBudget | None) -> None:
        self._text, self._longest, self._budget = text, longest, budget
        self._index = TokenIndex(shortest, TEXT_CAPACITY)

    def propose(self, max_tokens: int) -> DraftOffer | None:
        index, tokens = self._index, self._text.tokens
        if not index.catch_up(tokens, self._budget):
            return None
        found = index.search(tokens, self._longest, at_end=True)
        if not found.length:
            return None
        tokens_after = list(islice(index.after(found.ends[0]), max_tokens))
        # If fewer than `max_tokens` tokens follow the match, the text repeats itself with this
        # period.
        period = len(tokens_after)
        while period and len(tokens_after) < max_tokens:
            tokens_after.append(tokens_after[len(tokens_after) - period])
        if not tokens_after:
            return None
        bucket, count = _bucket(found.length), len(tokens_after)
        keys = tuple(("ngram", bucket, min(n, 6)) for n in range(count))
        return DraftOffer("ngram", tuple(tokens_after), keys, (0.6,) * count)


# ── suffix ──────────────────────────────────────────────────────────────────────────────────


class SuffixDrafter(HostDrafter):
    """Searches the text of the request, and prompts and outputs of ended requests of its salt."""

    name = "suffix"

    def __init__(
        self,
        depth: int,
        factor: float = 1.0,
        min_prob: float = 0.1,
        max_requests: int = 10_000,
        shared_capacity: int = SHARED_CAPACITY,
        gram: int = 2,
        budget: IndexBudget | None = None,
    ) -> None:
        self.depth, self.factor, self.min_prob, self.budget = depth, factor, min_prob, budget
        self._gram = min(gram, depth)
        self._max_requests = max_requests
        self._capacity = shared_capacity
        # By salt, the least recently used first. All together have at most `_capacity` tokens.
        self._shared: OrderedDict[str, TokenIndex] = OrderedDict()
        self._requests: OrderedDict[str, int] = OrderedDict()
        # Ended texts that wait for the budget, with their salts: at most `_capacity` tokens.
        self._ended: deque[tuple[str, array[int]]] = deque()
        self._num_ended = 0  # tokens in `_ended`
        self._ended_done = 0  # tokens of the first text of `_ended` that are in an index

    @property
    def num_shared(self) -> int:
        """Tokens of ended requests that are kept."""
        return sum(min(one.total, one.capacity) for one in self._shared.values())

    def shared(self, salt: str) -> TokenIndex | None:
        return self._shared.get(salt)

    def open(self, text: Text) -> HostState | None:
        return _SuffixState(self, text, self._gram)

    def close(self, text: Text) -> None:
        """Keep the text for later requests of its salt."""
        if not self._max_requests or len(text.tokens) <= text.num_prompt:
            return
        tokens = array("i", text.tokens[-self._capacity :])
        self._ended.append((text.salt, tokens))
        self._num_ended += len(tokens)
        while self._num_ended > self._capacity:
            self._pop_ended()
        self.index_ended()

    def index_ended(self) -> None:
        """Add ended texts to the indexes of their salts, as far as the budget allows."""
        while self._ended and (self.budget is None or self.budget.left):
            salt, tokens = self._ended[0]
            index = self._shared.get(salt) if self._ended_done else self._index_for(salt)
            count = len(tokens) - self._ended_done
            if self.budget is not None:
                count = min(count, self.budget.left)
                self.budget.left -= count
            if index is not None:  # None: the index was dropped for a newer salt
                index.add(islice(tokens, self._ended_done, self._ended_done + count))
            self._ended_done += count
            if self._ended_done == len(tokens):
                self._pop_ended()
            self._drop_oldest_salts()

    def _pop_ended(self) -> None:
        _, tokens = self._ended.popleft()
        self._num_ended -= len(tokens)
        self._ended_done = 0

    def _index_for(self, salt: str) -> TokenIndex:
        """Return the index that takes the next ended text of this salt."""
        index = self._shared.get(salt)
        if index is None:
            index = self._shared[salt] = TokenIndex(self._gram, self._capacity)
        self._shared.move_to_end(salt)
        if self._requests.get(salt, 0) >= self._max_requests:  # begin again with an empty index
            index = self._shared[salt] = TokenIndex(self._gram, self._capacity)
            self._requests[salt] = 0
        index.end_text()
        self._requests[salt] = self._requests.get(salt, 0) + 1
        return index

    def _drop_oldest_salts(self) -> None:
        while len(self._shared) > MAX_SALTS or (
            len(self._shared) > 1 and self.num_shared > self._capacity
        ):
            oldest, _ = self._shared.popitem(last=False)
            self._requests.pop(oldest, None)


class _SuffixState:
    def __init__(self, drafter: SuffixDrafter, text: Text, gram: int) -> None:
        self._drafter, self._text = drafter, text
        self._index = TokenIndex(gram, TEXT_CAPACITY)

    def propose(self, max_tokens: int) -> DraftOffer | None:
        drafter, index, tokens = self._drafter, self._index, self._text.tokens
        if not index.catch_up(tokens, drafter.budget):
            return None
        drafter.index_ended()
        own = index.search(tokens, drafter.depth, at_end=True)
        shared, other = drafter.shared(self._text.salt), NO_MATCHES
        if shared is not None:
            other = shared.search(tokens, drafter.depth)
        length = max(own.length, other.length)
        if not length:
            return None
        count = min(max_tokens, max(1, int(drafter.factor * length)))
        followers = _followers(index, own, length, count)
        if shared is not None:
            followers += _followers(shared, other, length, count)
        drafted, shares = _most_frequent(followers, count, drafter.min_prob)
        if not drafted:
            return None
        bucket = _bucket(length)
        keys = tuple(
            ("suffix", bucket, min(n, 3), min(int(4 * share), 3)) for n, share in enumerate(shares)
        )
        # Not the frequency itself, because a frequency in few occurrences is uncertain.
        priors = tuple(0.2 + 0.6 * share for share in shares)
        return DraftOffer("suffix", tuple(drafted), keys, priors)


def _followers(index: TokenIndex, found: Matches, length: int, count: int) -> list[list[int]]:
    """Return the tokens after each place of a match, if the match has `length` tokens."""
    if found.length < length:
        return []
    return [list(islice(index.after(end), count)) for end in found.ends]


def _most_frequent(
    followers: list[list[int]], max_tokens: int, min_prob: float
) -> tuple[list[int], list[float]]:
    """Append the most frequent next token of the followers that agree so far, again and again.
    Return the tokens and the share of each. The newest of equally frequent tokens wins."""
    drafted: list[int] = []
    shares: list[float] = []
    whole = 1.0
    while len(drafted) < max_tokens:
        at = len(drafted)
        counts: dict[int, int] = {}
        for one in followers:
            if at < len(one):
                counts[one[at]] = counts.get(one[at], 0) + 1
        if not counts:
            break
        token = max(counts, key=lambda token: counts[token])
        share = counts[token] / sum(counts.values())
        whole *= share
        if whole < min_prob:
            break
        drafted.append(token)
        shares.append(share)
        followers = [one for one in followers if at < len(one) and one[at] == token]
    return drafted, shares


# ── predicted output ────────────────────────────────────────────────────────────────────────


class PredictedDrafter(HostDrafter):
    name = "prediction"

    def __init__(self, budget: IndexBudget | None = None) -> None:
        self._budget = budget

    def open(self, text: Text) -> HostState | None:
        return _PredictedState(text, self._budget) if text.prediction else None

    def close(self, text: Text) -> None: ...


class _PredictedState:
    """Tracks the place of the output in the predicted text. After a difference, the end of the
    output is searched in the prediction, and the match nearest to the old place is taken."""

    def __init__(self, text: Text, budget: IndexBudget | None) -> None:
        self._text, self._budget = text, budget
        self._prediction = text.prediction
        self._index = TokenIndex(2, max(2, len(self._prediction)))
        self._at = 0  # the place in the prediction of the next token
        self._seen = text.num_prompt  # tokens of the text that were compared
        self._matched = 0  # equal tokens before the place

    def propose(self, max_tokens: int) -> DraftOffer | None:
        tokens, prediction = self._text.tokens, self._prediction
        for token in islice(tokens, self._seen, None):
            same = self._at < len(prediction) and prediction[self._at] == token
            self._matched = self._matched + 1 if same else 0
            self._at += 1
        self._seen = len(tokens)
        written = len(tokens) - self._text.num_prompt
        if written and not self._matched:
            if not self._index.catch_up(prediction, self._budget):
                return None
            found = self._index.search(tokens[-min(written, 32) :], 32)
            if not found.length:
                return None
            self._at = min(found.ends, key=lambda end: abs(end - self._at))
            self._matched = found.length
        drafted = tuple(prediction[self._at : self._at + max_tokens])
        if not drafted:
            return None
        bucket = _bucket(min(self._matched, 16))
        keys = tuple(("prediction", bucket, min(n, 3)) for n in range(len(drafted)))
        return DraftOffer("prediction", drafted, keys, (0.8,) * len(drafted))
