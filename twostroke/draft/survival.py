"""`Survival`: the probability that drafted tokens are accepted, from running counts.

Each drafted token has a key: its drafter, the length of the match, its place in the draft, and the
frequency that the drafter saw. A key has two counts: how often such a token was reached, and how
often it was right. Whether a draft is right depends on the text alone, never on its verification.
So the counts need no verification: every offer is compared with the text that is written later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

PRIOR_WEIGHT = 4.0  # of the drafter's own estimate, in tokens
REQUEST_WEIGHT = 8.0  # of the rate over all requests, in tokens, for the rate of one request
MAX_TRIALS = 400.0  # above this number, the counts are halved

Counts = dict[Hashable, list[float]]  # key → hits, trials


class Survival:
    """The counts of all requests. Those of a single request are passed in as `own`."""

    def __init__(self) -> None:
        self._counts: Counts = {}

    def add(self, key: Hashable, hit: bool, own: Counts) -> None:
        for counts in (self._counts, own):
            pair = counts.setdefault(key, [0.0, 0.0])
            pair[0] += hit
            pair[1] += 1.0
            if pair[1] > MAX_TRIALS:
                pair[0] *= 0.5
                pair[1] *= 0.5

    def rate(self, key: Hashable, prior: float, own: Counts) -> float:
        """Return the probability that a token with this key is right, if all before it are."""
        hits, trials = self._counts.get(key, (0.0, 0.0))
        rate = (hits + PRIOR_WEIGHT * prior) / (trials + PRIOR_WEIGHT)
        hits, trials = own.get(key, (0.0, 0.0))
        return (hits + REQUEST_WEIGHT * rate) / (trials + REQUEST_WEIGHT)

    def of_offer(
        self, keys: Sequence[Hashable], priors: Sequence[float], own: Counts
    ) -> list[float]:
        """Return the probability that each token is reached and right. It never grows."""
        survives, found = 1.0, []
        for key, prior in zip(keys, priors, strict=True):
            survives *= self.rate(key, prior, own)
            found.append(survives)
        return found
