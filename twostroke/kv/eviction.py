"""`Eviction`: chooses the cache blocks that a sequence evicts while it decodes.

Example with a budget of 6 blocks. The first block has the attention sinks and is never evicted:

    block table after a prompt of 5 blocks             [ 5 | 8 | 7 | 3 | 9 ]
    decode needs a sixth block and gets block 2        [ 5 | 8 | 7 | 3 | 9 | 2 ]
    decode needs a seventh block: block 8 is evicted   [ 5 | 7 | 3 | 9 | 2 ]
    and appended as the new block                      [ 5 | 7 | 3 | 9 | 2 | 8 ]

Evicted entries are removed from the table. So the cache index of a token is its position minus the
number of evicted tokens before it. Keys keep the rope angles of their original positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SINK_BLOCKS = 1  # at the start of a sequence, never evicted
MIN_BLOCKS = 4  # minimum budget: a block of sinks, the block being written, two more
SEGMENT_TOKENS = 64  # cache entries that share a score; equal to `kSplit` of the native kernels
MIN_SEGMENTS = 4  # minimum budget: the first segment, the two newest, and one to evict


class Eviction(NamedTuple):
    """An eviction policy and its budget.

    sinks (StreamingLLM, `segment_blocks` is 0): evict the oldest blocks after the first block.
    heavy-hitters (H2O): evict the segments with the lowest attention score. The first segment and
    the newest segments, which are half of the budget, are never evicted.
    """

    budget_blocks: int  # maximum number of blocks of a sequence once its prompt is computed
    segment_blocks: int = 0  # blocks in a segment, which has one score; 0: the policy is sinks

    def evicted(self, num_blocks: int, scores: Sequence[float] = ()) -> list[range]:
        """Return the ranges of table entries to evict, so that a table of `num_blocks` entries fits
        in the budget. The ranges are in descending order: removing one does not move the next.

        `scores`: one for each segment; missing scores are 0. Of equal scores the oldest segment is
        evicted first.
        """
        excess = num_blocks - self.budget_blocks
        if excess <= 0:
            return []
        if not self.segment_blocks:
            return [range(SINK_BLOCKS, SINK_BLOCKS + excess)]
        size = self.segment_blocks
        num_segments, num_newest = num_blocks // size, self.budget_blocks // 2 // size
        all_scores = [*scores, *([0.0] * (num_segments - len(scores)))]
        candidates = range(1, num_segments - num_newest)
        num_evicted = -(-excess // size)  # rounded up
        lowest = sorted(candidates, key=lambda n: (all_scores[n], n))[:num_evicted]
        return [range(n * size, (n + 1) * size) for n in sorted(lowest, reverse=True)]
