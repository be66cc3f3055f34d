"""`BlockPool`: the owners of each block in the pool of one KV group. Numbers only, no tensors.

A block is in exactly one of three places:

    free       holds no useful data                       refs = 0
    cached     holds a registered prefix, without owner   refs = 0, least recently used first
    owned      used by tables, steps in flight, or both   refs > 0

Block 0 is the null block. It replaces blocks that have left a window, and has no owner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from twostroke.kv.prefix import PrefixIndex

NULL_BLOCK = 0


class BlockPool:
    """The blocks of one KV group, with reference counts and the prefix index."""

    def __init__(
        self,
        num_blocks: int,
        keep_cached: bool = True,
        on_evict: Callable[[int], None] | None = None,
    ) -> None:
        """Blocks 1 … num_blocks. Without `keep_cached` a prefix is dropped with its last owner.
        `on_evict`: called before a cached block is used for other data."""
        self.num_blocks = num_blocks
        self.prefix = PrefixIndex()
        self.refs = [0] * (num_blocks + 1)
        self._keep_cached, self._on_evict = keep_cached, on_evict
        self._free = list(range(num_blocks, 0, -1))  # a stack: low numbers first
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated now: free blocks, and cached blocks to evict."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one owner each. The caller has checked `num_available`."""
        free, refs = self._free, self.refs
        if count == 1 and free:  # the common case of decode
            block = free.pop()
            refs[block] = 1
            return [block]
        blocks = free[: -count - 1 : -1]  # from the end, in the order of `pop`
        del free[max(0, len(free) - count) :]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a registered block."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each block. Blocks released first are evicted first."""
        refs, free, prefix = self.refs, self._free, self.prefix
        for block in blocks:
            left = refs[block] = refs[block] - 1
            if left:
                continue
            if block in prefix:
                if self._keep_cached:
                    self._cached[block] = None
                    continue
                self._forget(block)
            free.append(block)

    def reset_prefixes(self) -> None:
        """Drop every registered prefix, so that no block is found again."""
        for block in range(1, self.num_blocks + 1):
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, block: int) -> None:
        self.prefix.forget(block)
        if self._on_evict is not None:
            self._on_evict(block)

    def check(self, owners: dict[int, int]) -> None:
        """Check that every block is in one place and has the owners in `owners`."""
        self.prefix.check()
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {free & cached}"
        for block in range(1, self.num_blocks + 1):
            refs = self.refs[block]
            assert refs == owners.get(block, 0), (
                f"block {block} claims {refs} owners and has {owners.get(block, 0)}"
            )
            assert (refs == 0) == (block in free or block in cached), (
                f"block {block} has {refs} owners and is "
                f"{'free' if block in free else 'cached' if block in cached else 'nowhere'}"
            )
        for block in free:
            assert block not in self.prefix, f"free block {block} is registered"
        for block in cached:
            assert block in self.prefix, f"cached block {block} is not registered"
        assert NULL_BLOCK not in owners, "the null block has an owner"
