"""`choose_depths`: how many drafted tokens of each row a step verifies.

The step's time grows with every verified token, and each verified token is worth the probability
that it becomes text. Tokens are taken in the order of that probability, and the number of tokens is
the one with the highest rate:

    rate(n) = (rows + sum of the n highest probabilities) / seconds(n)

n = 0 is one of the choices, so a draft that is not expected to save time is not verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_GAIN = 0.02  # of the rate; a smaller gain may be an error of the estimates


class Depths(NamedTuple):
    """The chosen depth of each offer, and what was expected of the step."""

    depths: list[int]
    expected: float = 0.0  # drafted tokens that become text
    gain: float = 0.0  # expected rate over the rate without drafts, minus 1


def choose_depths(
    survivals: Sequence[Sequence[float]],
    rows: int,
    seconds: Callable[[int], float | None],
    max_tokens: int,
    min_depth: int = 1,
    spent_s: float = 0.0,
) -> Depths:
    """Return the number of tokens of each offer to verify. `survivals`: of each offer, the
    probability that each token becomes text, never growing. `rows`: decode rows of the step, with
    and without offers. `seconds(n)`: the expected time of the step with n drafted tokens; None:
    unknown, which means no drafts. `spent_s`: the time that drafting has taken already."""
    depths = [0] * len(survivals)
    alone_s = seconds(0)
    if alone_s is None or not rows:
        return Depths(depths)
    # A stable sort keeps the positions of an offer in order where probabilities are equal.
    pairs = [(-p, n) for n, offer in enumerate(survivals) for p in offer]
    pairs.sort(key=lambda pair: pair[0])
    base = rows / (alone_s + spent_s)
    best_rate, best_count, best_tokens, tokens = base * (1 + MIN_GAIN), 0, 0.0, 0.0
    for count, (negative, _) in enumerate(pairs[:max_tokens], 1):
        tokens -= negative
        step_s = seconds(count)
        if step_s is None:
            break
        rate = (rows + tokens) / (step_s + spent_s)
        if rate > best_rate:
            best_rate, best_count, best_tokens = rate, count, tokens
    if not best_count:
        return Depths(depths)
    for _, n in pairs[:best_count]:
        depths[n] += 1
    for n, depth in enumerate(depths):
        if depth < min_depth:
            best_tokens -= sum(survivals[n][:depth])
            depths[n] = 0
    return Depths(depths, best_tokens, best_rate * alone_s / rows - 1)
