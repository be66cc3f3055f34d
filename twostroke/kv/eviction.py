"""`Eviction`: the choice of the cache blocks that a sequence evicts while it decodes. No tensors.

A budget of 6 blocks; the first block holds the attention sinks:

    table of a prompt of 5 blocks         [ 5 | 8 | 7 | 3 | 9 ]
    a sixth block is allocated            [ 5 | 8 | 7 | 3 | 9 | 2 ]
    entry 1 is evicted for the next one   [ 5 | 7 | 3 | 9 | 2 | 8 ]      8 was freed and reused

Evicted entries are removed from the table: the cache index of a later position is the position
minus the evicted entries. Keys keep the rope angles of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SINK_BLOCKS = 1  # at the start of a sequence, never evicted
MIN_BLOCKS = 4  # minimum budget: sinks, the block being written, and a window
SEGMENT_TOKENS = 64  # cache entries that share a score; `kSplit` of the native kernels
MIN_SEGMENTS = 4  # minimum budget: the first, two of the newest, and one to evict


class Eviction(NamedTuple):
    """An eviction policy. sinks (StreamingLLM): evict the oldest blocks after the first.
    heavy-hitters (H2O): evict the segments with the least attention, between the first segment and
    the newest half of the budget."""

    budget_blocks: int  # maximum of a sequence after its prompt is computed
    segment_blocks: int = 0  # blocks that share a score; 0: sinks

    def evicted(self, num_blocks: int, scores: Sequence[float] = ()) -> list[range]:
        """Return the table entries to evict so that a table of `num_blocks` is within the budget,
        last first, so that removing a range moves no other range. `scores`: one per segment, 0
        where missing. Among equal scores the oldest segment is evicted."""
        excess, size = num_blocks - self.budget_blocks, self.segment_blocks
        if excess <= 0:
            return []
        if not size:
            return [range(SINK_BLOCKS, SINK_BLOCKS + excess)]
        newest = self.budget_blocks // 2 // size
        known = [*scores, *([0.0] * (num_blocks // size - len(scores)))]
        others = range(1, num_blocks // size - newest)
        weakest = sorted(others, key=lambda n: (known[n], n))[: -(-excess // size)]
        return [range(n * size, (n + 1) * size) for n in sorted(weakest, reverse=True)]
