"""`Eviction`: which cache blocks a sequence gives up while it writes. No tensors.

With a budget of 6 blocks, of which the first holds the attention sinks:

    table of a prompt of 5 blocks         [ 5 | 8 | 7 | 3 | 9 ]
    a sixth is taken                      [ 5 | 8 | 7 | 3 | 9 | 2 ]
    the next needs room: entry 1 goes     [ 5 | 7 | 3 | 9 | 2 | 8 ]      8 was freed, and may return

Tables close up: a later position's cache index is its position less the entries that are gone. Keys
keep the rope angles of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SINK_BLOCKS = 1  # at the start of a sequence, never evicted
LEAST_BLOCKS = 4  # of a budget: the sinks, the block that is written, and some window between
STRETCH_TOKENS = 64  # cache entries that have a score together, as the native kernels have it
LEAST_STRETCHES = 4  # of a budget: the first, two of the newest, and one that can go


class Eviction(NamedTuple):
    """sinks (StreamingLLM): the oldest blocks after the first go. heavy-hitters (H2O): of the
    stretches between the first and the newest half of the budget, those that got the least
    attention go."""

    budget_blocks: int  # that a sequence holds at most, once its prompt has been computed
    stretch_blocks: int = 0  # that have a score together; 0: sinks

    def gone(self, num_blocks: int, scores: Sequence[float] = ()) -> list[range]:
        """Table entries to give up, so that a table of so many blocks is within the budget: the
        last first, so that taking out one range moves no other. `scores`: of each stretch, what is
        missing is 0; of equal ones the oldest goes."""
        excess, size = num_blocks - self.budget_blocks, self.stretch_blocks
        if excess <= 0:
            return []
        if not size:
            return [range(SINK_BLOCKS, SINK_BLOCKS + excess)]
        newest = self.budget_blocks // 2 // size
        known = [*scores, *([0.0] * (num_blocks // size - len(scores)))]
        others = range(1, num_blocks // size - newest)
        weakest = sorted(others, key=lambda n: (known[n], n))[: -(-excess // size)]
        return [range(n * size, (n + 1) * size) for n in sorted(weakest, reverse=True)]
